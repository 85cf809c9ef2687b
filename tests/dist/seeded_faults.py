"""Three models, and the twelve faults that the comparison of two runs must find in each of them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import torch
from tiny_models import bert, gpt2
from torch import nn
from torch.nn import functional as F

BATCH, SEQ, VOCAB, HIDDEN = 4, 8, 60, 32


class Attention(nn.Module):
    """One head over the places of a picture, with a mask and a place embedding."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(17, HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.scaling = HIDDEN**-0.5

    def forward(self, x, mask):
        q, k, v = self.qkv(x + self.places(torch.arange(x.shape[1]))).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) * self.scaling + mask
        return self.out(scores.softmax(-1) @ v)


class Block(nn.Module):
    """Depthwise convolution, normalisation, two linear layers, as in ConvNeXt."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.act, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.down(self.act(self.up(y))).permute(0, 3, 1, 2)


class Cnn(nn.Module):
    """A convolutional net whose picture is conditioned on a token, with attention over places at its end."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, HIDDEN, 2, stride=2), nn.BatchNorm2d(HIDDEN)
        self.token = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.attention, self.head = Attention(), nn.Linear(HIDDEN, 5)

    def forward(self, pixels, token, labels, mask):
        x = self.bn(self.stem(pixels)) + self.token(token)[:, :, None, None]
        for block in self.blocks:
            x = block(x)
        x = x.flatten(2).transpose(1, 2)
        logits = self.head(self.attention(x, mask).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def build(name: str) -> nn.Module:
    """Return ``"gpt2"``, ``"bert"`` or ``"cnn"``, the same at every call; biases are not zero."""
    torch.manual_seed(0)
    if name == "cnn":
        model = Cnn()
    else:
        kind = {"gpt2": gpt2, "bert": bert}[name]
        model = kind(words=VOCAB, hidden=HIDDEN, heads=2, positions=SEQ + 1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.05)
    return model


def batch(name: str, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return the arguments of one call; the mask hides something."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(1, VOCAB, (BATCH, SEQ), generator=generator)
    if name == "cnn":
        mask = torch.zeros(BATCH, 1, 16)
        mask[0, :, -5:] = -1e4
        pixels = torch.randn(BATCH, 3, 8, 8, generator=generator)
        return {"pixels": pixels, "token": ids[:, 0], "labels": ids[:, 1] % 5, "mask": mask}
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


PARTS = {
    "gpt2": {
        "act": "transformer.h.1.mlp.act", "attention": "transformer.h.0.attn", "norm": "transformer.h.1.ln_2",
        "square": "transformer.h.0.attn.c_proj", "biased": "transformer.h.1.mlp.c_fc", "block": "transformer.h.0",
        "tokens": "transformer.wte", "positions": "transformer.wpe", "mlp": "transformer.h.0.mlp",
    },
    "bert": {
        "act": "bert.encoder.layer.1.intermediate.intermediate_act_fn",
        "attention": "bert.encoder.layer.0.attention.self",
        "norm": "bert.encoder.layer.1.attention.output.LayerNorm",
        "square": "bert.encoder.layer.0.attention.output.dense",
        "biased": "bert.encoder.layer.1.intermediate.dense", "block": "bert.encoder.layer.0",
        "tokens": "bert.embeddings.word_embeddings", "positions": "bert.embeddings.position_embeddings",
        "mlp": "bert.encoder.layer.0.intermediate",
    },
    "cnn": {
        "act": "blocks.1.act", "attention": "attention", "norm": "blocks.1.norm", "square": "attention.out",
        "biased": "blocks.1.up", "block": "blocks.0", "tokens": "token", "positions": "attention.places",
        "mlp": "blocks.0",
    },
}  # fmt: skip
"""The parts that faults are put into, by their role."""


def _replace_forward(module: nn.Module, function: Callable) -> None:
    """Let ``function(module, original, *args, **kwargs)`` run in place of the module's forward."""
    original = module.forward

    def forward(self, *args, **kwargs):
        return function(self, original, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def _on_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def forward(self, original, *args, **kwargs):
        outputs = original(*args, **kwargs)
        return (change(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else change(outputs)

    return forward


def _gelu(model, parts):
    path = parts["act"]
    parent = model.get_submodule(path.rpartition(".")[0])
    exact = isinstance(getattr(parent, path.rpartition(".")[2]), nn.GELU) or "bert" in path
    setattr(parent, path.rpartition(".")[2], nn.GELU("tanh" if exact else "none"))


def _scaled_softmax(model, parts):
    attention = model.get_submodule(parts["attention"])
    if hasattr(attention, "scaling"):
        attention.scaling *= 1.02
    else:
        attention.scale_attn_weights = not attention.scale_attn_weights


def _epsilon(model, parts):
    norm = model.get_submodule(parts["norm"])
    norm.eps = 1e-5 if norm.eps < 1e-6 else 1e-4  # BERT has 1e-12, the others 1e-5


def _transposed(model, parts):
    layer = model.get_submodule(parts["square"])
    # transformers' Conv1D has its weight the other way round
    plain = isinstance(layer, nn.Linear)

    def forward(self, original, x):
        return F.linear(x, self.weight.t() if plain else self.weight, self.bias)

    _replace_forward(layer, forward)


def _dropped_bias(model, parts):
    layer = model.get_submodule(parts["biased"])
    _replace_forward(layer, lambda self, original, x: original(x) - self.bias)


@contextlib.contextmanager
def _sdpa_without_mask():
    original = F.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, **more):
        return original(q, k, v, attn_mask=None, **{**more, "is_causal": False})

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _wrong_mask(model, parts):
    def forward(self, original, *args, **kwargs):
        if isinstance(self, Attention):
            return original(args[0], torch.zeros_like(args[1]))
        with _sdpa_without_mask():
            return original(*args, **kwargs)

    _replace_forward(model.get_submodule(parts["attention"]), forward)


def _stale_row(model, parts):
    table = model.get_submodule(parts["tokens"])
    stale = torch.full((1, HIDDEN), 0.03)

    def forward(self, original, ids):
        # every row of the batch has this token once: its first
        row = ids.flatten()[0]
        return torch.where((ids == row).unsqueeze(-1), stale, original(ids))

    _replace_forward(table, forward)


def _off_by_one(model, parts):
    _replace_forward(model.get_submodule(parts["positions"]), lambda self, original, ids: original(ids + 1))


def _rounded(model, parts):
    _replace_forward(model.get_submodule(parts["block"]), _on_first(lambda x: x.bfloat16().float()))


def _nan(model, parts):
    def poison(x):
        places = torch.arange(x.numel()).view(x.shape)
        return torch.where(places == 5, float("nan"), x)

    _replace_forward(model.get_submodule(parts["norm"]), _on_first(poison))


class Steeper(torch.autograd.Function):
    """Returns its argument, and a gradient that is 2 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.02

    @staticmethod
    def infer_shape(node, shapes, types):
        return shapes, types


def _wrong_gradient(model, parts):
    _replace_forward(model.get_submodule(parts["mlp"]), lambda self, original, x: original(Steeper.apply(x)))


FAULTS: dict[str, tuple[Callable[[Any, dict], None], str, str]] = {
    "a GELU variant": (_gelu, "act", "forward"),
    "a scaled softmax": (_scaled_softmax, "attention", "forward"),
    "epsilon in LayerNorm": (_epsilon, "norm", "forward"),
    "a transposed weight": (_transposed, "square", "forward"),
    "a dropped bias": (_dropped_bias, "biased", "forward"),
    "wrong mask": (_wrong_mask, "attention", "forward"),
    "stale embedding row": (_stale_row, "tokens", "forward"),
    "off-by-one position": (_off_by_one, "positions", "forward"),
    "bf16 rounding in one block": (_rounded, "block", "forward"),
    "a NaN from one layer": (_nan, "norm", "forward"),
    "a wrong gradient only": (_wrong_gradient, "mlp", "backward"),
    "one rank's data shuffled": (lambda model, parts: None, "", "input"),
}
"""What to do to a model, the role of the part to be named, and the direction."""
