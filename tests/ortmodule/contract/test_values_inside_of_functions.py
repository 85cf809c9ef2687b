"""Values that functions of PyTorch take from tensors, or functions that they are given: another value counts."""

from __future__ import annotations

import pytest
import torch
from side_by_side import Net, batch, run_side_by_side
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


def model(forward):
    return type("Model", (Net,), {"forward": forward})()


def test_a_check_of_a_function_of_pytorch():
    def forward(self, x, variance):
        return F.gaussian_nll_loss(Net.forward(self, x), x[:, :3], variance)

    module = model(forward)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), 0)
    for value in (0.5, 2.0):
        wrapped(batch(0), torch.full((4, 3), value)).backward()
    with pytest.raises(ValueError, match="negative entry"):
        wrapped(batch(0), torch.full((4, 3), -1.0))
    wrapped(batch(0), torch.full((4, 3), 3.0))
    status = runtime.status()
    assert status["fallbacks"] == 0 and status["graphs"]["training"]["exports"] == 1


FORWARDS = {
    "a function that is given": lambda self, x: F.triplet_margin_with_distance_loss(
        Net.forward(self, x), x[:, :3], x[:, 3:],
        distance_function=lambda a, b: (a - b).norm(dim=-1) * (3 if x.sum() > 0 else 1),
    ),
    "format": lambda self, x: Net.forward(self, x) * len(f"{(x.sum() > 0) * 1000:.0f}"),
    "repr": lambda self, x: Net.forward(self, x) * len(str(x.sum() > 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
def test_reads(name):
    def step(call, module, number):
        x = batch(0) * (-1) ** number
        loss = call(x).square().mean()
        loss.backward()
        return [loss]

    run_side_by_side(lambda: model(FORWARDS[name]), step, steps=3)


def test_messages_do_not_count(capsys):
    def forward(self, x):
        print(x.sum())
        print(f"{x.sum():.3f}")
        return Net.forward(self, x)

    status = run_side_by_side(lambda: model(forward))
    assert status["graphs"]["training"]["exports"] == 1 and not status["in_torch"]
