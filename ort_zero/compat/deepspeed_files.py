"""The classes and numbers of DeepSpeed that its checkpoint files hold, for writing them. Version 0.19."""

from __future__ import annotations

from typing import Any

from ort_zero.errors import CheckpointError


def require_deepspeed() -> str:
    """Return the version of the installed DeepSpeed, whose classes stand in its files.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import deepspeed
    except ImportError:
        raise CheckpointError(
            "DeepSpeed is not installed, and its checkpoints hold objects of its classes; pip install deepspeed, or "
            "convert to ort_zero's format"
        ) from None
    return deepspeed.__version__


def stage_number(stage: int) -> Any:
    """Return what DeepSpeed stores as the ZeRO stage."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum(stage)


def fragment(start: int, length: int) -> Any:
    """Return what DeepSpeed stores as the place of a parameter's part in a rank's flat tensor, in elements."""
    from deepspeed.utils.tensor_fragment import fragment_address

    return fragment_address(numel=length, start=start)


def loss_scaler(saved: dict[str, Any] | None, half: bool) -> Any:
    """Return a loss scaler with the numbers that were saved, or a new one.

    Args:
        saved: ``{"class": name, "state": numbers}`` or None.
        half: True for a run in fp16, the only one with a dynamic scale.
    """
    import torch
    from deepspeed.runtime.fp16 import loss_scaler as scalers

    made: Any
    if half:
        made = scalers.DynamicLossScaler(
            init_scale=2**16, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False,
            dtype=torch.half,
        )  # fmt: skip
    else:
        made = scalers.LossScaler(scale=1.0)
    if saved is not None:
        if saved["class"] == "LossScaler" and half:
            made = scalers.LossScaler(scale=1.0)
        if saved["class"] == type(made).__name__:
            vars(made).update(saved["state"])
    return made
