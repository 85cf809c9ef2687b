"""Small models with random weights, and batches for them, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny_models import bert, gpt2, llama
from torch import nn

VOCAB = 211
SEQ = 16
BATCH = 4


class OddMLP(nn.Module):
    """An odd number of parameters, so that no partition divides evenly; the loss is computed outside."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.a = nn.Linear(7, 13)
        self.b = nn.Linear(13, 5)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x * self.scale)))


class SharedLayer(nn.Module):
    """A root parameter, a layer that is called twice, a raw matrix product, a convolution and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.root = nn.Parameter(torch.randn(16))
        self.head = nn.Parameter(torch.randn(16, VOCAB) * 0.1)
        self.embed = nn.Embedding(VOCAB, 16)
        self.twice = nn.Linear(16, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, input_ids):
        hidden = self.embed(input_ids) * self.root
        hidden = torch.tanh(self.twice(hidden))
        hidden = torch.tanh(self.twice(hidden)) + self.root
        hidden = self.norm(self.conv(hidden.transpose(1, 2))).transpose(1, 2)
        return hidden @ self.head


def _gpt2(**changes):
    return gpt2(words=VOCAB, hidden=32, **changes)


def _vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return ResNetForImageClassification(ResNetConfig(num_labels=5, **sizes))


def build(name: str) -> nn.Module:
    """Return the model `name`, the same on every rank and at every call."""
    torch.manual_seed(0)
    if name == "mlp":
        return OddMLP()
    if name == "shared":
        return SharedLayer()
    if name == "bert":
        return bert(words=VOCAB, hidden=32)
    if name == "gpt2_eager":
        return _gpt2(attn_implementation="eager")
    if name == "gpt2_sdpa":
        return _gpt2(attn_implementation="sdpa")
    if name == "gpt2_dropout":
        return _gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    if name == "gpt2_frozen":
        model = _gpt2()
        model.transformer.wte.requires_grad_(False)
        model.transformer.h[0].ln_1.requires_grad_(False)
        return model
    if name == "llama":
        return llama(words=VOCAB, hidden=32)
    if name == "vit":
        return _vit()
    if name == "resnet":
        return _resnet()
    raise KeyError(name)


class Batches:
    """Two batches for each rank, in turn, so that the loss falls; the way the model is called varies by name."""

    def __init__(self, name: str, rank: int):
        self.name = name
        generator = torch.Generator().manual_seed(100 + rank)
        self.items = []
        for _ in range(2):
            if name == "mlp":
                item = (torch.randn(BATCH, 7, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator))
            elif name in ("vit", "resnet"):  # pictures of 16 pixels
                pictures = torch.randn(BATCH, 3, 16, 16, generator=generator)
                item = (pictures, torch.randint(0, 5, (BATCH,), generator=generator))
            else:
                ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
                mask = torch.ones_like(ids)
                mask[0, -3:] = 0
                item = (ids, mask)
            self.items.append(item)

    def loss(self, model, i: int) -> torch.Tensor:
        """Return the loss of batch `i` as a user would compute it."""
        first, second = self.items[i % 2]
        if self.name == "mlp":
            return nn.functional.cross_entropy(model(first), second)
        if self.name in ("vit", "resnet"):
            return model(pixel_values=first, labels=second).loss
        if self.name == "shared":
            return nn.functional.cross_entropy(model(first).flatten(0, 1), first.flatten())
        if self.name == "bert":
            return model(input_ids=first, attention_mask=second, labels=first).loss
        if self.name == "gpt2_sdpa":  # no mask; the loss outside; the output taken apart by attribute
            logits = model(first).logits
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), first[:, 1:].flatten())
        return model(input_ids=first, attention_mask=second, labels=first).loss


def losses_of(name: str, rank: int) -> tuple[nn.Module, Callable[[Any, int], torch.Tensor]]:
    """Return a model and the function of its losses."""
    return build(name), Batches(name, rank).loss
