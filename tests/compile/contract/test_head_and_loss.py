"""A head and its cross entropy are computed in chunks of the rows with labels: in one graph, and as a unit and a loss.

A head that is a unit leaves its logits to the loss; whoever reads them gets PyTorch's.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ort_zero
from ort_zero.compile import head_loss
from ort_zero.compile.deferred_logits import DeferredLogits, is_head
from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.engine import CompileEngine
from ort_zero.compile.sessions import Session
from ort_zero.compile.settings import Settings
from ort_zero.units.finding import find_units

OPERATOR = "ort_zero.linear_cross_entropy.default"
CLASSES, WIDTH = 4096, 16

CASES = [
    ("shifted", {}, 0.15),
    ("shifted", {"bias": True}, 0.0),
    ("padded", {"tied": True}, 0.15),
    ("padded", {"bias": True}, 1.0),
    ("as module", {"tied": True}, 1.0),
    ("as module", {}, 0.0),
]
"""Names of losses, options of the model, and shares of the tokens that have a label."""


class Block(nn.Module):
    """A linear layer beside its input."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """An embedding, two blocks, and a head of many classes, which may share the embedding's weight."""

    def __init__(self, bias: bool = False, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batch(share: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels; a share of the tokens has a label."""
    ids = torch.randint(0, CLASSES, (3, 21))
    return ids, torch.where(torch.rand(ids.shape) < share, ids, -100)


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels[..., 1:].contiguous().view(-1))


def padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.float().view(-1, CLASSES), target, ignore_index=-100, reduction="sum") / 7


def as_module(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss()(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)


LOSSES = {"shifted": shifted, "padded": padded, "as module": as_module}


def step_of(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Run the backward of a loss; return the loss, and the gradients of all parameters that have one."""
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(results: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compare tensors; the tolerance is relative to the largest element of each."""
    for ours, theirs in zip(results, wanted, strict=True):
        size = float(theirs.nan_to_num().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * size + 1e-9, equal_nan=True)


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of a floating-point result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_real = type(result) is torch.Tensor and result.is_floating_point() and result.device.type == "cpu"
        if is_real:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# -- in one graph ------------------------------------------------------------------------------------------------------


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


def test_a_product_that_fails_runs_in_pytorch(monkeypatch, tmp_path):
    def fail(*args: Any) -> None:
        raise RuntimeError("out of threads")

    backend = CompileEngine(Settings(place="ort", reproducers=str(tmp_path))).compiler()
    states, weight = torch.randn(5, 24), torch.randn(CLASSES, 24)  # sizes of no other test: trials last
    products = backend.products_of(weight, None)
    monkeypatch.setattr(Session, "run", fail)
    assert torch.equal(products.logits(states, weight, None), F.linear(states, weight))
    assert list(backend.engine.as_dict()["failed"].values()) == ["ONNX Runtime failed: out of threads"]


@pytest.mark.parametrize("loss_of", [read_twice, smoothed])
def test_what_the_operator_cannot_do_stays_as_it_is(loss_of):
    assert not compare(loss_of, Model(), *batch(1.0))


# -- as a unit and a loss ----------------------------------------------------------------------------------------------


def wrapped(model: nn.Module, **options: Any) -> tuple[Any, Callable[[], int]]:
    """Return a copy of the model with compiled units, and a function that counts the losses without all logits."""
    section = {"place": "ort", **options}
    compiled = ort_zero.wrap(copy.deepcopy(model), backend="compile", log_level="ERROR", compile=section)

    def losses() -> int:
        status = ort_zero.status()["models"][-1]
        assert status["fallbacks"] == 0 and status["backend"] == "onnxruntime", status
        return status["compiled"]["losses_in_chunks"]

    return compiled, losses


def trained(model: nn.Module, loss_of: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss, and the gradients of all parameters that have one."""
    return step_of(model, loss_of(model(inputs[0]), *inputs[1:]))


@pytest.mark.parametrize("is_one_graph", [True, False])
@pytest.mark.parametrize(("loss", "options", "share"), CASES)
def test_loss_and_gradients_are_those_of_pytorch(
    loss: str, options: dict[str, bool], share: float, is_one_graph: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(head_loss, "_CHUNK", 13 * CLASSES)  # several chunks, the last one smaller
    model, inputs = Model(**options), batch(share)
    if is_one_graph:
        assert compare(LOSSES[loss], model, *inputs)
        return
    compiled, losses = wrapped(model)
    assert_same(trained(compiled, LOSSES[loss], *inputs), trained(model, LOSSES[loss], *inputs))
    assert losses() == 1


@pytest.mark.parametrize("rows", [5, 63], ids=["several chunks", "one chunk"])
@pytest.mark.parametrize("loss_of", [shifted, padded])
def test_in_bf16(loss_of: Callable[..., torch.Tensor], rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_loss, "_CHUNK", rows * CLASSES)
    model, inputs = Model(dtype=torch.bfloat16), batch()
    assert compare(loss_of, copy.deepcopy(model), *inputs, tolerance=2e-2)
    compiled, losses = wrapped(model)
    results, wanted = trained(compiled, loss_of, *inputs), trained(model, loss_of, *inputs)
    assert [each.dtype for each in results] == [each.dtype for each in wanted]
    assert_same(results, wanted, tolerance=2e-2)
    assert losses() == 1


MODELS = {
    "bert": lambda **sizes: hf.BertForMaskedLM(hf.BertConfig(**sizes)),
    "t5": lambda **sizes: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=CLASSES, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                    decoder_start_token_id=0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers_and_their_logits_after_the_step(kind: str):
    sizes = dict(vocab_size=CLASSES, num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32)
    model = MODELS[kind](**sizes).eval()
    compiled, losses = wrapped(model)
    ids, labels = batch()
    results = []
    for each in (model, compiled):
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        outputs = each(input_ids=ids, labels=labels)
        outputs.loss.backward()
        optimizer.step()
        results.append([outputs.loss.detach(), *(p.detach() for p in each.parameters()), outputs.logits.detach() * 1])
    assert_same(results[1], results[0], tolerance=1e-4)
    assert losses() == 1


def test_logits_that_are_read_at_every_call_are_computed_at_once():
    model, (ids, labels) = Model(), batch()
    compiled, losses = wrapped(model)
    deferred = []

    def read(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        deferred.append(isinstance(logits, DeferredLogits))
        return logits.square().mean() + as_module(logits, labels)

    wanted = trained(model, read, ids, labels)
    deferred.clear()
    for _ in range(6):
        assert_same(trained(compiled, read, ids, labels), wanted)
    assert deferred == 3 * [True] + 3 * [False] and losses() == 0


def scaled(logits: torch.Tensor) -> torch.Tensor:
    return logits.mul_(0.5)


def masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 7:] = -10.0
    return logits


@pytest.mark.parametrize("change", [scaled, masked])
def test_logits_that_are_changed_in_place(change):
    model, inputs = Model(), batch(1.0)
    compiled, losses = wrapped(model)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return as_module(change(logits), labels.clamp(max=6))

    assert_same(trained(compiled, loss_of, *inputs), trained(model, loss_of, *inputs))
    assert losses() == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: torch.from_numpy(logits.detach().numpy()),
        lambda logits: pickle.loads(pickle.dumps(logits.detach())),
        lambda logits: copy.deepcopy(logits.detach()),
        lambda logits: torch.stack([logits[0], *logits[1:]]),
    ],
    ids=["numpy", "pickle", "deepcopy", "rows"],
)
def test_whoever_reads_logits_gets_those_of_pytorch(read):
    model, (ids, _) = Model(), batch()
    compiled, _ = wrapped(model)
    logits = compiled(ids)
    assert isinstance(logits, DeferredLogits) and logits.shape == (3, 21, CLASSES) and logits.requires_grad
    torch.testing.assert_close(read(logits).float(), model(ids), check_dtype=False)
    assert repr(logits).startswith("tensor(")


def test_a_frozen_head_gets_no_gradient():
    model, inputs = Model(bias=True), batch()
    model.head.requires_grad_(False)
    compiled, losses = wrapped(model)
    assert_same(trained(compiled, as_module, *inputs), trained(model, as_module, *inputs))
    assert losses() == 1 and compiled.head.weight.grad is None


def along_the_second(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chosen = logits.log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2))
    return -(chosen * (labels >= 0).unsqueeze(2)).mean()


@pytest.mark.parametrize("loss_of", [smoothed, along_the_second, of_tokens])
def test_other_losses_read_the_logits(loss_of):
    model, inputs = Model(), batch()
    compiled, losses = wrapped(model)
    assert_same(trained(compiled, loss_of, *inputs), trained(model, loss_of, *inputs))
    assert losses() == (loss_of is smoothed)  # a part of that loss is a plain cross entropy


def test_within_activation_checkpointing():
    model, inputs = Model(), batch()
    compiled, losses = wrapped(model)
    wanted = trained(model, as_module, *inputs)
    for reentrant in (False, True):
        forward, hidden = compiled.head, []

        def head_and_loss(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return as_module(forward(states), labels)

        compiled.zero_grad()
        states = compiled.blocks[1](compiled.blocks[0](compiled.embedding(inputs[0])))
        loss = checkpoint(head_and_loss, states, inputs[1], use_reentrant=reentrant)
        loss.backward()
        hidden += [loss.detach(), *(p.grad for p in compiled.parameters() if p.grad is not None)]
        assert_same(hidden, wanted)
    assert losses() >= 2


@pytest.mark.parametrize("how", ["no gradients", "autocast", "off"])
def test_where_logits_are_computed_at_once(how: str):
    compiled, _ = wrapped(Model(), fuse_loss="off" if how == "off" else "auto")
    ids, _ = batch()
    with torch.set_grad_enabled(how != "no gradients"), torch.autocast("cpu", enabled=how == "autocast"):
        assert type(compiled(ids)) is torch.Tensor


def test_which_modules_are_heads():
    assert is_head(nn.Linear(16, 4096)) and not is_head(nn.Linear(16, 4095)) and not is_head(nn.Linear(4096, 4096))
    sizes = dict(vocab_size=CLASSES, num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32)
    bert = MODELS["bert"](**sizes)
    assert [unit.path for unit in find_units(bert)][2:] == ["cls"]
    parts = ["cls.predictions.transform", "cls.predictions.decoder"]
    assert [unit.path for unit in find_units(bert, stands_alone=is_head)][2:] == parts


def test_no_more_logits_exist_than_a_chunk_has(monkeypatch):
    monkeypatch.setattr(head_loss, "_CHUNK", 4 * CLASSES)
    compiled, losses = wrapped(Model())
    inputs = batch(1.0)
    trained(compiled, as_module, *inputs)
    logits = compiled(inputs[0])  # outside of the mode, within which units run their own forwards
    with Largest() as largest:
        as_module(logits, inputs[1]).backward()
    assert largest.elements == WIDTH * CLASSES == 16 * CLASSES < inputs[0].numel() * CLASSES
    assert losses() == 2
