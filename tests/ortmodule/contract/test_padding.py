"""Padding that is left out: losses and gradients are PyTorch's, whatever the masks and labels are, or it stays."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny_models import bert, gpt2, t5
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ort_zero import config
from ort_zero.ortmodule.runtime.fused_loss import operators as fused_operators
from ort_zero.ortmodule.runtime.padding import operators
from ort_zero.ortmodule.wrap import wrap_model

CLASSES, WIDTH, HEADS, LENGTH = 40, 16, 2, 12


class Layer(nn.Module):
    """Attention and two linear layers, with norms; `form` tells how the mask is used."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def attention(self, q, k, v, visible):
        """Return the attention's result; `visible` [batch, 1, queries or 1, keys]."""
        if self.form == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.form == "filled":
            return scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1) @ v
        if self.form == "weak mask":
            return (scores + (1 - visible.to(scores.dtype)) * -3.0).softmax(-1) @ v
        if self.form == "masked twice":
            near = (torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs() < 4
            scores = scores.masked_fill(~near, torch.finfo(scores.dtype).min)
        added = torch.where(visible, 0.0, torch.finfo(scores.dtype).min)
        if self.form == "scaled after the mask":
            return ((scores + added) * 1e-38).softmax(-1) @ v
        return (scores + added).softmax(-1) @ v

    def forward(self, x, visible):
        batch, length = x.shape[:2]
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = self.attention(q, k, v, visible).transpose(1, 2).reshape(batch, length, -1)
        x = self.first(x + self.out(found))
        if self.form == "mean of all tokens":
            x = x + x.mean(1, keepdim=True)
        if self.form == "neighbours":
            x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.second(x + self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    """Two layers and a head; `head` tells what becomes of the tokens."""

    def __init__(self, form: str = "added", head: str = "tokens", causal: bool = False):
        super().__init__()
        self.head_form, self.causal = head, causal
        self.words, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(form) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, mask, labels):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        visible = mask.bool()[:, None, None, :]
        if self.causal:
            visible = visible & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, visible)
        if self.head_form == "first token":
            return F.cross_entropy(self.head(x[:, 0]), labels[:, 0])
        if self.head_form == "last token":
            return F.cross_entropy(self.head(x[:, -1]), labels[:, -1])
        if self.head_form == "mean":
            return F.cross_entropy(self.head(x.mean(1)), labels[:, 0])
        if self.head_form == "shifted":
            return F.cross_entropy(self.head(x)[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        return (loss, logits, x) if self.head_form == "all results" else loss


def batch(kind: str, seed: int = 0, size: int = 4, length: int = LENGTH):
    """Return ids, mask and labels; `kind` tells where padding and labels are."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, CLASSES, (size, length), generator=generator)
    mask = torch.ones(size, length, dtype=torch.long)
    for i in range(1, size):
        count = 1 + int(torch.randint(1, length - 2, (), generator=generator))
        if kind == "in front":
            mask[i, :count] = 0
        elif kind == "between":
            mask[i, 1 : 1 + count : 2] = 0
        elif kind != "none":
            mask[i, -count:] = 0
    if kind == "a sequence of padding":
        mask[1] = 0
    if kind == "nothing but padding":
        mask[:] = 0
    labels = ids.clone() if kind == "padding has labels" else ids.masked_fill(mask == 0, -100)
    if kind == "some labels":
        labels = labels.masked_fill(torch.rand(ids.shape, generator=generator) < 0.7, -100)
        labels[:, 0] = ids[:, 0]
    if kind == "nothing but padding":
        labels = ids.clone()
    return ids, mask, labels


KINDS = ("behind", "in front", "between", "none", "padding has labels", "a sequence of padding", "some labels",
         "nothing but padding")  # fmt: skip


def wrapped(model: nn.Module, **settings):
    """Return the runtime of a model that leaves padding out, and the model to call."""
    settings = {"log_level": "WARNING", "cache_dir": None, "drop_padding": True, "fallback": "raise"} | settings
    return wrap_model(model, config.OrtModuleConfig(**settings), 0)


def packed(runtime) -> int:
    """Return how often the training graph packs rows."""
    assert runtime.status()["backend"] == "onnxruntime"
    return runtime.status()["graphs"]["training"]["kernels"].get("packed_rows", 0)


def compare(model: nn.Module, call, called, given) -> torch.Tensor:
    """Hold loss and gradients of a call against PyTorch's; return PyTorch's loss."""
    found, expected = call(*given), model(*given)
    found, expected = (result[0] if isinstance(result, tuple) else result for result in (found, expected))
    assert abs(found.item() - expected.item()) < 1e-5 or math.isnan(expected.item())
    found.backward()
    expected.backward()
    for ours, theirs in zip(called.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    called.zero_grad()
    model.zero_grad()
    return expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["added", "filled", "sdpa", "masked twice"])
def test_losses_and_gradients_are_pytorchs(form, causal, fused):
    torch.manual_seed(0)
    model = Model(form, causal=causal)
    called = copy.deepcopy(model)
    runtime, call = wrapped(called, fuse_loss="on" if fused else "off")
    for seed, kind in enumerate(KINDS):
        # what a query attends to that sees no key is not the same in all of PyTorch's ways to compute it
        if form == "sdpa" and kind == "nothing but padding":
            continue
        compare(model, call, called, batch(kind, seed, size=3 + seed % 3, length=LENGTH + seed % 2))
    assert packed(runtime) > 0
    assert ("fused_loss" in runtime.status()["graphs"]["training"]["kernels"]) == fused
    assert runtime.status()["graphs"]["training"]["exports"] == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("head", ["first token", "last token", "shifted", "all results"])
def test_heads_that_read_some_tokens(head, fused):
    torch.manual_seed(0)
    model = Model(head=head)
    called = copy.deepcopy(model)
    runtime, call = wrapped(called, fuse_loss="on" if fused else "off")
    for seed, kind in enumerate(KINDS):
        given = batch(kind, seed)
        if head in ("first token", "last token"):
            given = (*given[:2], given[0].clone())
        compare(model, call, called, given)
    assert packed(runtime) > 0


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_models_of_transformers(make):
    torch.manual_seed(0)
    model = make(words=CLASSES, hidden=WIDTH, heads=HEADS).train()
    called = copy.deepcopy(model)
    runtime, call = wrapped(called)
    for seed, kind in enumerate(("behind", "none", "padding has labels", "a sequence of padding")):
        ids, mask, labels = batch(kind, seed)
        if make is t5:  # a text of another length, of which the last tokens have no label
            labels = batch("behind", seed + 10, length=LENGTH - 3)[2]
        given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        found = call(**given).loss
        found.backward()
        # its fused kernel has gradients of its own where a query sees no key: docs/operators.md
        with sdpa_kernel(SDPBackend.MATH):
            expected = model(**given).loss
            expected.backward()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for ours, theirs in zip(called.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        called.zero_grad()
        model.zero_grad()
    assert packed(runtime) > (15 if make is t5 else 5)  # encoder and decoder


def test_queries_of_another_text_need_a_key_each():
    """A sequence is computed as a whole if any query sees none of its tokens: it attends to all of them alike."""
    numbers = operators.numbers(torch.zeros(2, 3))
    visible = torch.tensor([[[[1, 0, 0], [1, 1, 0]]], [[[1, 1, 0], [0, 0, 0]]]], dtype=torch.uint8)
    assert operators.attended(visible, numbers, False)[0].tolist() == [[1, 1, 0], [1, 1, 1]]
    rows, places = operators.rows(operators.attended(visible[:, :, :1], numbers, True))
    assert rows.tolist() == [0, 3, 4] and places.tolist() == [[0, 0, 0], [1, 2, 0]]


def test_results_of_real_tokens_are_right_and_those_of_padding_finite():
    torch.manual_seed(0)
    model = Model(head="all results")
    called = copy.deepcopy(model)
    runtime, call = wrapped(called)
    ids, mask, labels = batch("behind")
    found, expected = call(ids, mask, labels), model(ids, mask, labels)
    assert packed(runtime) > 0
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours[mask == 1], theirs[mask == 1], rtol=1e-4, atol=1e-5)
        assert ours.isfinite().all()
    with torch.no_grad():
        found, expected = call(ids, mask, labels), model(ids, mask, labels)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "head", "why"),
    [
        ("mean of all tokens", "tokens", "ReduceMean"),
        ("neighbours", "tokens", "Pad"),
        ("added", "mean", "ReduceMean"),
        ("scaled after the mask", "tokens", "Mul"),
    ],
)
def test_padding_stays_where_something_else_may_read_it(form, head, why, capfd):
    torch.manual_seed(0)
    model = Model(form, head)
    called = copy.deepcopy(model)
    runtime, call = wrapped(called, cache_dir=None)
    for seed, kind in enumerate(("behind", "none", "padding has labels")):
        compare(model, call, called, batch(kind, seed))
    assert packed(runtime) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "drop_padding" in line]
    assert len(said) == 1
    assert why in said[0] and "may read tokens that are padding" in said[0]


def test_tokens_that_a_weak_mask_shows_are_computed():
    torch.manual_seed(0)
    model = Model("weak mask")
    called = copy.deepcopy(model)
    runtime, call = wrapped(called)
    for seed, kind in enumerate(KINDS):
        compare(model, call, called, batch(kind, seed))
    assert packed(runtime) > 0  # and every token is a row


def test_only_rows_that_matter_are_computed(monkeypatch):
    counts = []
    rows = operators.rows

    def counted(marks):
        found = rows(marks)
        counts.append(len(found[0]))
        return found

    operators.register()
    library = torch.library.Library(operators.NAMESPACE, "IMPL")
    library.impl("rows", counted, "CPU")
    try:
        runtime, call = wrapped(Model())
        for kind in ("behind", "none", "a sequence of padding", "padding has labels", "in front"):
            ids, mask, labels = batch(kind)
            call(ids, mask, labels).backward()
            assert counts.pop() == (ids.numel() if kind == "padding has labels" else int(mask.sum())), kind
            assert not counts
        assert packed(runtime) > 0
    finally:
        library._destroy()


def test_a_graph_of_the_export_cache_leaves_padding_out(tmp_path):
    torch.manual_seed(0)
    model = Model()
    for outcome in ("miss", "hit"):
        called = copy.deepcopy(model)
        runtime, call = wrapped(called, cache_dir=str(tmp_path))
        compare(model, call, called, batch("behind"))
        assert packed(runtime) > 0
        assert runtime.status()["transitions"][0]["cache"].startswith(outcome)
    called = copy.deepcopy(model)
    runtime, call = wrapped(called, cache_dir=str(tmp_path), drop_padding=False)
    compare(model, call, called, batch("behind"))
    assert packed(runtime) == 0


def test_the_names_of_the_loss_are_those_of_its_operators():
    fused_operators.register()
    for name, (rows, labels) in fused_operators.ROWS_AND_LABELS.items():
        namespace, _, operator = name.partition("::")
        arguments = getattr(getattr(torch.ops, namespace), operator).default._schema.arguments
        assert [arguments[i].name for i in (rows, labels, labels + 1)] == ["hidden", "labels", "ignored"]
