"""Connects a DeepSpeed engine to the section of its config: wraps the model before the engine sees it."""

from __future__ import annotations

import functools
from typing import Any

from ort_zero import config, log
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.errors import ConfigError
from ort_zero.hooks import mode
from ort_zero.patching import Patch, defined_in


def _engine_init(original):
    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        bound, ds_config = ds_compat.config_of(original, self, args, kwargs)
        section = config.section_of(ds_config)
        if section is None:
            return original(self, *args, **kwargs)
        log.get_logger()
        log.set_level(section.ortmodule.log_level)
        if not section.ortmodule.enabled:
            with mode.use("torch"):
                return original(self, *args, **kwargs)
        stage = int((ds_config.get("zero_optimization") or {}).get("stage", 0))
        _refuse_half_on_cpu(ds_config)
        runtime, bound.arguments["model"] = wrap(bound.arguments["model"], section.ortmodule, stage)
        with mode.use("ort"):
            original(*bound.args, **bound.kwargs)
        _connect(self, runtime)
        return None

    return __init__


def wrap(model: Any, section: config.OrtModuleConfig, stage: int) -> tuple[Any, Any]:
    """Return the runtime of `model` and the ORTModule around it.

    Raises:
        UnsupportedVersionError: torch, Python or onnxruntime-training is out of range.
        BuildError: the C++ extensions cannot be built.
    """
    from ort_zero import plugin
    from ort_zero.compat import ortmodule as ort_compat
    from ort_zero.graph.runtime import Runtime

    plugin.patch_ortmodule()
    wrapped = ort_compat.make_ortmodule(model, save_onnx=section.save_onnx)
    runtime = Runtime(model, section, stage)
    ort_compat.attach(wrapped, runtime)
    plugin.register(runtime)
    return runtime, wrapped


def _connect(engine: Any, runtime: Any) -> None:
    """Tell the runtime what is known only after the engine is made."""
    offload = ds_compat.parameter_offload_of(engine)
    runtime.stage = int(engine.zero_optimization_stage())
    if offload is not None:
        runtime.group = offload.dp_process_group
        runtime.prefetch_elements = ds_compat.prefetch_window(offload)


def _refuse_half_on_cpu(ds_config: dict) -> None:
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    for key in ("bf16", "bfloat16", "fp16"):
        if (ds_config.get(key) or {}).get("enabled") is True:
            raise ConfigError(
                f'"{key}" is enabled in the DeepSpeed config, and ONNX Runtime\'s CPU provider has no kernels for it; '
                f'remove "{key}" to train in fp32, use a GPU, or set "ort_zero": {{"ortmodule": {{"enabled": false}}}}'
            )


PATCHES = (
    Patch(
        target=ds_compat.ENGINE_INIT,
        build=_engine_init,
        why='reads the "ort_zero" section and wraps the model',
        guard=defined_in(ds_compat.ENGINE),
    ),
)
