"""diffusers: training steps of a UNet and of a transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Result, Run, programs
from small_data import images
from torch.nn import functional as F

PACKAGES = ("diffusers", "accelerate", "peft")
pytestmark = pytest.mark.clients


def text_unet() -> torch.nn.Module:
    """Return a small UNet with states of a text encoder."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, norm_num_groups=4, attention_head_dim=4,
    )  # fmt: skip


def text_states(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Return states as a text encoder gives them."""
    return torch.randn(rows, 5, 16, generator=generator)


def denoised(
    run: Run,
    model: torch.nn.Module,
    predict: Callable[..., torch.Tensor],
    *,
    size: int = 8,
    offset: float = 0.0,
    clip: bool = False,
    weights: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
) -> Result:
    """Train a model to predict the noise in images of a size, in the loop of diffusers' examples.

    ``predict(model, noisy, steps, batch, generator)`` returns the noise, ``weights(schedule, steps)`` weighs losses;
    `offset` is the share of noise that a whole channel has in common.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs
    from diffusers import DDPMScheduler

    schedule = DDPMScheduler(num_train_timesteps=100)
    # without an accelerator it has to be given the backend's name, to know of both ranks
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loader = torch.utils.data.DataLoader(images(48, size=size), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for batch in loader:
        clean = batch["image"]
        noise = torch.randn(clean.shape, generator=generator)
        if offset:
            noise += offset * torch.randn(*clean.shape[:2], 1, 1, generator=generator)
        steps = torch.randint(0, 100, (len(clean),), generator=generator)
        predicted = predict(model, schedule.add_noise(clean, noise, steps), steps, batch, generator)
        each = F.mse_loss(predicted, noise, reduction="none").mean((1, 2, 3))
        loss = (each if weights is None else each * weights(schedule, steps)).mean()
        accelerator.backward(loss)
        if clip and accelerator.sync_gradients:
            accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, alive=model)


def unet(run: Run) -> Result:
    """UNet2DModel predicting the noise of a DDPM, as in the unconditional training example"""
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, attention_head_dim=8,
    )  # fmt: skip

    def predict(model, noisy, steps, batch, generator):
        return model(noisy, steps, return_dict=False)[0]

    return denoised(run, model, predict, size=16, clip=True)


def text_to_image_lora(run: Run) -> Result:
    """text_to_image_lora: LoRA on the attention of a frozen UNet, min-SNR weights, noise offset, clipping"""
    from diffusers.training_utils import compute_snr
    from peft import LoraConfig

    model = text_unet().requires_grad_(False)
    names = ["to_k", "to_q", "to_v", "to_out.0"]
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=names))

    def predict(model, noisy, steps, batch, generator):
        return model(noisy, steps, text_states(len(noisy), generator), return_dict=False)[0]

    def min_snr(schedule, steps):
        snr = compute_snr(schedule, steps)
        return snr.clamp(max=5.0) / snr

    return denoised(run, model, predict, offset=0.1, clip=True, weights=min_snr)


test_programs = programs(unet, text_to_image_lora, launcher="accelerate")
