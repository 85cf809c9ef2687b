"""The backend of onnxruntime-training, as :class:`ort_zero.runtimes.interface.Backend` declares it.

Nothing heavy is imported at module level: the plugin asks for :func:`import_hooks` within ``import torch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ort_zero.errors import ConfigError
from ort_zero.ortmodule.upstream.examination import examine
from ort_zero.ortmodule.upstream.hooks import import_hooks

if TYPE_CHECKING:
    from ort_zero import config
    from ort_zero.units.running_model import UnitsModel

__all__ = ["examine", "import_hooks", "run"]


def _refuse_16_bits(ds_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for 16-bit training on a CPU, for which ONNX Runtime has no kernels."""
    if not ds_config:
        return
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    for key, flag in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if (ds_config.get(key) or {}).get("enabled") is True:
            raise ConfigError(
                f'"{key}" is enabled in the DeepSpeed config, and ONNX Runtime\'s CPU provider has no kernels for it; '
                f'remove "{key}" to train in fp32 (it may come from {flag}=True of TrainingArguments or SFTConfig, '
                f'TRL\'s default on CPUs too, or from mixed_precision="{flag}" of Accelerate: set {flag}=False or '
                'mixed_precision="no" there), use a GPU, or set "ort_zero": {"backend": "torch"}'
            )


def run(model: Any, section: config.Config, ds_config: Mapping[str, Any]) -> UnitsModel:
    """Have the units of `model` run in onnxruntime-training, in place; return what runs the model."""
    _refuse_16_bits(ds_config)
    from ort_zero.compat import deepspeed_units, versions

    versions.say_untested(versions.require("ort"))
    from ort_zero.ortmodule import memory
    from ort_zero.ortmodule.engine import OrtEngine
    from ort_zero.ortmodule.graphs.rewrites import REWRITES
    from ort_zero.ortmodule.settings import Settings
    from ort_zero.ortmodule.upstream.building import BuildOptions
    from ort_zero.units.finding import find_units
    from ort_zero.units.installation import install

    zero = ds_config.get("zero_optimization") or {}
    stage = int(zero.get("stage", 0))
    max_elements = deepspeed_units.max_gathered_elements(model, zero) if stage == 3 else None
    raises = section.fallback == "raise"
    recompute = memory.wanted_by(section.memory)
    settings = Settings(
        recompute=recompute,
        raises=raises,
        times_units=section.ortmodule.place == "measured",
        build=BuildOptions(
            log_level=section.log_level,
            save_onnx=section.save_onnx,
            recomputes=recompute is not None,
        ),
    )
    if stage == 3:
        REWRITES.update([deepspeed_units.linear_in_graphs()])
    units = find_units(model, exclude=section.exclude, max_elements=max_elements)
    return install(model, OrtEngine(settings), units, stage, raises)
