"""Normalisation has the running statistics and counts of PyTorch, also where another graph had to run for a call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

STEPS = 6


class CountsByItself(nn.BatchNorm1d):
    """Counts its batches with ``+=``, and normalises with a function of torch."""

    def forward(self, x):
        if self.training:
            self.num_batches_tracked += 1
        statistics = self.running_mean, self.running_var, self.weight, self.bias
        return nn.functional.batch_norm(x, *statistics, self.training, self.momentum, self.eps)


KINDS = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "cumulative average": lambda: nn.BatchNorm1d(6, momentum=None),
    "without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "counts by itself": lambda: CountsByItself(6),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()
    ),
}


class Model(nn.Module):
    """A layer, the normalisation, and a layer; with a branch on values that takes the other way from step 3 on."""

    def __init__(self, kind, branches):
        super().__init__()
        self.branches = branches
        self.first, self.norm, self.last = nn.Linear(6, 6), KINDS[kind](), nn.Linear(6, 2)

    def forward(self, x):
        y = self.norm(self.first(x))
        if self.branches and x.mean() > 0:
            y = y * 2
        return self.last(y).pow(2).mean()


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("branches", [False, True], ids=["", "branches"])
@pytest.mark.parametrize("exclude", [(), ("norm",)], ids=["in the graph", "excluded"])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_and_counts_are_those_of_pytorch(kind, exclude, branches, gradients):
    torch.manual_seed(0)
    reference = Model(kind, branches)
    model = copy.deepcopy(reference)
    runtime, wrapped = wrap_model(model, config.OrtModuleConfig(exclude=list(exclude)), stage=0)
    for step in range(STEPS):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)) + (1 if step < 3 else -1)
        with torch.set_grad_enabled(gradients):
            expected, got = reference(x), wrapped(x)
        torch.testing.assert_close(got, expected)
        if gradients:
            expected.backward(), got.backward()
        for (name, buffer), other in zip(reference.named_buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(other, buffer, msg=lambda m, name=name, step=step: f"{name} at {step}: {m}")
    for one, other in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    status = runtime.status()
    graph = status["graphs"]["training" if gradients else "inference"]
    assert status["backend"] == "onnxruntime" and graph["runs"]["forward"] >= STEPS
    assert graph["exports"] > 1 if branches else graph["runs"]["forward"] == STEPS or kind == "cumulative average"


class BothModes(nn.Module):
    """Calls one normalisation in both modes, and leaves another one in eval mode."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6)

    def forward(self, x):
        x = self.layer(x)
        noisy = self.norm(x)
        self.norm.eval()
        clean = self.norm(2 * x)
        self.norm.train()
        result = self.last(noisy + clean).pow(2).sum()
        self.last.eval()
        return result


def test_a_normalisation_in_both_modes_of_one_forward():
    module = BothModes()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for step in range(4):
        if step == 2:
            module.train(), reference.train()
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        for model in (wrapped, reference):
            model.zero_grad()
            model(x).backward()
        torch.testing.assert_close(dict(module.named_buffers()), dict(reference.named_buffers()))
        torch.testing.assert_close(module.layer.weight.grad, reference.layer.weight.grad, atol=1e-4, rtol=1e-4)
        assert [m.training for m in module.modules()] == [m.training for m in reference.modules()]
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}
    assert "norm" in runtime.status()["in_torch"]
