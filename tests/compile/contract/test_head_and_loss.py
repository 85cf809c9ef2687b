"""A head and its cross entropy in one graph are computed in chunks of the rows with labels, with PyTorch's results."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_models import CASES, CLASSES, LOSSES, Model, assert_same, batch, padded, shifted, smoothed, step_of
from largest_result import Largest
from torch import nn
from torch.nn import functional as F

import ort_zero
from ort_zero.compile import head_loss
from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.engine import CompileEngine
from ort_zero.compile.sessions import Session
from ort_zero.compile.settings import Settings

OPERATOR = "ort_zero.linear_cross_entropy.default"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def read_twice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows = logits.view(-1, CLASSES)
    return F.cross_entropy(rows, labels.view(-1)) + rows.square().mean()


def compiled_step(loss_of: Callable[..., torch.Tensor], backend: Any, **options: Any) -> Callable[..., torch.Tensor]:
    """Return a compiled function of a model, ids and labels that returns the loss."""
    return torch.compile(lambda model, ids, labels: loss_of(model(ids), labels), backend=backend, **options)


def compare(
    loss_of: Callable[..., torch.Tensor],
    model: nn.Module,
    ids: torch.Tensor,
    labels: torch.Tensor,
    tolerance: float = 1e-5,
    backend: Compiler | None = None,
) -> bool:
    """Compare a step with eager PyTorch's; return whether the operator ran."""
    backend = backend or CompileEngine(Settings(place="ort")).compiler()
    twin = copy.deepcopy(model)
    results = step_of(model, compiled_step(loss_of, backend)(model, ids, labels))
    assert_same(results, step_of(twin, loss_of(twin(ids), labels)), tolerance)
    record = backend.engine.as_dict()
    assert record["failed"] == {} and record["segments"] > record["segments_in_torch"]
    return OPERATOR in record["in_torch"]


def _runs_of_losses() -> int:
    return sum(model["graph_runs"].get("loss", 0) for model in ort_zero.status()["models"])


@pytest.mark.parametrize(("loss", "options", "share"), CASES)
def test_loss_and_gradients_are_those_of_pytorch(loss: str, options: dict[str, bool], share: float, monkeypatch):
    monkeypatch.setattr(head_loss, "_CHUNK", 13 * CLASSES)  # several chunks, the last one smaller
    assert compare(LOSSES[loss], Model(**options), *batch(share))


@pytest.mark.parametrize("bias", [False, True])
def test_products_run_in_onnxruntime_for_any_number_of_rows(bias: bool):
    backend = CompileEngine(Settings(place="ort")).compiler()
    for share in (1.0, 0.5, 0.0, 0.2):
        assert compare(shifted, Model(bias=bias), *batch(share), backend=backend)
    products = [graph for graph in backend.engine.graphs if graph.direction == "loss"]
    assert [len(graph.segments) for graph in products] == [1, 1, 1]
    assert all(graph.segments[0].in_ort and graph.torch_flops == 0 for graph in products)
    assert all(graph.segments[0].trial.runs >= 3 for graph in products)  # equal segments share a trial
    assert backend.engine.runs["loss"] == 12


def test_products_live_as_long_as_the_graph():
    step = compiled_step(shifted, "ort_zero", options={"place": "ort"})
    others = set(head_loss._products)
    model, inputs = Model(), batch(1.0)
    step(model, *inputs).backward()
    gc.collect()
    before = _runs_of_losses()
    step(model, *inputs).backward()
    assert _runs_of_losses() == before + 3
    assert set(head_loss._products) - others
    del step
    torch._dynamo.reset()
    gc.collect()
    assert not set(head_loss._products) - others


def test_products_of_another_dtype_or_of_sizes_that_change_are_pytorchs():
    backend = CompileEngine(Settings(place="ort")).compiler()
    assert backend.products_of(torch.empty(CLASSES, 16, dtype=torch.bfloat16), None) is head_loss.IN_PYTORCH
    torch._dynamo.reset()
    step = torch.compile(lambda x, w, y: F.cross_entropy(F.linear(x, w), y), backend=backend)
    weight, states = torch.randn(CLASSES, 16), torch.randn(4, 16, requires_grad=True)
    torch._dynamo.mark_dynamic(weight, 0)
    step(states, weight.requires_grad_(), torch.tensor([1, 2, 3, 4])).backward()
    assert OPERATOR in backend.engine.as_dict()["in_torch"] and not backend.engine.runs["loss"]


def test_a_product_that_fails_runs_in_pytorch(monkeypatch, tmp_path):
    def fail(*args: Any) -> None:
        raise RuntimeError("out of threads")

    backend = CompileEngine(Settings(place="ort", reproducers=str(tmp_path))).compiler()
    states, weight = torch.randn(5, 24), torch.randn(CLASSES, 24)  # sizes of no other test: trials last
    products = backend.products_of(weight, None)
    monkeypatch.setattr(Session, "run", fail)
    assert torch.equal(products.logits(states, weight, None), F.linear(states, weight))
    assert list(backend.engine.as_dict()["failed"].values()) == ["ONNX Runtime failed: out of threads"]


@pytest.mark.parametrize("rows", [5, 63], ids=["several chunks", "one chunk"])
def test_in_bf16(rows: int, monkeypatch):
    monkeypatch.setattr(head_loss, "_CHUNK", rows * CLASSES)
    assert compare(padded, Model(dtype=torch.bfloat16), *batch(0.5), tolerance=2e-2)


@pytest.mark.parametrize("loss_of", [read_twice, smoothed])
def test_what_the_operator_cannot_do_stays_as_it_is(loss_of):
    assert not compare(loss_of, Model(), *batch(1.0))


def test_no_more_logits_exist_than_a_chunk_has(monkeypatch):
    monkeypatch.setattr(head_loss, "_CHUNK", 4 * CLASSES)
    hidden, weight = torch.randn(60, 16), torch.randn(CLASSES, 16)
    labels = torch.randint(0, CLASSES, (60,))
    labels[10:] = -100
    with Largest() as largest:
        head_loss.linear_cross_entropy._init_fn(hidden, weight, None, labels, -100, True, 0)
    assert largest.elements == weight.numel() == 4 * 4 * CLASSES


def test_one_chunk_in_bf16_makes_no_copy_of_the_weights_size_in_float32():
    hidden, weight = torch.randn(8, 16).bfloat16(), torch.randn(CLASSES, 16).bfloat16()
    with Largest(torch.float32) as largest:
        head_loss.linear_cross_entropy._init_fn(hidden, weight, None, torch.arange(8), -100, True, 0)
    assert largest.elements == 8 * CLASSES < weight.numel()
