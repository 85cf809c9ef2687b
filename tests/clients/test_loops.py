"""Plain loops over ``deepspeed.initialize``.

Packed sequences, two engines that exchange gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Result, Run, programs
from small_data import VOCABULARY
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PACKAGES = ()
pytestmark = pytest.mark.clients


def engine_of(run: Run, model: nn.Module, rate: float = 2e-3) -> Any:
    """Return the engine of a model, with AdamW."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=rate)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=run.deepspeed_config(4))[0]


def draws(step: int) -> torch.Generator:
    """Return the generator of a step on this rank."""
    return torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())


class Tagger(nn.Module):
    """An embedding, a bidirectional LSTM over packed sequences, a GRU over those, and a layer for each token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(24, 12, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        packed, _ = self.lstm(packed)
        packed, _ = self.gru(packed)
        states, _ = pad_packed_sequence(packed, batch_first=True, total_length=ids.shape[1])
        return self.head(states)


def packed_rnn(run: Run) -> Result:
    """A tagger of LSTM and GRU over packed sequences of other lengths in each batch"""
    torch.manual_seed(0)
    engine = engine_of(run, Tagger(), rate=1e-2)
    losses = []
    for step in range(6):
        generator = draws(step)
        lengths = torch.randint(2, 9, (4,), generator=generator)
        ids = torch.randint(1, VOCABULARY, (4, 9), generator=generator)
        there = torch.arange(9) < lengths[:, None]
        targets = torch.where(there, ids % 5, -100)
        loss = F.cross_entropy(engine(ids * there, lengths).transpose(1, 2), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Result(losses, alive=engine)


def gan(run: Run) -> Result:
    """A GAN: the generator's gradients come through the discriminator's engine"""
    torch.manual_seed(0)
    generator = engine_of(run, nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 12), nn.Tanh()))
    critic = engine_of(run, nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)))
    losses = []
    for step in range(6):
        random = draws(step)
        real, noise = torch.randn(4, 12, generator=random), torch.randn(4, 8, generator=random)
        ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
        false = generator(noise)
        seen = critic(torch.cat([real, false.detach()]))
        loss = F.binary_cross_entropy_with_logits(seen, torch.cat([ones, zeros]))
        critic.backward(loss)
        critic.step()
        losses.append(loss.item())
        fooled = F.binary_cross_entropy_with_logits(critic(false), ones)
        generator.backward(fooled)
        generator.step()
        critic.optimizer.zero_grad()
        losses.append(fooled.item())
    return Result(losses, alive=(generator, critic))


test_programs = programs(packed_rnn, gan)
