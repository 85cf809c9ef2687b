"""The models of ``models`` and two for pictures, each with the function of its losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import Batches, build
from torch import nn


def vit() -> nn.Module:
    """Return a vision transformer for pictures of 16 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def resnet() -> nn.Module:
    """Return a network of residual blocks with batch norms, for pictures of 16 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    sizes = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic")
    return ResNetForImageClassification(ResNetConfig(num_labels=5, **sizes))


def losses_of(name: str, rank: int) -> tuple[nn.Module, Callable[[Any, int], torch.Tensor]]:
    """Return a model and the function of its losses."""
    if name not in ("vit", "resnet"):
        batches = Batches(name, rank)
        return build(name), batches.loss

    def loss(engine: Any, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * (step % 2) + rank)
        pictures = torch.randn(4, 3, 16, 16, generator=generator)
        return engine(pixel_values=pictures, labels=torch.randint(0, 5, (4,), generator=generator)).loss

    return {"vit": vit, "resnet": resnet}[name](), loss
