"""Five families of models train unit by unit under ZeRO-1, 2 and 3 as in plain DeepSpeed, on two ranks."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import Run, compare, trained_alike
from launch_once import once
from models import Batches, build
from torch import nn

from ort_zero.testing.ranks import run_on_ranks

STEPS = 20
PAIRS = (
    ("gpt2_sdpa", 2), ("gpt2_sdpa", 3), ("bert", 1), ("bert", 3), ("llama", 3), ("vit", 2), ("resnet", 1), ("resnet", 3)
)  # fmt: skip

# -- what each rank runs -----------------------------------------------------------------------------------------------


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


def trained(run: Run, name: str, stage: int) -> None:
    """Train twenty steps and evaluate."""
    model, loss_of = losses_of(name, run.rank)
    run.start(model, stage=stage)
    run.train(loss_of, STEPS)
    run.evaluate(loss_of)


def train_all(folder: str) -> dict[str, Any]:
    """Train all pairs of a model and a stage."""
    named = {f"{name}_{stage}": functools.partial(trained, name=name, stage=stage) for name, stage in PAIRS}
    for name, scenario in named.items():
        scenario.__name__ = name
    return compare(named, folder)


# -- what comes of it --------------------------------------------------------------------------------------------------


@once
def _launch() -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="ort_zero_parity_") as folder:
        return run_on_ranks(train_all, 2, folder, timeout=400)


@pytest.mark.parametrize(("name", "stage"), PAIRS)
def test_losses_and_gradients_are_those_of_plain_deepspeed(name, stage):
    for rank, reports in enumerate(_launch()):
        report = reports[f"{name}_{stage}"]
        trained_alike(report, f"{name} under ZeRO-{stage}, rank {rank}")
        (status,) = report["models"]
        assert status["zero_stage"] == stage
        units = len(status["units"])
        assert units >= 2
        assert dict(status["graph_runs"]) == {
            d: n * units for d, n in (("forward", STEPS), ("backward", STEPS), ("inference", 1))
        }
