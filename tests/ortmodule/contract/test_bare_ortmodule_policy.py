"""The fallback policy of ORTModule's users: set, it is upstream's contract; not set, ONNX Runtime runs what it can."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ort_zero
from ort_zero.errors import ExportError


@pytest.fixture(scope="module")
def ortmodule():
    """The package of ORTModule, imported after ort_zero was enabled."""
    ort_zero.enable()
    import onnxruntime.training.ortmodule as package

    yield package
    ort_zero.disable()


@pytest.fixture(autouse=True)
def seeded():
    """One weight in a few hundred brings a feature so near to zero that the rounding of two libraries differs by more
    than `torch.allclose` lets pass."""
    torch.manual_seed(0)


class Pair:
    """Two values by name, of a type that nobody has registered."""

    def __init__(self, first: Any, second: Any):
        self.first = first
        self.second = second


class TakesPair(nn.Linear):
    """Takes an object that holds a tensor."""

    def forward(self, x: torch.Tensor, pair: Pair) -> torch.Tensor:
        """Return features of the sum."""
        return super().forward(x + pair.first) * pair.second


class ReturnsPair(nn.Linear):
    """Returns an object that holds tensors."""

    def forward(self, x: torch.Tensor) -> Pair:
        """Return features twice."""
        y = super().forward(x)
        return Pair(y, y.tanh())


class WithoutSymbolic(nn.Linear):
    """Calls an operator that the exporter cannot write for sizes that vary."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of a product."""
        return super().forward(torch.cross(x.sin(), x, dim=None))


def case(name: str) -> tuple[nn.Module, tuple]:
    """Return a model, and the arguments of its call."""
    x = torch.arange(6.0).reshape(2, 3)
    if name == "argument":
        return TakesPair(3, 3), (x, Pair(torch.ones(2, 3), 2))
    return (ReturnsPair(3, 3) if name == "result" else WithoutSymbolic(3, 3)), (x,)


def tensors(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    return [result.first, result.second] if isinstance(result, Pair) else [result]


def report() -> dict:
    """Return the report of the newest model."""
    return ort_zero.status()["models"][-1]


POLICIES = {
    "argument": (
        "FALLBACK_UNSUPPORTED_DATA",
        "ORTModuleIOError",
        "input type .*Pair.* for input pair",
    ),
    "result": ("FALLBACK_UNSUPPORTED_DATA", "ORTModuleIOError", "Unsupported flatten data type: .*Pair"),
    "operator": (
        "FALLBACK_UNSUPPORTED_ONNX_MODEL",
        "ORTModuleONNXModelException",
        "while exporting.*aten::cross",
    ),
}
"""For each case the policy that lets PyTorch run it, upstream's exception without that policy, and its message."""


@pytest.mark.parametrize("name", POLICIES)
def test_without_a_policy_of_the_users_onnx_runtime_runs_it(ortmodule, name):
    model, args = case(name)
    wrapped = ortmodule.ORTModule(model)
    for one, other in zip(tensors(wrapped(*args)), tensors(model(*args)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert report()["backend"] == "onnxruntime" and report()["graphs"]["training"]["runs"]["forward"] == 1
    assert wrapped._torch_module._execution_manager(True)._fallback_manager._exception is None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["FALLBACK_DISABLE", "FALLBACK_UNSUPPORTED_DEVICE"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_does_not_allow_it_raises_upstreams_exception_at_each_call(
    ortmodule, monkeypatch, name, policy, training
):
    from onnxruntime.training.ortmodule import _fallback

    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
    model, args = case(name)
    wrapped = ortmodule.ORTModule(model).train(training)
    _, kind, message = POLICIES[name]
    for _ in range(2):
        with pytest.raises(getattr(_fallback, kind), match=message) as raised:
            wrapped(*args)
        assert "without ORTMODULE_FALLBACK_POLICY" in str(raised.value)
    assert isinstance(raised.value.__cause__, (ExportError, RuntimeError))
    plain = ortmodule.ORTModule(nn.Linear(3, 3))
    assert torch.allclose(plain(args[0]), plain.module(args[0])) and report()["backend"] == "onnxruntime"


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_allows_it_lets_pytorch_run_it_and_shows_why(ortmodule, monkeypatch, caplog, name, retry):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", POLICIES[name][0])
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", str(retry))
    model, args = case(name)
    wrapped = ortmodule.ORTModule(model)
    manager = wrapped._torch_module._execution_manager(True)._fallback_manager
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not (retry and manager._raised_fallback_exception)
            for one, other in zip(tensors(wrapped(*args)), tensors(model(*args)), strict=True):
                assert torch.allclose(one, other, atol=0 if name != "operator" else 1e-6)
            assert (manager._exception is None) == retry
    if name == "operator":  # the rest of the model is a graph
        assert report()["backend"] == "onnxruntime" and list(report()["in_torch"]) == ["aten::cross"]
        assert report()["graphs"]["training"]["runs"]["forward"] == 2
    assert manager._raised_fallback_exception != retry


def test_a_graph_of_the_export_cache_is_no_way_around_a_policy(ortmodule, monkeypatch, tmp_path):
    from onnxruntime.training.ortmodule import _fallback

    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        model, args = case("operator")
        ortmodule.ORTModule(model)(*args)
    assert "hit" in report()["transitions"][-1]["cache"]
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    model, args = case("operator")
    with pytest.raises(_fallback.ORTModuleONNXModelException, match="aten::cross"):
        ortmodule.ORTModule(model)(*args)


def test_a_policy_that_the_program_sets_counts_like_the_variable(ortmodule, monkeypatch):
    from onnxruntime.training.ortmodule import _fallback

    monkeypatch.setattr(ortmodule, "ORTMODULE_FALLBACK_POLICY", _fallback._FallbackPolicy.FALLBACK_DISABLE)
    model, args = case("result")
    with pytest.raises(_fallback.ORTModuleIOError, match="Unsupported flatten data type"):
        ortmodule.ORTModule(model)(*args)


def test_named_and_nested_arguments_are_looked_at(ortmodule, monkeypatch):
    from onnxruntime.training.ortmodule import _fallback

    class Takes(nn.Linear):
        """Takes anything."""

        def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            """Return features."""
            return super().forward(x)

    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    wrapped = ortmodule.ORTModule(Takes(3, 3))
    x = torch.ones(2, 3)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: wrapped(x, [1, Pair(1, 2)]), "more_0_1"),
        (lambda: wrapped(x, key={"a": Pair(1, 2)}), "key_a"),
    ]
    for call, name in calls:
        with pytest.raises(_fallback.ORTModuleIOError, match=f"for input {name} "):
            call()
    assert torch.allclose(wrapped(x, "text", 1, None, (2.0, [True]), key={"a": x}), wrapped.module(x))
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        wrapped()
