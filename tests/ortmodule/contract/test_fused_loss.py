"""Head and cross entropy in one node: equal to PyTorch, and the logits right whenever somebody reads them."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.compat.lazy_tensor import LazyTensor
from ort_zero.ortmodule.compat.ort_kernels import FUSED_LOSS
from ort_zero.ortmodule.runtime.fused_loss import operators
from ort_zero.ortmodule.wrap import wrap_model

CLASSES, WIDTH, BATCH, LENGTH = 50, 16, 3, 11


class Model(nn.Module):
    """An embedding, a layer and a head; `form` tells how the loss is written."""

    def __init__(self, form: str = "plain", bias: bool = True, tied: bool = False, classes: int = CLASSES):
        super().__init__()
        self.form, self.classes = form, classes
        self.embedding = nn.Embedding(classes, WIDTH)
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        logits = self.head(self.norm(self.layer(self.embedding(ids)).tanh()))
        if self.form == "sized slice":
            part = logits[..., :-1, :]
            return F.cross_entropy(part.reshape(-1, part.size(-1)), labels[..., 1:].reshape(-1)), logits
        if self.form == "sized":
            return self._loss(logits, labels), logits
        if self.form == "scaled":
            return self._loss(logits, labels) / (logits.shape[0] * logits.size(-1) + logits.shape[-2]), logits
        if self.form == "shifted":
            part, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            return F.cross_entropy(part.view(-1, self.classes), labels.view(-1)), logits
        reduction = "sum" if self.form == "sum" else "mean"
        loss = F.cross_entropy(logits.view(-1, self.classes), labels.view(-1), reduction=reduction)
        if self.form == "loss alone":
            return loss, ids
        if self.form == "penalty":
            loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        if self.form == "two losses":
            loss = loss + F.cross_entropy(logits.view(-1, self.classes), ids.view(-1))
        if self.form == "smoothed":
            loss = F.cross_entropy(logits.view(-1, self.classes), labels.view(-1), label_smoothing=0.1)
        return loss, logits

    @staticmethod
    def _loss(logits, labels):
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def batch(seed: int, share: float = 0.4, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, classes, (BATCH, LENGTH), generator=generator)
    return ids, torch.where(torch.rand(ids.shape, generator=generator) < share, ids, -100)


def wrap(model: nn.Module, **section):
    """Return the runtime, the model in ONNX Runtime with the node if there can be one, and the model in PyTorch."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    reference = copy.deepcopy(model)
    section = {"fuse_loss": "on", "log_level": "ERROR", **section}
    return *wrap_model(model, config.OrtModuleConfig(**section), 0), reference


def fused(runtime) -> int:
    """Return how many nodes of head and loss the graph has that has run; check that ONNX Runtime did."""
    status = runtime.status()
    assert (status["backend"], status["fallbacks"]) == ("onnxruntime", 0)
    return status["graphs"]["training"]["kernels"].get("fused_loss", 0)


def same(ours: nn.Module, theirs: nn.Module, given, loss_of=lambda result: result[0]) -> tuple:
    """Compare loss and gradients, return both results."""
    results = ours(*given), theirs(*given)
    for model, result in zip((ours, theirs), results, strict=True):
        model.zero_grad()
        loss_of(result).backward()
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None, name
        else:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5, msg=name)
    return results


# -- the operator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [operators.CHUNK, 7 * CLASSES, 1])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("share", [1, 0.3, 0])
def test_loss_and_gradients_are_those_of_pytorch(share, mean, chunk):
    torch.manual_seed(1)
    hidden, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 11, 8), (CLASSES, 8), (CLASSES,)))
    labels = batch(2, share)[1].reshape(-1)
    expected = F.cross_entropy(
        F.linear(hidden, weight, bias).view(-1, CLASSES), labels, reduction="mean" if mean else "sum"
    )
    given = hidden.detach(), weight.detach(), bias.detach(), labels
    found = operators.loss_and_gradients(*given, -100, mean, True, chunk)
    torch.testing.assert_close(found[0], expected.detach(), equal_nan=True)
    if expected.isnan():
        assert not any(gradient.any() for gradient in found[1:])
        return
    expected.backward()
    for gradient, tensor in zip(found[1:], (hidden, weight, bias), strict=True):
        torch.testing.assert_close(gradient, tensor.grad, rtol=1e-5, atol=1e-5)


def test_labels_that_are_no_class_or_too_few_are_errors():
    hidden, weight = torch.randn(4, 8), torch.randn(CLASSES, 8)
    for labels in (torch.tensor([1, 2, CLASSES, 0]), torch.tensor([1, 2, 3])):
        with pytest.raises((RuntimeError, IndexError)):
            operators.loss_and_gradients(hidden, weight, None, labels, -100, True, True)


def test_rows_without_a_label_are_not_computed_and_no_row_is_computed_twice(monkeypatch):
    shapes = []
    original = operators.product

    def counted(a, b, bias=None):
        shapes.append((len(a), a.shape[1], b.shape[1]))
        return original(a, b, bias)

    monkeypatch.setattr(operators, "product", counted)
    monkeypatch.setattr(operators, "CHUNK", 4 * CLASSES)
    runtime, ours, theirs = wrap(Model(tied=True))
    given = batch(3)
    same(ours, theirs, given)
    assert fused(runtime) == 1
    rows = int((given[1] != -100).sum())
    logits = [count for count, _, columns in shapes if columns == CLASSES]
    assert 4 < rows < given[1].numel() and sum(logits) == rows and max(logits) == 4
    of_hidden = [count for count, inner, _ in shapes if inner == CLASSES and count <= 4]
    of_weight = [inner for count, inner, _ in shapes if count == CLASSES]
    assert sum(of_hidden) == sum(of_weight) == rows
    assert len(shapes) == len(logits) + len(of_hidden) + len(of_weight)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", ["plain", "shifted", "sum", "loss alone", "sized", "sized slice", "scaled"])
def test_losses_of_any_form_and_gradients_from_the_logits_as_well(form, bias):
    runtime, ours, theirs = wrap(Model(form, bias, tied=not bias))
    for seed, share in enumerate((1, 0.4, 0.1)):
        results = same(ours, theirs, batch(seed, share))
    if form != "loss alone":
        torch.testing.assert_close(results[0][1].detach(), results[1][1].detach(), rtol=1e-5, atol=1e-5)
        same(ours, theirs, batch(5), lambda result: 2 * result[0] + result[1].square().mean())
        same(ours, theirs, batch(6), lambda result: result[1][:, 2].tanh().sum())
    assert fused(runtime) == 1


class Tied(Model):
    """Reads the table of its head twice, once with a row for padding that gets no gradient from there."""

    def __init__(self, scaled: bool = False):
        super().__init__(bias=False, tied=True)
        self.second = nn.Embedding(CLASSES, WIDTH, padding_idx=3, scale_grad_by_freq=scaled)
        self.second.weight = self.embedding.weight

    def forward(self, ids, labels):
        hidden = self.embedding(ids) + self.second(ids % 5)
        logits = self.head(self.norm(self.layer(hidden).tanh()))
        return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), logits


@pytest.mark.parametrize("scaled", [False, True])
def test_embeddings_are_added_to_the_gradient_of_the_head_with_their_table(scaled):
    runtime, ours, theirs = wrap(Tied(scaled))
    for seed, factor in enumerate((1.0, 0.25, -3.0)):
        same(ours, theirs, batch(seed), lambda result, factor=factor: factor * result[0])
    same(ours, theirs, batch(4), lambda result: 0.5 * result[0] + result[1].square().mean())
    model = runtime.current(True).session.model
    assert fused(runtime) == 1
    assert runtime.status()["graphs"]["training"]["kernels"]["tied_embedding"] == (1 if scaled else 2)
    # a gradient that counts how often a row is read stays a sum
    assert sum(node.op_type == "Sum" for node in model.graph.node) == int(scaled) + _sums_of_others(model)


def _sums_of_others(model) -> int:
    """Return how many sums of a graph are none of a weight's gradient."""
    return sum(node.op_type == "Sum" and "weight_grad" not in node.output[0] for node in model.graph.node)


def test_gradients_of_several_backwards_add_up_and_stay():
    """The gradient of the head is scaled and added to in its own memory; what was returned before is not touched."""
    _, ours, theirs = wrap(Tied())
    for model in (ours, theirs):
        for seed in range(3):
            (0.5 * model(*batch(seed))[0]).backward()
            if seed == 0:
                first = model.embedding.weight.grad
                model.embedding.weight.grad = first.clone()
                before = first.clone()
        torch.testing.assert_close(first, before, rtol=0, atol=0)
    torch.testing.assert_close(ours.embedding.weight.grad, theirs.embedding.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["penalty", "two losses", "smoothed"])
def test_logits_that_the_forward_uses_otherwise_are_computed(form):
    runtime, ours, theirs = wrap(Model(form))
    same(ours, theirs, batch(0))
    assert fused(runtime) == 0


def test_only_large_heads_by_default_and_none_where_it_is_off():
    for classes, section, count in ((4096, {"fuse_loss": "auto"}, 1), (4095, {"fuse_loss": "auto"}, 0),
                                    (4096, {"fuse_loss": "off"}, 0)):  # fmt: skip
        runtime, ours, theirs = wrap(Model(classes=classes), **section)
        same(ours, theirs, batch(0, classes=classes))
        assert fused(runtime) == count


def test_a_batch_without_any_label():
    runtime, ours, theirs = wrap(Model())
    same(ours, theirs, batch(0))
    result = ours(*batch(1, 0))
    ours.zero_grad()
    result[0].backward()
    assert result[0].isnan() and theirs(*batch(1, 0))[0].isnan()
    assert all(not parameter.grad.any() for parameter in ours.parameters())
    assert fused(runtime) == 1


def test_a_frozen_head_gets_no_gradient_and_costs_none(monkeypatch):
    added = []
    monkeypatch.setattr(operators, "_add_product", lambda *about, **more: added.append(about))
    model = Model()
    model.head.requires_grad_(False)
    runtime, ours, theirs = wrap(model)
    same(ours, theirs, batch(0))
    assert fused(runtime) == 1 and not added


def test_without_gradients_the_logits_are_plain():
    _, ours, theirs = wrap(Model())
    ours(*batch(0))
    with torch.no_grad():
        loss, logits = ours(*batch(1))
        assert type(logits) is torch.Tensor
        torch.testing.assert_close((loss, logits), theirs(*batch(1)), rtol=1e-5, atol=1e-5)


def operator_of(node) -> str:
    """Return the name of PyTorch's operator that a node runs."""
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == "operator"), "")


def test_with_a_memory_plan_fewer_logits_exist_at_a_time():
    torch.manual_seed(0)
    ours, classes = Model(classes=4096), 4096
    theirs = copy.deepcopy(ours)
    memory = config.MemoryConfig(recompute="all")
    section = config.OrtModuleConfig(log_level="ERROR", fuse_loss="on")
    runtime, wrapped = wrap_model(ours, section, 0, memory=memory)
    same(wrapped, theirs, batch(0, classes=classes))
    assert fused(runtime) == 1
    graph = runtime.current(True).session.model.graph
    (node,) = [node for node in graph.node if node.domain and operator_of(node).startswith(FUSED_LOSS)]
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert constants[node.input[-1]] == operators.SMALL_CHUNK < operators.CHUNK


def test_with_checkpointed_blocks_the_graph_stays_as_it_is():
    memory = config.MemoryConfig(checkpointing="recompute")
    runtime, wrapped = wrap_model(Model(), config.OrtModuleConfig(fuse_loss="on"), 0, memory=memory)
    wrapped(*batch(0))[0].backward()
    assert fused(runtime) == 0


def test_the_export_cache_holds_it(tmp_path):
    for outcome in ("miss", "hit"):
        runtime, ours, theirs = wrap(Model(), cache_dir=str(tmp_path))
        results = same(ours, theirs, batch(0), lambda result: result[0] + result[1].mean())
        assert isinstance(results[0][1], LazyTensor) and fused(runtime) == 1
        assert runtime.status()["transitions"][0]["cache"].startswith(outcome)
    runtime, ours, theirs = wrap(Model(), cache_dir=str(tmp_path), fuse_loss="off")
    assert type(same(ours, theirs, batch(0))[0][1]) is torch.Tensor and fused(runtime) == 0


# -- logits ------------------------------------------------------------------------------------------------------------


def readers():
    def saved(logits):
        file = io.BytesIO()
        torch.save(logits.detach(), file)
        return torch.load(io.BytesIO(file.getvalue()))

    def changed(logits):
        with torch.no_grad():
            logits.mul_(2)
        return logits

    def viewed(logits):
        logits = logits.detach()
        logits[:, 0] = 7
        return logits

    return {
        "argmax": lambda logits: logits.argmax(-1),
        "index": lambda logits: logits[:, -1],
        "list": lambda logits: torch.tensor(logits.tolist()),
        "numpy": lambda logits: torch.from_numpy(logits.detach().cpu().numpy()),
        "saved": saved,
        "changed in place": changed,
        "changed through a view": viewed,
        "cat": lambda logits: torch.cat([logits, logits]),
        "to": lambda logits: logits.to(torch.float64),
        "item": lambda logits: torch.tensor(logits[0, 0, 0].item()),
        "equal": lambda logits: logits == logits.max(),
        "data": lambda logits: logits.data + 1,
    }


@pytest.fixture(scope="module")
def models():
    return wrap(Model())


@pytest.fixture
def wrapped(models):
    models[1](*batch(0))  # a call whose logits nobody reads: the next ones stay lazy
    yield models
    assert fused(models[0]) == 1


@pytest.mark.parametrize("name", readers())
def test_whoever_reads_the_logits_finds_them(wrapped, name):
    _, ours, theirs = wrapped
    read = readers()[name]
    results = [read(model(*batch(8))[1]) for model in (ours, theirs)]
    torch.testing.assert_close(*(result.detach() for result in results), rtol=1e-5, atol=1e-5)


def test_what_is_asked_of_the_logits_without_reading_them(wrapped):
    _, ours, theirs = wrapped
    ours, theirs = ours(*batch(8))[1], theirs(*batch(8))[1]
    assert isinstance(ours, LazyTensor) and isinstance(ours, torch.Tensor)
    assert (ours.shape, ours.dtype, ours.device, ours.dim(), len(ours)) == (
        theirs.shape, theirs.dtype, theirs.device, theirs.dim(), len(theirs),
    )  # fmt: skip
    assert ours.requires_grad and ours.grad_fn is not None and not ours.is_leaf and ours.is_contiguous()
    assert ours._known is None
    with pytest.raises(RuntimeError, match="requires grad"):
        ours.numpy()
    assert "grad" in repr(ours)


@pytest.mark.parametrize("through", ["parameter", "data"])
def test_logits_read_after_the_weights_have_changed_are_those_of_the_run(wrapped, through):
    _, ours, theirs = wrapped
    results = []
    for model in (ours, theirs):
        loss, logits = model(*batch(9))
        loss.backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.data if through == "data" else parameter).sub_(0.5)
            results.append(logits.detach() * 1)
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        model.zero_grad()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_logits_of_two_calls_are_apart(wrapped):
    _, ours, theirs = wrapped
    pairs = [(ours(*batch(seed))[1], theirs(*batch(seed))[1]) for seed in (10, 11)]
    for mine, expected in pairs:
        torch.testing.assert_close(mine.detach(), expected.detach(), rtol=1e-5, atol=1e-5)


def test_logits_that_nobody_reads_leave_nothing_behind(wrapped):
    _, ours, _ = wrapped
    loss, logits = ours(*batch(12))
    weight = weakref.ref(logits)
    gc.disable()
    try:
        del logits
        assert weight() is None
        loss.backward()
    finally:
        gc.enable()


def test_logits_that_are_read_call_by_call_become_results_of_the_graph():
    runtime, ours, theirs = wrap(Model())
    kinds = []
    for seed in range(6):
        result = same(ours, theirs, batch(seed))[0]
        kinds.append(type(result[1]).__name__)
        torch.testing.assert_close(result[1].detach(), theirs(*batch(seed))[1].detach(), rtol=1e-5, atol=1e-5)
    assert kinds == ["LazyTensor"] * 3 + ["Tensor"] * 3 and fused(runtime) == 0
    last = runtime.status()["transitions"][-1]
    assert last["transition"] == "re-process" and "head and loss in one node: True -> False" in last["reasons"]


def test_logits_that_are_read_now_and_then_stay_as_they_are():
    runtime, ours, theirs = wrap(Model())
    for seed in range(8):
        result = same(ours, theirs, batch(seed))[0]
        if seed % 3:
            result[1].argmax(-1)
    assert fused(runtime) == 1 and len(runtime.status()["transitions"]) == 1
