"""What one rank decides alone about its graphs or their place leaves the gradients of all ranks as in PyTorch.

Rank 1 sees the same kind of batch at every step. Rank 0 sees others, so that it builds, divides or keeps other graphs.
The gradients of the ranks must still meet those of the same parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from launch_once import once
from rank_processes.ranks import run_on_ranks
from torch import nn

import ort_zero

STEPS = 6
WIDTH = 6
BUCKET = 60
"""Elements of a bucket of gradients: a block fills more than one, so that order and sizes of reductions matter."""
SETTINGS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero1": (1, 1, {}),
    "zero1-overlap": (1, 1, {"overlap_comm": True}),
    "zero2": (2, 1, {}),
    "zero2-overlap": (2, 1, {"overlap_comm": True, "reduce_bucket_size": BUCKET}),
    "zero2-not-contiguous": (2, 1, {"contiguous_gradients": False}),
    "zero2-accumulation": (2, 2, {}),
    "ddp": (0, 1, {}),
    "zero3": (3, 1, {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": BUCKET}),
    "zero3-overlap": (3, 1, {"stage3_param_persistence_threshold": 0, "overlap_comm": True}),
    "zero3-accumulation": (3, 2, {"stage3_param_persistence_threshold": 0}),
}
"""ZeRO stage, steps of accumulation and keys of ``zero_optimization``; stage 0 is DistributedDataParallel of torch."""
COMMON = ("zero2-overlap", "zero2-accumulation", "ddp", "zero3")
OTHERS = tuple(setting for setting in SETTINGS if setting not in COMMON)
SECTION: dict[str, Any] = {"enabled": True, "backend": "compile", "compile": {"place": "ort"}}


class Layers(nn.Module):
    """Layers of one width, whose gradients ZeRO-2 could add up in any order without an error."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        self.scale = 1.0

    def forward(self, x, length=None, mask=None, unusual=False):
        if length is not None:
            x = x[:, : int(length.max())]
        for block in self.blocks:
            x = block(torch.tanh(x))
        if unusual:
            x = torch.linalg.matrix_exp(x[..., :WIDTH].transpose(1, 2) @ x / 100) @ x.transpose(1, 2)
        if mask is not None:
            x = x * mask
        return (x - self.scale).pow(2).mean()


def _inputs(step: int) -> torch.Tensor:
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def value(model: Any, whole: Layers, step: int) -> torch.Tensor:
    """Slice by a value, which changes on rank 0: after a few of them it divides its graph."""
    changes = torch.distributed.get_rank() == 0
    return model(_inputs(step), torch.tensor([8 - step % 6 if changes else 8]))


def sizes(model: Any, whole: Layers, step: int) -> torch.Tensor:
    """Give rank 0 other sizes, among them 1."""
    changes = torch.distributed.get_rank() == 0
    return model(_inputs(step)[:, : (8, 5, 1, 3)[step % 4] if changes else 8])


def attribute(model: Any, whole: Layers, step: int) -> torch.Tensor:
    """Change a number of the model on rank 0, which builds a graph for each."""
    if torch.distributed.get_rank() == 0:
        whole.scale = 1.0 + step / 10
    return model(_inputs(step))


def operator(model: Any, whole: Layers, step: int) -> torch.Tensor:
    """Have rank 0 call an operator that ONNX lacks."""
    return model(_inputs(step), unusual=torch.distributed.get_rank() == 0 and step > 2)


def arguments(model: Any, whole: Layers, step: int) -> torch.Tensor:
    """Give rank 0 another argument at every second step: it has two graphs, and keeps both."""
    return model(_inputs(step), mask=torch.ones(1) if torch.distributed.get_rank() == 0 and step % 2 else None)


def evaluation(model: Any, whole: Layers, step: int) -> torch.Tensor:
    """Evaluate on rank 0 alone before each forward; the graph shares the export of the training's."""
    if torch.distributed.get_rank() == 0:
        whole.eval()
        with torch.no_grad():
            whole(_inputs(step)[:1])
        whole.train()
    return model(_inputs(step))


DECISIONS: dict[str, Callable[[Any, Layers, int], torch.Tensor]] = {
    each.__name__: each for each in (value, sizes, attribute, operator, arguments, evaluation)
}


def _train(decision: str, setting: str, in_ort: bool) -> dict[str, Any]:
    stage, accumulation, zero = SETTINGS[setting]
    whole, loss_of = Layers(), DECISIONS[decision]
    if stage == 0:
        options = {key: value for key, value in SECTION.items() if key != "enabled"}
        inner = ort_zero.wrap(whole, **options) if in_ort else whole
        model = nn.parallel.DistributedDataParallel(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        config = ds_config(stage, ort=None, gas=accumulation, **zero)
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        if in_ort:
            config["ort_zero"] = copy.deepcopy(SECTION)
        import deepspeed

        model = deepspeed.initialize(model=whole, model_parameters=list(whole.parameters()), config=config)[0]
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, whole, step)
        losses.append(loss.item())
        if stage == 0:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            model.backward(loss)
            model.step()
    report = {"losses": losses, "parameters": full_parameters(whole), "models": ort_zero.status()["models"]}
    if stage:
        model.destroy()
    return report


def cases(settings: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each decision under each setting, but an evaluation on one rank where all ranks must call gathers."""
    return [
        (decision, setting)
        for setting in settings
        for decision in DECISIONS
        if decision != "evaluation" or not setting.startswith("zero3")
    ]


def both(settings: tuple[str, ...]) -> dict[tuple[str, str], tuple[dict, dict]]:
    """Return PyTorch's report and ours for each decision under each setting."""
    start()
    return {case: (_train(*case, False), _train(*case, True)) for case in cases(settings)}


@once
def _launch(settings: tuple[str, ...]) -> list[dict]:
    return run_on_ranks(both, 2, settings, timeout=1200)


def assert_alike(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert ours["models"][-1]["backend"] == "onnxruntime", ours["models"]
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=2e-4, atol=2e-6)
    torch.testing.assert_close(ours["parameters"], theirs["parameters"], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("settings", "case"),
    [pytest.param(COMMON, case, id=" ".join(case)) for case in cases(COMMON)]
    + [pytest.param(OTHERS, case, id=" ".join(case), marks=pytest.mark.slow) for case in cases(OTHERS)],
)
def test_gradients_are_those_of_pytorch(settings: tuple[str, ...], case: tuple[str, str]):
    for reports in _launch(settings):
        assert_alike(*reports[case])
