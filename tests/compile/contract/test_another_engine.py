"""Units do not know the compile backend: an engine that runs captured graphs in its own autograd Function has all."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ort_zero import log
from ort_zero.errors import ExportError
from ort_zero.placement.agreement import agreement
from ort_zero.units.engine import Engine, UnitGraph
from ort_zero.units.finding import find_units
from ort_zero.units.running_model import UnitsModel
from ort_zero.units.unit_forward import is_compiled

KEYS = ("graphs of Block",)


class WholeGraph(torch.autograd.Function):
    """Runs a graph, and in the backward once more; it has no second derivative."""

    @staticmethod
    def forward(ctx, graph, engine, *inputs):
        ctx.graph, ctx.engine, ctx.inputs = graph, engine, inputs
        return tuple(graph(*inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ctx.engine.runs["backward"] += 1
        inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in ctx.inputs]
        leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        with torch.enable_grad():
            results = ctx.graph(*inputs)
        ours = iter(torch.autograd.grad(results, leaves, gradients))
        return None, None, *(next(ours) if any(x is leaf for leaf in leaves) else None for x in inputs)


class Compiler:
    def __init__(self, engine: WholeGraphs, unit_class: str):
        self.engine, self.unit_class = engine, unit_class
        self.recompilations = engine.recompilations_of(unit_class)

    def __call__(self, module: Any, example_inputs: Any, **options: Any) -> Callable[..., Any]:
        if self.engine.refuses:
            raise ExportError("such graphs are refused")
        self.engine.dynamo_graphs += 1
        self.engine.add(UnitGraph("forward", self.unit_class, self.recompilations.note_graph()))

        def run(*inputs: Any) -> Any:
            self.engine.end_step()
            self.engine.runs["forward"] += 1
            return WholeGraph.apply(module.forward, self.engine, *inputs)

        return run

    def forward_of(self, unit: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return compiled


class WholeGraphs(Engine[UnitGraph]):
    """The engine; `slowdown` is the factor that units may cost."""

    name, graph_node = "whole graphs", "WholeGraph"

    def __init__(self, slowdown: float = 1e9, refuses: bool = False):
        super().__init__()
        self.slowdown, self.refuses = slowdown, refuses
        self.first_steps: list[str] = []

    def compiler(self, unit_class: str, exclude: tuple[str, ...]) -> Compiler:
        return Compiler(self, unit_class)

    def timed_keys(self, unit: nn.Module, unit_class: str) -> tuple[str, ...]:
        return KEYS

    def goes_to_torch(self, unit: nn.Module, unit_class: str) -> bool:
        return False

    def after_first_step(self, module: str) -> bool:
        self.first_steps.append(module)
        return False

    def is_settled(self, units_are_settled: bool) -> bool:
        return units_are_settled

    def status(self, units_are_settled: bool) -> dict[str, Any]:
        return {"settled": units_are_settled}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def plain_and_run_by(engine: WholeGraphs) -> tuple[nn.Module, nn.Module, UnitsModel]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(3)))
    ours = copy.deepcopy(plain)
    return plain, ours, UnitsModel(ours, engine, find_units(ours), 0, False)


def assert_equal_steps(plain: nn.Module, ours: nn.Module, sizes: list[int]) -> None:
    for size in sizes:
        x = torch.randn(size, 8)
        for model in (plain, ours):
            model.zero_grad(set_to_none=True)
            model(x.clone().requires_grad_() + 1).square().mean().backward()
        for wanted, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad)


def test_an_engine_trains_and_reports():
    engine = WholeGraphs()
    plain, ours, model = plain_and_run_by(engine)
    announced: list[Any] = []
    model.announce = announced.append
    assert_equal_steps(plain, ours, [4, 4, 6])
    status = model.status()
    assert (status["engine"], status["units"], status["settled"]) == ("whole graphs", ["0", "1", "2"], False)
    assert status["graph_runs"] == {"forward": 9, "backward": 9} and not status["failures"]
    assert announced == [model] and engine.first_steps == ["Sequential"]
    first, second = (graph.text() for graph in engine.graphs)
    assert first == "forward" and second.startswith("forward; made since size 0 of x")
    (change,) = status["transitions"]
    assert (change["unit"], change["mode"]) == ("Block", "training") and "size 0 of x is 6, was 4" in change["reason"]


@pytest.mark.parametrize("slowdown", [1e9, 0.0])
def test_units_stay_while_they_cost_at_most_the_engines_factor(slowdown: float, tmp_path, monkeypatch, capsys):
    log.set_level("INFO")
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path / str(slowdown)))
    plain, ours, model = plain_and_run_by(WholeGraphs(slowdown))
    agreement.cache_clear()
    assert_equal_steps(plain, ours, [4] * 80)
    agreement.cache_clear()
    assert model.status()["settled"]
    said = "PyTorch runs Block 0 and its equals from now on: a forward and a backward take "
    assert [line.count(said) for line in capsys.readouterr().err.splitlines()] == [1] * (not slowdown)
    assert [is_compiled(unit) for unit in model.unit_modules()] == [slowdown > 0] * 3
    assert model.engine.units_in_torch.keys() == (set() if slowdown else {"Block"})


def test_second_derivatives_are_pytorchs():
    plain, ours, model = plain_and_run_by(WholeGraphs())
    x = torch.randn(4, 8)
    penalties = []
    for each in (plain, ours):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(each(leaf).square().sum(), leaf, create_graph=True)
        gradient.square().sum().backward()
        penalties.append([parameter.grad for parameter in each.parameters()])
    torch.testing.assert_close(penalties[1], penalties[0])
    assert "create_graph=True" in model.status()["fallback_reason"]


def test_what_an_engine_refuses_runs_in_pytorch():
    plain, ours, model = plain_and_run_by(WholeGraphs(refuses=True))
    assert_equal_steps(plain, ours, [4, 4])
    status = model.status()
    assert set(status["failures"]) == {"0", "1", "2"} and not status["units"] and not status["graph_runs"]
    assert all("such graphs are refused" in reason for reason in status["failures"].values())


def test_a_model_without_replaced_forwards_is_freed_without_a_collection():
    plain, ours, model = plain_and_run_by(WholeGraphs())
    freed = weakref.ref(model)
    gc.disable()
    try:
        model.fallback_reason = "a test"  # the units have their own forwards back
        del plain, ours, model
        assert freed() is None
    finally:
        gc.enable()
