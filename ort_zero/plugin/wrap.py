"""Run a model in ONNX Runtime without a DeepSpeed engine: ``ort_zero.wrap``."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ort_zero import config, env, log
from ort_zero.compat import torch_compile
from ort_zero.compat.torch_modules import modules_of
from ort_zero.cpu_memory import measures
from ort_zero.errors import ConfigError
from ort_zero.plugin import collected_script, compile_progress, loading, profiled_script, statistics, summary
from ort_zero.runtimes import registry


def wrap(model: Any, **section: Any) -> Any:
    """Return `model` wrapped so that ONNX Runtime runs it, without DeepSpeed.

    ``ort_zero.wrap(model, exclude=["head"], statistics={"enabled": True, "output_dir": "run"})``: the
    keys are those of the section in a DeepSpeed config, but for "checkpoint" and "metrics", which need an engine. The
    result is `model` itself, with compiled units. It is unchanged if the section or ``ORT_ZERO_DISABLE`` disables
    ort_zero. In a DistributedDataParallel the module inside is wrapped. All
    ranks must call with the same options.

    Args:
        model: a torch module.
        section: the values of the section's keys.

    Raises:
        ConfigError: an unknown key, or a wrong type or value.
        UnsupportedVersionError: torch, Python or ONNX Runtime is missing or out of range.
        BuildError: the C++ extensions cannot be built.
    """
    options = config.parse(section)
    if "checkpoint" in section:
        text = 'a model without a DeepSpeed engine has no checkpoints; leave "checkpoint" out'
        raise ConfigError(f"ort_zero.checkpoint: {text}")
    if "metrics" in section:
        raise ConfigError("ort_zero.metrics: a model without a DeepSpeed engine has no steps; read ort_zero.status()")
    if env.disabled() or not options.enabled or collected_script.section_is_off():
        return model
    if isinstance(model, DistributedDataParallel):
        model.module = wrap(model.module, **section)
        return model
    engine = options.engine()
    if options.cpu_memory and options.memory.recompute != "auto":
        measures.keep_freed_memory()  # for the next step
    if engine != "torch":
        running = loading.load(engine).run(model, profiled_script.without_fallback(options), {})
        announce_units(running, model, options, in_engine=False)
        profiled_script.measure_model(running)
    log.set_level(options.log_level, model)
    session = statistics.collect(model, options.statistics)
    if session is not None:
        vars(model)["ort_zero_statistics"] = session
    return model


def announce_units(running: Any, model: Any, section: config.Config, in_engine: bool = True) -> None:
    """Have a model whose units run be announced once it is ready, shown while it is compiled, known to statistics."""
    statistics.note_onnxruntime(model, running)
    torch_compile.while_converting[:] = [compile_progress.shown]
    running.announce = lambda ready: summary.announce(section, ready.module, ready, in_engine)


def unwrap(model: Any) -> Any:
    """Give every unit of a model its own forward back, and return the user's model; PyTorch runs it from now on.

    Parameters, optimizers and statistics stay as they are. Other ranks need not call.

    Args:
        model: a model that :func:`wrap` has returned, a copy or a part of one, or a DeepSpeed engine's module.
    """
    from ort_zero.units.unit_forward import restore_forward  # needs ONNX Runtime, which a model in PyTorch does not

    for module in modules_of(model):
        restore_forward(module)
    for running in registry.runtimes():
        if running.module is model:
            registry.unregister(running)
    return model
