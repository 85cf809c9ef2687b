"""Small models of transformers with random weights, and the losses of two batches by turns, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny_models import bert, gpt2, llama
from torch import nn

VOCAB = 211


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return ResNetForImageClassification(ResNetConfig(num_labels=5, **sizes))


SIZES: dict[str, Any] = {"words": VOCAB, "hidden": 32}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: bert(**SIZES),
    "gpt2_eager": lambda: gpt2(**SIZES, attn_implementation="eager"),
    "gpt2_sdpa": lambda: gpt2(**SIZES, attn_implementation="sdpa"),
    "gpt2_dropout": lambda: gpt2(**SIZES, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "llama": lambda: llama(**SIZES),
    "vit": _vit,
    "resnet": _resnet,
}


def build(name: str) -> nn.Module:
    """Return the model `name`, the same on every rank and at every call."""
    torch.manual_seed(0)
    return MODELS[name]()


def losses_of(name: str, rank: int) -> tuple[nn.Module, Callable[[Any, int], torch.Tensor]]:
    """Return a model and the function of its losses: two batches of a rank in turn, so that the loss falls."""
    generator = torch.Generator().manual_seed(100 + rank)

    def batch() -> dict[str, torch.Tensor]:
        if name in ("vit", "resnet"):
            pictures = torch.randn(4, 3, 16, 16, generator=generator)
            return {"pixel_values": pictures, "labels": torch.randint(0, 5, (4,), generator=generator)}
        ids = torch.randint(0, VOCAB, (4, 16), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    batches = [batch(), batch()]

    def loss(model: Any, step: int) -> torch.Tensor:
        of_step = batches[step % 2]
        if name == "gpt2_sdpa":  # no mask; the loss outside; the output taken apart by attribute
            ids = of_step["input_ids"]
            return nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return model(**of_step).loss

    return build(name), loss
