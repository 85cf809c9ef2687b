"""The backend of onnxruntime-training, as :class:`ort_zero.backends.interface.Backend` declares it.

Nothing heavy is imported at module level: the plugin asks for :func:`import_hooks` within ``import torch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ort_zero.errors import ConfigError

if TYPE_CHECKING:
    from ort_zero import config
    from ort_zero.backends.interface import Examination, MemoryPlanOptions, OnModelWrapped
    from ort_zero.ortmodule.compat.extensions import BuildReport
    from ort_zero.ortmodule.recompute.plan_report import PlanReport
    from ort_zero.ortmodule.runtime.runtime import Runtime
    from ort_zero.ortmodule.session_profiles import SessionProfiles

_PACKAGE = "onnxruntime.training.ortmodule"
_UTILS = "onnxruntime.training.utils"


def import_hooks(on_wrapped: OnModelWrapped) -> dict[str, Callable[[Any], None]]:
    """Return what to call after the imports of modules of onnxruntime-training that need this torch's names."""

    def name_exporter(module: Any) -> None:
        from ort_zero.ortmodule import patching

        patching.name_exporter_modules()

    def patch_constructor(module: Any) -> None:
        from ort_zero.ortmodule import bare_ortmodule

        bare_ortmodule.patch_constructor(on_wrapped)

    def patch_ranges(module: Any) -> None:
        from ort_zero.ortmodule import patching

        patching.patch_ranges()

    def patch_statistics(module: Any) -> None:
        from ort_zero.ortmodule import patching

        patching.patch_statistics()

    return {
        # the first module that ORTModule's package imports, before those that need torch's old names
        f"{_PACKAGE}._fallback_exceptions": name_exporter,
        f"{_PACKAGE}.ortmodule": patch_constructor,
        # imported without ORTModule by programs that collect statistics of a plain PyTorch model
        f"{_UTILS}.torch_profile_utils": patch_ranges,
        f"{_UTILS}.hooks._statistics_subscriber": patch_statistics,
    }


def refuse(ds_config: Mapping[str, Any]) -> None:
    """Raise ConfigError for 16-bit training on a CPU, for which ONNX Runtime has no kernels."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    for key, flag in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if (ds_config.get(key) or {}).get("enabled") is True:
            raise ConfigError(
                f'"{key}" is enabled in the DeepSpeed config, and ONNX Runtime\'s CPU provider has no kernels for it; '
                f'remove "{key}" to train in fp32 (it may come from {flag}=True of TrainingArguments or SFTConfig, '
                f'TRL\'s default on CPUs too, or from mixed_precision="{flag}" of Accelerate: set {flag}=False or '
                'mixed_precision="no" there), use a GPU, or set "ort_zero": {"ortmodule": {"enabled": false}}'
            )


def run_for_engine(model: Any, section: config.Config, zero: Mapping[str, Any]) -> tuple[Runtime, Any]:
    """Return the runtime of `model` and the ORTModule around the model, for a DeepSpeed engine of a ZeRO stage."""
    from ort_zero.ortmodule.wrap import wrap_model

    return wrap_model(
        model,
        section.ortmodule,
        int(zero.get("stage", 0)),
        memory_efficient_gradients=section.memory_efficient_gradients,
        memory=section.memory,
    )


def connect(running: Any, engine: Any) -> None:
    """Give a runtime what is known only once the engine exists: its stage, process group and prefetch window."""
    from ort_zero.compat import deepspeed_gradient_order
    from ort_zero.compat.deepspeed import flops_are_counted, parameter_offload_of
    from ort_zero.ortmodule.compat import deepspeed_engine
    from ort_zero.ortmodule.runtime.zero3 import prefetch_limits
    from ort_zero.ortmodule.runtime.zero3.kept_weights import KeptWeights

    offload = parameter_offload_of(engine)
    running.is_profiled = flops_are_counted(engine)
    running.stage = int(engine.zero_optimization_stage())
    if offload is not None:
        running.group = deepspeed_engine.partition_group_of(offload)
        running.kept_weights = KeptWeights(prefetch_limits.limits_of(offload))
        deepspeed_engine.connect_leaf_gradients(engine)
    elif not running.memory_efficient_gradients:
        # a rank may divide its graph, or build another one, alone: its gradients come in another order from then on
        deepspeed_gradient_order.keep_order(engine.optimizer, [engine.module])


def run_alone(model: Any, section: config.Config) -> tuple[Runtime, Any]:
    """Return the runtime of `model` and the ORTModule around the model; no other rank need call at the same time."""
    runtime, wrapped = run_for_engine(model, section, {})
    runtime.in_step = False
    return runtime, wrapped


def unwrap(model: Any) -> Any:
    """Return the user's module in an ORTModule; any other model itself."""
    from ort_zero.compat.torch_modules import inside_of_ortmodule

    return inside_of_ortmodule(model)


def node_profiles(prefix: str) -> SessionProfiles:
    """Have new sessions record their nodes, into files that begin with `prefix`."""
    from ort_zero.ortmodule.session_profiles import SessionProfiles

    return SessionProfiles(prefix)


def build(force: bool) -> BuildReport:
    """Compile the C++ extensions that are missing, all of them with `force`."""
    from ort_zero.ortmodule.compat import extensions

    return extensions.build(force=force)


def examine() -> Examination:
    """Return whether the C++ extensions are built, and what hinders a build."""
    from ort_zero.ortmodule import examination

    return examination.examine()


def plan_memory(options: MemoryPlanOptions, tell: Callable[[int, int, str], None]) -> PlanReport:
    """Plan recomputation with a user's script, write the files that were asked for, and return the report."""
    from ort_zero.ortmodule.recompute import plan_report

    return plan_report.plan(options, tell)
