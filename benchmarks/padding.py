"""Measures whether it pays to leave padding out: a BERT on packed rows beside the same one on padded rows.

Packed, embeddings, linear layers, norms and the head see the rows of real tokens alone; queries, keys and values are
spread for the attention and its result is packed again. Both run in ONNX Runtime; 15 % of the real tokens have a label.
CPU time of two steps in turn, the median of the ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, LAYERS, HEADS, VOCABULARY = 256, 4, 4, 8000


class Layer(nn.Module):
    """A layer of BERT on rows [tokens, hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x, mask, real, place):
        batch, length = mask.shape[0], mask.shape[-1]
        heads = [layer(x) for layer in (self.query, self.key, self.value)]
        if real is not None:
            heads = [F.pad(rows, (0, 0, 1, 0))[place] for rows in heads]
        heads = [rows.view(batch, length, HEADS, HIDDEN // HEADS).transpose(1, 2) for rows in heads]
        found = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).reshape(-1, HIDDEN)
        x = self.first(x + self.out(found if real is None else found[real]))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """A BERT for masked words on rows, packed or padded."""

    def __init__(self, packed: bool, length: int):
        super().__init__()
        torch.manual_seed(0)
        self.packed = packed
        self.words, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(length, HIDDEN)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids, positions, mask, labels, real, place):
        x = self.words(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask, real if self.packed else None, place)
        return F.cross_entropy(self.head(x), labels)


def batches(batch: int, length: int, share: float) -> dict[bool, tuple[torch.Tensor, ...]]:
    """Return the arguments of the padded (False) and the packed (True) model for the same tokens.

    Args:
        batch: number of sequences.
        length: of the longest one.
        share: of padding tokens among all.
    """
    generator = torch.Generator().manual_seed(1)
    lengths = (length * (1 - share) * torch.linspace(0.6, 1.4, batch)).clamp(max=length).round().long()
    is_real = torch.arange(length)[None] < lengths[:, None]
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    labelled = (torch.rand(batch, length, generator=generator) < 0.15) & is_real
    rows = [tensor.reshape(-1) for tensor in (ids, torch.arange(length).expand(batch, length))]
    labels = torch.where(labelled, ids, -100).reshape(-1)
    real = is_real.reshape(-1).nonzero().squeeze(1)
    place = torch.zeros(batch * length, dtype=torch.long)
    place[real] = torch.arange(len(real)) + 1
    mask = is_real[:, None, None, :].expand(batch, 1, length, length)
    return {
        False: (*rows, mask, labels, real, place),
        True: (*(row[real] for row in rows), mask, labels[real], real, place),
    }


def stepper(packed: bool, length: int, given: tuple[torch.Tensor, ...]) -> Callable[[], float]:
    """Return a function that runs a step of a new model in ONNX Runtime and returns its loss."""
    from ort_zero.config import OrtModuleConfig
    from ort_zero.plugin.wrap import wrap_model

    runtime, model = wrap_model(Bert(packed, length).train(), OrtModuleConfig(log_level="ERROR"), 0)

    def step() -> float:
        loss: Any = model(*given)
        loss.backward()
        model.zero_grad()
        return loss.item()

    step()
    assert runtime.status()["backend"] == "onnxruntime"
    return step


def main() -> None:
    """Print a line for each size and share of padding."""
    parser = argparse.ArgumentParser(description="A BERT on packed rows beside one on padded rows.")
    parser.add_argument("--sizes", nargs="+", default=["4x256", "8x512"], metavar="BATCHxLENGTH")
    parser.add_argument("--padding", nargs="+", type=float, default=[0.3, 0.6])
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for batch, length in (map(int, size.split("x")) for size in args.sizes):
        for share in args.padding:
            given = batches(batch, length, share)
            steps = {packed: stepper(packed, length, given[packed]) for packed in given}
            losses = [step() for step in steps.values()]
            assert abs(losses[0] - losses[1]) < 1e-4, losses
            ratios = []
            for _ in range(args.rounds):
                seconds = {}
                for packed, step in steps.items():
                    started = time.process_time()
                    step()
                    step()
                    seconds[packed] = time.process_time() - started
                ratios.append(seconds[True] / seconds[False])
            print(f"{batch} x {length}, {share:.0%} padding: packed over padded {statistics.median(ratios):.2f} "
                  f"({min(ratios):.2f} to {max(ratios):.2f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
