"""What most trainings of these tests begin and end with: a config, the process group, the full parameters."""

from __future__ import annotations

from typing import Any

import torch

import ort_zero


def ds_config(
    stage: int, *, ort: bool | None, gas: int = 1, lr: float = 1e-3, split: str | None = None, **zero: Any
) -> dict[str, Any]:
    """Return a DeepSpeed config; `ort` None leaves the section out, `split` None that key."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
    }
    if ort is not None:
        config["ort_zero"] = {"ortmodule": {"enabled": ort, **({"split": split} if split is not None else {})}}
    return config


def start() -> int:
    """Start the process group and the plugin; return the rank."""
    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    return torch.distributed.get_rank()


def tiny_engine(kind: str, stage: int, *, ort: bool | None, **ortmodule: Any) -> Any:
    """Return an engine around a model of `tiny_models` with 64 words, the same on all ranks.

    ZeRO-3 partitions every weight.

    Args:
        kind: name of the model.
        stage: of ZeRO.
        ort: see :func:`ds_config`.
        ortmodule: keys of the section's ``ortmodule``, where there is a section.
    """
    import deepspeed
    import tiny_models

    torch.manual_seed(0)
    model = getattr(tiny_models, kind)(words=64, hidden=16, heads=2)
    config = ds_config(stage, ort=ort, lr=1e-2, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    if ort:
        config["ort_zero"]["ortmodule"] |= ortmodule
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def full_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every full parameter. All ranks must call."""
    import deepspeed

    found = {}
    for name, parameter in model.named_parameters():
        # one by one: of several, DeepSpeed before 0.19 waits for the last alone
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
    return found
