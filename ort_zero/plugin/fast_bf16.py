"""Say that bf16 would be faster, where a run in fp32 trains on a processor that multiplies it several times as fast."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ort_zero import config, env, log
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.utils.processor import has_fast_bf16


def watch_first_forward(engine: Any, section: config.Config) -> None:
    """Have the first forward of a DeepSpeed engine say it, on rank 0, if the forward computes in fp32.

    Not with a backend or a ``"place"`` that has ONNX Runtime run all it can, which has no bf16 on CPUs.
    """
    if env.rank() or engine.device.type != "cpu" or "ort" in (section.compile.place, section.ortmodule.place):
        return
    if section.engine() == "ortmodule" or not has_fast_bf16():
        return

    def hook(called: Any, inputs: Any) -> None:
        handle.remove()
        by_deepspeed = ds_compat.config_dict(called).get("torch_autocast") or {}
        is_wide = all(each.dtype is torch.float32 for each in called.module.parameters() if each.is_floating_point())
        if is_wide and not (by_deepspeed.get("enabled") or torch.is_autocast_enabled("cpu")):
            _say()

    handle = engine.register_forward_pre_hook(hook)


@functools.cache
def _say() -> None:
    log.get_logger().info(
        "this run computes in fp32, and the processor multiplies bf16 several times as fast (AMX): for that set "
        '"torch_autocast": {"enabled": true, "dtype": "bfloat16"} or "bf16": {"enabled": true} in the DeepSpeed '
        "config; losses then differ by rounding"
    )
