"""Measures what ``"drop_padding"`` gives: a step of BERT or GPT-2 with it, without it, and in PyTorch.

15 % of BERT's real tokens have a label, every real token of GPT-2. CPU time of two steps in turn, the median of the
ratios.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from training_models import build

VOCABULARY = 8000


def batch_of(model: str, batch: int, length: int, share: float) -> dict[str, torch.Tensor]:
    """Return the arguments of a step.

    Args:
        model: name of the model.
        batch: number of sequences.
        length: of the longest one.
        share: of padding tokens among all.
    """
    generator = torch.Generator().manual_seed(1)
    lengths = (length * (1 - share) * torch.linspace(0.6, 1.4, batch)).clamp(max=length).round().long()
    mask = torch.arange(length)[None] < (lengths[:, None] if share else length)
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    labelled = mask & (torch.rand(batch, length, generator=generator) < (0.15 if model == "bert" else 1))
    return {
        "input_ids": ids,
        "attention_mask": mask.expand(batch, length).long(),
        "labels": torch.where(labelled, ids, -100),
    }


def stepper(model: nn.Module, drop_padding: bool | None) -> Callable[[dict[str, torch.Tensor]], float]:
    """Return a function that runs a step of a model and returns its loss.

    Args:
        model: is wrapped.
        drop_padding: whether ONNX Runtime leaves padding out; None for PyTorch.
    """
    from ort_zero.config import OrtModuleConfig
    from ort_zero.ortmodule.wrap import wrap_model

    runtime, called = None, model
    if drop_padding is not None:
        config = OrtModuleConfig(log_level="ERROR", drop_padding=drop_padding)
        runtime, called = wrap_model(model, config, 0)

    def step(given: dict[str, torch.Tensor]) -> float:
        loss: Any = called(**given).loss
        loss.backward()
        model.zero_grad()
        if runtime is not None:
            graphs = runtime.status()["graphs"]["training"]
            assert runtime.status()["backend"] == "onnxruntime"
            assert ("packed_rows" in graphs["kernels"]) == drop_padding, graphs
        return loss.item()

    return step


def main() -> None:
    """Print a line for each size and share of padding."""
    parser = argparse.ArgumentParser(description="A step without padding beside one with it, and PyTorch's.")
    parser.add_argument("--models", nargs="+", default=["bert", "gpt2"], choices=["bert", "gpt2"])
    parser.add_argument("--sizes", nargs="+", default=["4x256", "8x512"], metavar="BATCHxLENGTH")
    parser.add_argument("--padding", nargs="+", type=float, default=[0.0, 0.3, 0.6])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        for batch, length in (map(int, size.split("x")) for size in args.sizes):
            model = build(name, {"hidden": 256, "layers": 4, "vocab": VOCABULARY, "seq": length})
            steps = {how: stepper(copy.deepcopy(model), how) for how in (None, False, True)}
            for share in args.padding:
                given = batch_of(name, batch, length, share)
                losses = [step(given) for step in steps.values()]
                assert max(losses) - min(losses) < 1e-4, losses
                ratios: dict[str, list[float]] = {"without": [], "PyTorch": []}
                for _ in range(args.rounds):
                    seconds = {}
                    for how, step in steps.items():
                        started = time.process_time()
                        step(given)
                        step(given)
                        seconds[how] = time.process_time() - started
                    ratios["without"].append(seconds[True] / seconds[False])
                    ratios["PyTorch"].append(seconds[True] / seconds[None])
                found = ", ".join(f"{statistics.median(ratio):.2f} of {what}" for what, ratio in ratios.items())
                print(f"{name}, {batch} x {length}, {share:.0%} padding: {found}", flush=True)


if __name__ == "__main__":
    main()
