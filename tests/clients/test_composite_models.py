"""A SentenceTransformer and a model of diffusers load from what aggregate writes, beside the run's configurations."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes.ranks import run_on_ranks
from torch import nn

from ort_zero.checkpoint import aggregate, verify

pytestmark = pytest.mark.clients


def train(model: nn.Module, loss: Any, folder: str, tag: str) -> None:
    """Do two steps on each rank, and save."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "ort_zero": {"backend": "torch"},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(loss(engine.module))
        engine.step()
    engine.save_checkpoint(folder, tag=tag)


def sentence_transformer(folder: str) -> Any:
    """Return a SentenceTransformer of three modules around a small BERT."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "a", "cat", "dog", "sees"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    place = f"{folder}/bert"
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(place)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=16, **sizes)).save_pretrained(place)
    modules = [Transformer(place), Pooling(16), Dense(16, 8), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def embed(folder: str) -> torch.Tensor:
    """Train a SentenceTransformer, save as its Trainer does: configurations, then the engine; return embeddings."""
    rank = int(os.environ["RANK"])
    model = sentence_transformer(f"{folder}/base_{rank}")
    if not rank:
        model.save_pretrained(f"{folder}/run")
        for path in Path(folder, "run").rglob("*.safetensors"):
            path.unlink()

    def loss(module: Any) -> torch.Tensor:
        features = module.tokenize(["a cat sees a dog", "a dog"])
        return module(features)["sentence_embedding"].sum()

    train(model, loss, f"{folder}/run", "step")
    return model.encode(["a cat", "dog sees cat"], convert_to_tensor=True, show_progress_bar=False).cpu()


def test_a_sentence_transformer(tmp_path):
    importlib.import_module("torchvision_operators")  # before transformers looks for torchvision
    from sentence_transformers import SentenceTransformer

    imports = ("torchvision_operators", "sentence_transformers")
    expected, _ = run_on_ranks(embed, 2, str(tmp_path), timeout=800, imports=imports)
    for number, source in enumerate((tmp_path / "run", tmp_path / "run" / "step")):
        out = tmp_path / f"out_{number}"
        report = aggregate(source, out, progress=False)
        assert not report.warnings, report.warnings
        loaded = SentenceTransformer(str(out), device="cpu")
        found = loaded.encode(["a cat", "dog sees cat"], convert_to_tensor=True, show_progress_bar=False).cpu()
        assert torch.allclose(found, expected, atol=1e-6)
    assert verify(tmp_path / "run", progress=False).ok


def denoise(folder: str, kind: str) -> torch.Tensor:
    """Train a model of diffusers and save; return what it predicts."""
    import diffusers

    torch.manual_seed(0)
    if kind == "UNet2DModel":
        sizes = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8}
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        model = diffusers.UNet2DModel(in_channels=1, out_channels=1, **sizes, **blocks)
    else:
        model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    channels = 1 if kind == "UNet2DModel" else 3
    x = torch.randn(2, channels, 8, 8, generator=torch.Generator().manual_seed(1))

    def predict(module: Any) -> torch.Tensor:
        return module(x, 3).sample if kind == "UNet2DModel" else module(x).sample

    train(model, lambda module: predict(module).square().mean(), folder, kind)
    with torch.no_grad():
        return predict(model.eval())


@pytest.mark.parametrize("kind", ["UNet2DModel", "AutoencoderKL"])
@pytest.mark.parametrize("size", ["5GB", 20_000], ids=["one file", "several"])
def test_models_of_diffusers(kind, size, tmp_path):
    importlib.import_module("torchvision_operators")
    import diffusers

    imports = ("torchvision_operators", "diffusers")
    expected, _ = run_on_ranks(denoise, 2, str(tmp_path), kind, timeout=800, imports=imports)
    report = aggregate(tmp_path, tmp_path / "out", tag=kind, max_shard_size=size, progress=False)
    assert not report.warnings, report.warnings
    model = getattr(diffusers, kind).from_pretrained(tmp_path / "out").eval()
    x = torch.randn(2, 1 if kind == "UNet2DModel" else 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(x, 3).sample if kind == "UNet2DModel" else model(x).sample
    assert torch.allclose(found, expected, atol=1e-5)
