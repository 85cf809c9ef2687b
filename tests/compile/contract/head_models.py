"""A model with a head of many classes, its losses, and a step whose numbers are compared with PyTorch's."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, WIDTH = 4096, 16

CASES = [
    ("shifted", {}, 0.15),
    ("shifted", {"bias": True}, 0.0),
    ("padded", {"tied": True}, 0.15),
    ("padded", {"bias": True}, 1.0),
    ("as module", {"tied": True}, 1.0),
    ("as module", {}, 0.0),
]
"""Names of losses, options of the model, and shares of the tokens that have a label."""


class Block(nn.Module):
    """A linear layer beside its input."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """An embedding, two blocks, and a head of many classes, which may share the embedding's weight."""

    def __init__(self, bias: bool = False, tied: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def batch(share: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels; a share of the tokens has a label."""
    ids = torch.randint(0, CLASSES, (3, 21))
    return ids, torch.where(torch.rand(ids.shape) < share, ids, -100)


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels[..., 1:].contiguous().view(-1))


def padded(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    target = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.float().view(-1, CLASSES), target, ignore_index=-100, reduction="sum") / 7


def as_module(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss()(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)


LOSSES = {"shifted": shifted, "padded": padded, "as module": as_module}


def step_of(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Run the backward of a loss; return the loss, and the gradients of all parameters that have one."""
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(results: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Compare tensors; the tolerance is relative to the largest element of each."""
    for ours, theirs in zip(results, wanted, strict=True):
        size = float(theirs.nan_to_num().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * size + 1e-9, equal_nan=True)
