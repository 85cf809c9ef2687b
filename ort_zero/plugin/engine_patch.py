"""Connect a DeepSpeed engine to the section of its config: wrap the model before the engine gets it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ort_zero import config, env, log
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.compat import deepspeed_waits
from ort_zero.compat.torch_distributed import silence_deprecated_collectives
from ort_zero.cpu_memory import measures
from ort_zero.distributed import lone_failures
from ort_zero.distributed.missing_ranks import note_this_rank
from ort_zero.errors import CheckpointError, ConfigError
from ort_zero.plugin import collected_script, fast_bf16, loading, profiled_script, statistics, summary
from ort_zero.plugin.zero3_hooks import patches as zero3_patches
from ort_zero.profiling import metrics
from ort_zero.runtimes import registry
from ort_zero.utils.patching import Patch


def _engine_init(original, self, *args, **kwargs):
    note_this_rank()  # first: the constructor has collectives, which may fail
    bound, ds_config = ds_compat.config_of(original, self, args, kwargs)
    ds_config = collected_script.changed(ds_config)
    section = config.section_of(ds_config)
    if section is None or profiled_script.in_torch():
        measures.begin(False)
        original(self, *args, **kwargs)
        _note(self)
        return None if section is None else profiled_script.measure_engine(self)
    self.ort_zero_section = section
    _refuse_local_storage(ds_config, section)
    log.set_level(section.log_level, self)
    measures.begin(section.cpu_memory)
    silence_deprecated_collectives()
    # for the first engine with a section: without a section DeepSpeed stays unchanged
    registry.apply("gathers", deepspeed_waits.patches)
    engine = section.engine()
    runtime: Any = None
    if engine != "torch":
        measured = profiled_script.without_fallback(section)
        runtime = loading.load(engine).run(bound.arguments["model"], measured, ds_config)
    with zero3_patches.with_section():
        original(*bound.args, **bound.kwargs)
    measures.connect(self, section.cpu_memory, section.memory.recompute == "auto")
    if runtime is not None:
        from ort_zero.units import installation  # needs ONNX Runtime

        installation.connect(runtime, self)
    _note(self)
    if runtime is None:
        summary.announce(section, self.module, None)
    else:
        from ort_zero.plugin.wrap import announce_units  # not with DeepSpeed: it imports torch's compiler

        announce_units(runtime, self.module, section)
        self.__dict__["ort_zero_runtime"] = weakref.ref(runtime)
        profiled_script.measure_engine(self, runtime)
    metrics.write_metrics_of(self, section.metrics, runtime)
    session = statistics.collect(self, section.statistics)
    if session is not None:
        self.__dict__["ort_zero_statistics"] = session


def _note(engine: Any) -> None:
    """Note the rank and the ZeRO stage of a new engine, also without a section; must not raise."""
    registry.engines_made[:] = [True]
    note_this_rank()  # if the engine itself has made the process group
    lone_failures.prepare()
    section, stage = getattr(engine, "ort_zero_section", None), int(engine.zero_optimization_stage())
    if section is not None:
        fast_bf16.watch_first_forward(engine, section)
    # DeepSpeed's own optimizer for bf16 and fp16 keeps all masters on each rank
    has_own_masters = not stage and not isinstance(engine.optimizer, (torch.optim.Optimizer, type(None)))
    if section is not None and section.checkpoint.sharded and has_own_masters:
        engine.__dict__["ort_zero_saves_whole"] = True
        log.get_logger().warning(
            "without ZeRO, save_checkpoint writes bf16 and fp16 runs in DeepSpeed's own format, at once; "
            'for a sharded checkpoint use "zero_optimization": {"stage": 1}'
        )
    from ort_zero.statistics.collect.subscribed_model import remember

    is_replicated = engine.dp_world_size == torch.distributed.get_world_size()
    has_experts = getattr(engine, "has_moe_layers", False)
    remember(engine.module, zero_stage=stage, data_parallel=is_replicated and not has_experts)


def _refuse_local_storage(ds_config: dict, section: config.Config) -> None:
    """Raise ConfigError if each of several hosts would write its part of a sharded checkpoint to its own disk."""
    local = (ds_config.get("checkpoint") or {}).get("use_node_local_storage") is True
    if local and section.checkpoint.sharded and env.several_hosts():
        raise ConfigError(
            '"use_node_local_storage" in the DeepSpeed config means that each host keeps the files of its ranks on its '
            "own disk; a sharded checkpoint is one folder that all hosts see. Save to a folder that they share, or to "
            's3:// or gs://, and remove the key; or set "ort_zero": {"checkpoint": {"sharded": false}} for files of '
            "DeepSpeed's own format"
        )


def _arguments(function: Any, engine: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of a call by name, also those that were left out."""
    bound = inspect.signature(function).bind(engine, *args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _save_checkpoint(original, self, *args, **kwargs):
    section = getattr(self, "ort_zero_section", None)
    if section is None or not section.checkpoint.sharded or "ort_zero_saves_whole" in self.__dict__:
        return original(self, *args, **kwargs)
    arguments = _arguments(original, self, args, kwargs)
    from ort_zero.checkpoint.saves import saving

    with metrics.counting_a_save_of(self):
        names = ("client_state", "save_latest", "exclude_frozen_parameters")
        options = {name: arguments[name] for name in names}
        saving.save(self, arguments["save_dir"], arguments["tag"], section.checkpoint.async_save, **options)
    return True


def _load_checkpoint(original, self, *args, **kwargs):
    arguments = _arguments(original, self, args, kwargs)
    if getattr(self, "ort_zero_section", None) is None or not arguments["load_dir"]:
        return original(self, *args, **kwargs)
    from ort_zero.checkpoint.loads import loading as checkpoint_loading

    def by_deepspeed() -> tuple:
        return original(self, *args, **kwargs)

    if self.load_universal_checkpoint():
        arguments["tag"], is_universal = checkpoint_loading.universal_tag(arguments["load_dir"], arguments["tag"])
        if is_universal:
            return by_deepspeed()
    written_by = checkpoint_loading.format_of(arguments["load_dir"], arguments["tag"])
    if written_by is None or (written_by == "deepspeed" and arguments["custom_load_fn"] is not None):
        return by_deepspeed()
    if arguments["custom_load_fn"] is not None:
        raise CheckpointError("custom_load_fn is not possible with a sharded checkpoint of ort_zero; leave it out")
    try:
        names = ("load_optimizer_states", "load_lr_scheduler_states", "load_module_only")
        options = {"strict": arguments["load_module_strict"], **{name: arguments[name] for name in names}}
        return checkpoint_loading.load(self, arguments["load_dir"], arguments["tag"], **options)
    except checkpoint_loading.UnreadableCheckpointError as error:
        if written_by != "deepspeed":
            raise
        return _loaded_by_deepspeed(self, error, by_deepspeed)


def _loaded_by_deepspeed(engine: Any, reason: Any, by_deepspeed: Callable[[], tuple]) -> tuple:
    """Return the result of DeepSpeed's own loader, if it fits, for a checkpoint that ort_zero cannot load.

    All ranks must call.
    """
    source = reason.source
    if source is not None:
        ours = int(engine.seq_dp_world_size), int(engine.zero_optimization_stage())
        whole = source.zero_stage == ours[1] == 0  # each rank has everything
        if not whole and (source.world_size, source.zero_stage) != ours:
            raise CheckpointError(
                f"{reason}; and DeepSpeed's own loader needs {source.world_size} ranks and ZeRO-{source.zero_stage}, "
                f"as when it was saved; here are {ours[0]} and ZeRO-{ours[1]} (load_optimizer_states=False takes the "
                "weights alone)"
            ) from reason
    log.get_logger().info("DeepSpeed's own loader takes the checkpoint, without the checks of ort_zero: %s", reason)
    loaded = by_deepspeed()
    if loaded[0] is None:
        raise CheckpointError(f"{reason}; and DeepSpeed's own loader found nothing to load") from reason
    return loaded


def _step(original, self, *args, **kwargs):
    result = original(self, *args, **kwargs)
    metrics.after_step_of(self)
    running = self.__dict__.get("ort_zero_runtime", lambda: None)()
    if running is not None:
        running.engine.end_step()
    return result


def _destroy(original, self):
    metrics.end_metrics_of(self)
    measures.end(self)
    session = self.__dict__.pop("ort_zero_statistics", None)
    if session is not None:
        session.remove()
    runtime = self.__dict__.pop("ort_zero_runtime", lambda: None)()
    if runtime is not None:
        registry.end(runtime)
    return original(self)


PATCHES = tuple(
    Patch.in_module(ds_compat.ENGINE, f"DeepSpeedEngine.{name}", build, why)
    for name, build, why in (
        ("__init__", _engine_init, 'reads the "ort_zero" section and wraps the model'),
        ("save_checkpoint", _save_checkpoint, "writes sharded checkpoints"),
        ("step", _step, "writes metrics"),
        ("destroy", _destroy, "ends the collection of statistics, and the model's place in status()"),
        ("load_checkpoint", _load_checkpoint, "reads sharded checkpoints"),
    )
)
