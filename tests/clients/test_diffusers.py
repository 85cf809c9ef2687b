"""diffusers: training steps of a UNet and of a transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ZERO_2_AND_3, Result, Run
from small_data import images

PACKAGES = ("diffusers", "accelerate")
pytestmark = pytest.mark.clients


def accelerated(run: Run, model: torch.nn.Module, size: int) -> tuple[Any, ...]:
    """Return an Accelerator that knows of both ranks and what it has prepared."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(images(48, size=size), batch_size=4)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def unet(run: Run) -> Result:
    """UNet2DModel predicting the noise of a DDPM, as in the unconditional training example"""
    from diffusers import DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8,
    )  # fmt: skip
    schedule = DDPMScheduler(num_train_timesteps=100)
    accelerator, model, optimizer, loader = accelerated(run, model, 16)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for batch in loader:
        clean = batch["image"]
        noise = torch.randn(clean.shape, generator=generator)
        steps = torch.randint(0, 100, (len(clean),), generator=generator)
        noisy = schedule.add_noise(clean, noise, steps)
        predicted = model(noisy, steps, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted, noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, alive=model)


@ZERO_2_AND_3
def test_unet(client, stage):
    client.compare(unet, stage, launcher="accelerate")


def dit(run: Run) -> Result:
    """DiTTransformer2DModel with class labels, learned sigma left out of the loss"""
    from diffusers import DDIMScheduler, DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=6, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, dropout=0.0,
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # of the class labels
            module.dropout_prob = 0.0
    schedule = DDIMScheduler(num_train_timesteps=100)
    accelerator, model, optimizer, loader = accelerated(run, model, 8)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for batch in loader:
        clean = batch["image"]
        noise = torch.randn(clean.shape, generator=generator)
        steps = torch.randint(0, 100, (len(clean),), generator=generator)
        noisy = schedule.add_noise(clean, noise, steps)
        predicted = model(noisy, timestep=steps, class_labels=batch["label"]).sample[:, :3]
        loss = torch.nn.functional.mse_loss(predicted, noise)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, alive=model)


@ZERO_2_AND_3
def test_dit(client, stage):
    client.compare(dit, stage, launcher="accelerate")


def conditional_unet(run: Run) -> Result:
    """UNet2DConditionModel with text states and classifier-free guidance's dropped prompts, as in text-to-image"""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, norm_num_groups=4, attention_head_dim=4,
    )  # fmt: skip
    schedule = DDPMScheduler(num_train_timesteps=100)
    accelerator, model, optimizer, loader = accelerated(run, model, 8)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for step, batch in enumerate(loader):
        clean = batch["image"]
        noise = torch.randn(clean.shape, generator=generator)
        steps = torch.randint(0, 100, (len(clean),), generator=generator)
        text = torch.randn(len(clean), 5, 16, generator=generator) * (step % 3 != 0)
        predicted = model(schedule.add_noise(clean, noise, steps), steps, encoder_hidden_states=text).sample
        loss = torch.nn.functional.mse_loss(predicted, noise)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, alive=model)


@ZERO_2_AND_3
def test_conditional_unet(client, stage):
    client.compare(conditional_unet, stage, launcher="accelerate")
