"""A model that is changed after it was compiled runs as Python would run it now: hooks, methods, modules, weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mutations
import pytest
import torch
from mutations import HOOKS, OF_THE_MODEL, OF_THE_PROCESS, OF_THE_WEIGHTS
from torch import nn

import ort_zero


def _step(model: nn.Module) -> tuple[dict[str, torch.Tensor | None], list[str]]:
    """Return result and gradients of a forward and a backward, and the hooks that were called."""
    x = torch.linspace(-1, 1, 4 * mutations.WIDTH, dtype=next(model.parameters()).dtype).reshape(4, -1).requires_grad_()

    def run() -> dict[str, torch.Tensor | None]:
        model.zero_grad()
        torch.manual_seed(11)
        y = model(x)
        y.square().sum().backward()
        names = {"result": y.detach(), "input": x.grad}
        return names | {name.removeprefix("_orig_mod."): each.grad for name, each in model.named_parameters()}

    return mutations.results_of(run)


def _assert_same(plain: nn.Module, ours: nn.Module) -> None:
    (wanted, wanted_calls), (values, calls) = _step(plain), _step(ours)
    assert calls == wanted_calls
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        found = values[name]
        assert (found is None) == (value is None), name
        if value is not None:
            assert torch.allclose(found, value, rtol=1e-4, atol=1e-5 * float(value.abs().max())), name


def _try(mutation: mutations.Mutation, of_process: bool, prepare: Callable[[nn.Module], nn.Module]) -> int:
    """Run a plain and a prepared model before, during and after a change; return the backwards in ONNX Runtime."""
    plain = mutations.stack()
    ours = prepare(copy.deepcopy(plain))
    inside: Any = getattr(ours, "_orig_mod", ours)
    for _ in range(2):
        _assert_same(plain, ours)
    undo = mutation(plain)
    undo_ours = None if of_process else mutation(inside)
    try:
        for _ in range(2):
            _assert_same(plain, ours)
    finally:
        for each in (undo, undo_ours):
            if each is not None:
                each()
    if undo is not None:
        _assert_same(plain, ours)
    return ort_zero.status()["models"][-1]["graph_runs"]["backward"]


def _wrapped(model: nn.Module) -> nn.Module:
    return ort_zero.wrap(model, backend="compile", compile={"place": "ort"}, log_level="WARNING")


@pytest.mark.parametrize("name", [*HOOKS, *OF_THE_MODEL, *OF_THE_WEIGHTS])
def test_a_wrapped_model_runs_with_its_changes(name):
    runs = _try({**HOOKS, **OF_THE_MODEL, **OF_THE_WEIGHTS}[name], False, _wrapped)
    assert runs >= 12, "ONNX Runtime runs the other units in any case"


@pytest.mark.parametrize("name", OF_THE_PROCESS)
def test_a_wrapped_model_runs_with_what_holds_for_all_models(name):
    assert _try(OF_THE_PROCESS[name], True, _wrapped) >= 9, "ONNX Runtime ran the model before and afterwards"


@pytest.mark.parametrize("name", ["weight norm", "layer replaced", "weight frozen", "instance: attribute"])
def test_a_model_under_torch_compile_runs_with_its_changes(name):
    _try({**OF_THE_WEIGHTS, **OF_THE_MODEL}[name], False, lambda model: torch.compile(model, backend="ort_zero"))


def test_a_replaced_method_is_told_once(monkeypatch, caplog):
    model = _wrapped(mutations.stack())
    _step(model)
    monkeypatch.setattr(mutations.Mlp, "scaled", lambda self, x: x * 2)
    for _ in range(2):
        _step(model)
    (line,) = [record.getMessage() for record in caplog.records if "was replaced" in record.getMessage()]
    assert "Mlp" in line and "ort_zero.wrap(model) once more" in line
