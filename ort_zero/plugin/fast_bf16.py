"""Say that bf16 would be faster, where a run in fp32 trains on a processor that multiplies it several times as fast."""

from __future__ import annotations

import functools
from typing import Any

from ort_zero import config, env, log

KEYS = '"torch_autocast": {"enabled": true, "dtype": "bfloat16"} or "bf16": {"enabled": true} in the DeepSpeed config'


def is_fast() -> bool:
    """Return True if the processor multiplies bf16 by AMX, of which torch tells by private names alone."""
    return "amx_bf16" in env.cpu_info().split()


def watch_first_forward(engine: Any, section: config.Config) -> None:
    """Have rank 0 say it in the first forward of an engine in fp32, unless ONNX Runtime (no bf16) is to run all."""
    on_rank = env.rank() == 0 and engine.device.type == "cpu"
    if not on_rank or section.compile.place == "ort" or section.engine() == "ortmodule" or not is_fast():
        return
    import torch  # not with doctor, which asks above

    from ort_zero.compat.deepspeed import config_dict

    def hook(called: Any, inputs: Any) -> None:
        handle.remove()
        casts = (config_dict(called).get("torch_autocast") or {}).get("enabled") or torch.is_autocast_enabled("cpu")
        if not casts and {each.dtype for each in called.module.parameters()} == {torch.float32}:
            _say()

    handle = engine.register_forward_pre_hook(hook)


@functools.cache
def _say() -> None:
    text = "this run computes in fp32, and the processor multiplies bf16 several times as fast (AMX): for that set %s; "
    log.get_logger().info(text + "losses then differ by rounding", KEYS)
