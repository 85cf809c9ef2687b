"""Make the objects of DeepSpeed 0.19 that its checkpoint files contain, to write such files."""

from __future__ import annotations

from typing import Any

from ort_zero.errors import CheckpointError


def require_deepspeed() -> str:
    """Return the version of the installed DeepSpeed, whose classes are needed to write its files.

    Raises:
        CheckpointError: DeepSpeed is not installed.
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
    """Return the object that DeepSpeed stores as the ZeRO stage."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum(stage)


def fragment(start: int, length: int) -> Any:
    """Return the object that DeepSpeed stores for a parameter's range in a rank's flat tensor, in elements."""
    from deepspeed.utils.tensor_fragment import fragment_address

    return fragment_address(numel=length, start=start)


def loss_scaler(saved: dict[str, Any] | None, half: bool) -> Any:
    """Return a loss scaler of DeepSpeed with the saved state, or a new one.

    Args:
        saved: ``{"class": name, "state": attributes}`` or None.
        half: True for a run in fp16, the only precision with a dynamic scale.
    """
    import torch
    from deepspeed.runtime.fp16 import loss_scaler as scalers

    state = saved or {"class": "", "state": {}}
    scaler: Any = scalers.LossScaler(scale=1.0)
    if half and state["class"] != "LossScaler":
        scaler = scalers.DynamicLossScaler(
            init_scale=2**16, scale_window=1000, min_scale=1, delayed_shift=2, consecutive_hysteresis=False,
            dtype=torch.half,
        )  # fmt: skip
    if state["class"] == type(scaler).__name__:
        vars(scaler).update(state["state"])
    return scaler
