"""What most trainings of these tests begin and end with: a config, the process group, the full parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import ort_zero


def ds_config(stage: int, *, ort: bool | None, gas: int = 1, lr: float = 1e-3, **zero: Any) -> dict[str, Any]:
    """Return a DeepSpeed config; `ort` None leaves the section out, False has PyTorch run the model."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }
    if ort is not None:
        config["ort_zero"] = {} if ort else {"backend": "torch"}
    return config


def start() -> int:
    """Start the process group and the plugin; return the rank."""
    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    return torch.distributed.get_rank()


def full_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every full parameter. All ranks must call."""
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters():
        # one by one: of several, DeepSpeed before 0.19 waits for the last alone
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
    return found


def grid(size: int) -> SimpleNamespace:
    """Return groups of ranks as DeepSpeed asks for them: two ranks next to each other share a model. All ranks call."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    models = [torch.distributed.new_group(range(i, i + size)) for i in range(0, count, size)]
    data = [torch.distributed.new_group(range(i, count, size)) for i in range(size)]
    found = {"data_parallel_group": data[rank % size]}
    found |= {"data_parallel_rank": rank // size, "data_parallel_world_size": count // size}
    for name in ("model_parallel", "tensor_model_parallel"):
        found |= {f"{name}_group": models[rank // size], f"{name}_rank": rank % size, f"{name}_world_size": size}
    return SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in found.items()})
