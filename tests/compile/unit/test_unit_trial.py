"""The trial of whole units: forwards and backwards are timed, and the faster form keeps the unit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ort_zero
from ort_zero.runtimes.agreement import Agreement, agreement
from ort_zero.runtimes.runner import Runner
from ort_zero.runtimes.unit_trial import UnitTrial
from ort_zero.units.running_model import _models
from ort_zero.units.unit_forward import UnitRunner, is_compiled, replace_forward


class Clock:
    """Time that passes only within the two forms of a unit."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def form(self, forward: float, backward: float):
        """Return a form of a unit, doubling its input, that takes these seconds."""
        clock = self

        class Doubling(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                clock.now += forward
                return 2 * x

            @staticmethod
            def backward(ctx, gradient):
                clock.now += backward
                return 2 * gradient

        return lambda unit, x: Doubling.apply(x)


def step(module: nn.Module) -> None:
    """Run a forward and a backward, of an input that is not a leaf."""
    x = torch.ones(3, requires_grad=True)
    module(x + 1).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def unit_with(
    clock: Clock, trial: UnitTrial, compiled: tuple[float, float], original: tuple[float, float]
) -> nn.Module:
    """Return a unit with two forms that take these seconds for a forward and a backward."""
    unit = nn.Identity()
    own = clock.form(*original)
    unit.forward = lambda x: own(unit, x)  # type: ignore[method-assign]
    form = clock.form(*compiled)

    class Timed(UnitRunner):
        def form(self, unit, function, runner=None):
            return form

        def trial_of(self, unit, inputs):
            return trial

    replace_forward(unit, Timed())
    return unit


@pytest.mark.parametrize(
    "compiled, original, slowdown, faster",
    [
        ((1.0, 2.0), (1.0, 3.0), 1.0, Runner.ONNXRUNTIME),
        ((1.0, 3.0), (1.0, 2.0), 1.0, Runner.TORCH),
        ((2.0, 1.0), (1.0, 1.0), 1.0, Runner.TORCH),
        ((1.0, 1.0), (2.0, 1.0), 1.0, Runner.ONNXRUNTIME),
        ((1.0, 2.5), (1.0, 2.0), 1.25, Runner.ONNXRUNTIME),
        ((1.0, 3.0), (1.0, 2.0), 1.25, Runner.TORCH),
    ],
)
def test_the_faster_form_keeps_the_unit(tmp_path, compiled, original, slowdown, faster):
    clock = Clock()
    trial = UnitTrial("unit", Agreement(tmp_path), clock=clock, slowdown=slowdown)
    unit = unit_with(clock, trial, compiled, original)
    for _ in range(40):
        step(unit)
    assert trial.runner is faster and is_compiled(unit) is (faster is Runner.ONNXRUNTIME)
    assert UnitTrial("unit", Agreement(tmp_path)).runner is faster, "the next start does not time again"


THREE = Runner.ONNXRUNTIME, Runner.INDUCTOR, Runner.TORCH


def decided(seconds: dict[Runner, tuple[float, float]], **options) -> tuple[UnitTrial, int]:
    """Return the trial of a unit whose forms take these seconds, and the number of calls until its decision."""
    clock = Clock()
    trial = UnitTrial("unit", Agreement(), tuple(seconds), clock, **options)
    forms = {runner: clock.form(*times) for runner, times in seconds.items()}
    calls = 0
    while trial.runner is None:
        calls += 1
        runner = trial.turn()
        x = torch.ones(3, requires_grad=True)
        trial.run(runner, forms[runner], nn.Identity(), (x + 1,), {}).sum().backward()
    return trial, calls


@pytest.mark.parametrize("fastest", THREE)
def test_the_fastest_of_three_runs_the_unit(fastest: Runner):
    trial, calls = decided({runner: (1.0, 2.0 if runner is fastest else 2.5) for runner in THREE})
    assert trial.runner is fastest and calls >= 36
    assert trial.milliseconds == {each.value: 3000.0 if each is fastest else 3500.0 for each in THREE}
    assert "500.00 ms less" in trial.reason


def test_a_form_that_is_slower_by_far_is_left_out_early():
    trial, calls = decided(dict(zip(THREE, ((2.0, 3.0), (1.0, 2.0), (1.0, 1.9)), strict=True)))
    assert trial.runner is Runner.TORCH and 12 + 2 * 8 <= calls < 36
    trial, calls = decided(dict(zip(THREE, ((2.0, 3.0), (2.0, 3.0), (1.0, 2.0)), strict=True)))
    assert trial.runner is Runner.TORCH and calls < 20


def test_a_runner_that_fails_is_left_out():
    trial = UnitTrial("unit", Agreement(), THREE)
    trial.leave_out(Runner.INDUCTOR, "it failed")
    assert {trial.turn() for _ in range(20)} == {Runner.ONNXRUNTIME, Runner.TORCH} and trial.runner is None
    x = torch.ones(3, requires_grad=True)
    waiting = trial.run(Runner.TORCH, lambda unit, x: x * 2, nn.Identity(), (x + 1,), {})
    trial.leave_out(Runner.ONNXRUNTIME, "it saves too little")
    assert trial.runner is Runner.TORCH, "nothing else is left"
    assert trial.reason == "ONNX Runtime is left out: it saves too little"
    waiting.sum().backward()
    trial = UnitTrial("unit", Agreement(), THREE)
    trial.leave_out(Runner.ONNXRUNTIME, "it saves too little")
    trial.run(Runner.INDUCTOR, lambda unit, x: x * 2, nn.Identity(), (torch.ones(3),), {})
    assert trial.runner is Runner.TORCH, "Inductor is not chosen without a time"
    trial, _ = decided({runner: (1.0, 2.0 if runner is Runner.INDUCTOR else 2.5) for runner in THREE})
    trial.leave_out(Runner.INDUCTOR, "its graphs failed")
    assert trial.runner is Runner.TORCH
    assert UnitTrial("unit", Agreement(), [Runner.ONNXRUNTIME]).runner is Runner.ONNXRUNTIME, "it is the only one"


@pytest.mark.parametrize("takes_gradient", [True, False])
def test_a_unit_without_backwards_stays_compiled(takes_gradient: bool):
    clock = Clock()
    trial = UnitTrial("unit", Agreement(), clock=clock)
    unit = unit_with(clock, trial, (2.0, 2.0), (1.0, 1.0))
    for _ in range(130):
        unit(torch.ones(3, requires_grad=takes_gradient))
    assert trial.runner is Runner.ONNXRUNTIME and is_compiled(unit)
    assert (clock.now < 2 * 130) is takes_gradient, "what cannot be timed is not tried in PyTorch"


def test_what_is_checkpointed_is_not_timed():
    clock = Clock()
    trial = UnitTrial("unit", Agreement(), clock=clock)
    unit = unit_with(clock, trial, (2.0, 2.0), (1.0, 1.0))
    for _ in range(40):
        x = torch.ones(3, requires_grad=True)
        checkpoint(unit, x + 1, use_reentrant=False).sum().backward()
    assert trial.runner is None and is_compiled(unit) and clock.now == 40 * (2 + 2)


class Layer(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def trained(model: nn.Module, steps: int, rows: int = 2, **section) -> dict:
    """Train a wrapped copy of a model; return its status."""
    ours = ort_zero.wrap(copy.deepcopy(model), backend="compile", **section)
    for _ in range(steps):
        x = torch.randn(rows, 64)
        wanted, results = (each(x.clone().requires_grad_()) for each in (model, ours))
        torch.testing.assert_close(results, wanted)
        results.square().mean().backward()
    return _models[ours].status()


def test_a_later_start_leaves_to_pytorch_at_once_what_was_slower(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))  # for two rows of 64 compiled code takes longer than PyTorch

    def start(steps: int, **options) -> dict:
        agreement.cache_clear()  # as a new process
        return trained(model, steps, **options)

    first = start(40)
    assert first["compiled"]["graphs"] and first["runners"]["Layer"]["units"] == {"torch": 3}
    capfd.readouterr()
    again = start(1)
    assert again["compiled"]["graphs"] == 0 and again["graph_runs"] == {} and again["fallbacks"] == 0
    assert again["compiled"]["settled"] and again["backend"] == "torch"
    assert again["compiled"]["units_in_torch"] == {"Layer": "it was faster at an earlier start"}
    said = capfd.readouterr().err
    assert "PyTorch runs Layer from now on: it was faster at an earlier start" in said
    assert "Sequential runs in PyTorch, which is faster" in said, "the model is announced though no graph runs"
    for other in ({"compile": {"place": "ort"}}, {"save_onnx": str(tmp_path / "models")}, {"rows": 64}):
        assert start(1, **other)["graph_runs"]["forward"] == 3, f"{other}: all units are compiled"
    wider = start(1, rows=3)
    assert wider["compiled"]["graphs"] == 0, "sizes count by powers of two"


def test_units_without_training_calls_and_graphs_of_rare_sizes_hold_nothing_up(tmp_path, monkeypatch):
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path))
    agreement.cache_clear()

    class Tower(nn.Module):
        """A frozen layer without gradients, a layer that is never called, and one that trains."""

        def __init__(self):
            super().__init__()
            self.frozen, self.unused, self.trained = Layer(), Layer(), Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                seen = self.frozen(x)
            return self.trained(x) + seen.sum()

    assert trained(Tower(), 60)["compiled"]["settled"]
    ours = ort_zero.wrap(Layer(), backend="compile")
    for rows in [3] + 560 * [2]:  # the first size has a graph of its own, and never comes again
        ours(torch.randn(rows, 64, requires_grad=True)).sum().backward()
    assert _models[ours].status()["compiled"]["settled"]
