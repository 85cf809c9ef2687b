"""Plain loops over ``deepspeed.initialize``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Result, Run, programs
from torch import nn
from torch.nn import functional as F

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


test_programs = programs(gan)
