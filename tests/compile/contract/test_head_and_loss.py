"""A head and its cross entropy in one graph are computed in chunks of the rows with labels, with PyTorch's results."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
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
CLASSES = 4096


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Head(nn.Module):
    """An embedding, a layer, and a head of many classes, which may share the embedding's weight."""

    def __init__(self, bias: bool = False, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 16, dtype=dtype)
        self.layer = nn.Linear(16, 16, dtype=dtype)
        self.head = nn.Linear(16, CLASSES, bias=bias, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(ids))))


def shifted(model: Head, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels[..., 1:].contiguous().view(-1))


def padded(model: Head, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(ids).float()
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, CLASSES), target, ignore_index=-100, reduction="sum") / 7


def read_twice(model: Head, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(ids).view(-1, CLASSES)
    return F.cross_entropy(logits, labels.view(-1)) + logits.square().mean()


def smoothed(model: Head, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)


def batch(share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels; a share of the tokens has a label."""
    ids = torch.randint(0, CLASSES, (3, 21))
    return ids, torch.where(torch.rand(ids.shape) < share, ids, -100)


def trained(loss_of: Callable[..., torch.Tensor], model: nn.Module, *inputs: Any) -> list[torch.Tensor]:
    """Return the loss, and the gradients of all parameters."""
    loss = loss_of(model, *inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compare(
    loss_of: Callable[..., torch.Tensor],
    model: nn.Module,
    *inputs: Any,
    tolerance: float = 1e-5,
    backend: Compiler | None = None,
) -> bool:
    """Compare a step with eager PyTorch's; return whether the operator ran."""
    backend = backend or CompileEngine(Settings(place="ort")).compiler()
    wanted = trained(loss_of, copy.deepcopy(model), *inputs)
    results = trained(torch.compile(loss_of, backend=backend), model, *inputs)
    sizes = [float(theirs.nan_to_num().abs().max()) for theirs in wanted]
    for ours, theirs, size in zip(results, wanted, sizes, strict=True):
        least = 1e-7 * max(sizes)  # some gradients are zero but for rounding, such as that of a key's bias
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * size + least, equal_nan=True)
    record = backend.engine.as_dict()
    assert record["failed"] == {} and record["segments"] > record["segments_in_torch"]
    return OPERATOR in record["in_torch"]


def _runs_of_losses() -> int:
    return sum(model["graph_runs"].get("loss", 0) for model in ort_zero.status()["models"])


@pytest.mark.parametrize("share", [1.0, 0.15, 0.0])
@pytest.mark.parametrize("loss_of", [shifted, padded])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"tied": True}], ids=["plain", "bias", "tied"])
def test_loss_and_gradients_are_those_of_pytorch(loss_of, options: dict[str, bool], share: float, monkeypatch):
    monkeypatch.setattr(head_loss, "_CHUNK", 13 * CLASSES)  # several chunks, the last one smaller
    assert compare(loss_of, Head(**options), *batch(share))


@pytest.mark.parametrize("bias", [False, True])
def test_products_run_in_onnxruntime_for_any_number_of_rows(bias: bool):
    backend = CompileEngine(Settings(place="ort")).compiler()
    for share in (1.0, 0.5, 0.0, 0.2):
        assert compare(shifted, Head(bias=bias), *batch(share), backend=backend)
    products = [graph for graph in backend.engine.graphs if graph.direction == "loss"]
    assert [len(graph.segments) for graph in products] == [1, 1, 1]
    assert all(graph.segments[0].in_ort and graph.torch_flops == 0 for graph in products)
    assert all(graph.segments[0].trial.runs >= 3 for graph in products)  # equal segments share a trial
    assert backend.engine.runs["loss"] == 12


def test_products_live_as_long_as_the_graph():
    loss_of = torch.compile(shifted, backend="ort_zero", options={"place": "ort"})
    others = set(head_loss._products)
    model, inputs = Head(), batch(1.0)
    trained(loss_of, model, *inputs)
    gc.collect()
    before = _runs_of_losses()
    trained(loss_of, model, *inputs)
    assert _runs_of_losses() == before + 3
    assert set(head_loss._products) - others
    del loss_of
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
    assert compare(padded, Head(dtype=torch.bfloat16), *batch(0.5), tolerance=2e-2)


@pytest.mark.parametrize("loss_of", [read_twice, smoothed])
def test_what_the_operator_cannot_do_stays_as_it_is(loss_of):
    assert not compare(loss_of, Head(), *batch(1.0))


@pytest.mark.parametrize("kind", ["bert", "t5", "llama"])
def test_models_of_transformers(kind: str):
    sizes = dict(vocab_size=CLASSES, num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=32)
    model = {
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**sizes)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, use_cache=False)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=CLASSES, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                        dropout_rate=0.0, decoder_start_token_id=0)
        ),
    }[kind]().eval()  # fmt: skip
    assert compare(lambda model, ids, labels: model(input_ids=ids, labels=labels).loss, model, *batch(0.3))


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
