"""Start the metrics that a section asks for, and count an engine's steps and saves in them."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ort_zero import config, env, log
from ort_zero.errors import ConfigError
from ort_zero.profiling.metrics import MetricsWriter, path_of_rank

_WRITER = "ort_zero_metrics"
_writers: weakref.WeakKeyDictionary[MetricsWriter, tuple[str | None, int]] = weakref.WeakKeyDictionary()
"""For the writer of each living engine: path in the section, and number of the engine among those with this path."""


def write_metrics_of(engine: Any, section: config.MetricsConfig, runtime: Any) -> None:
    """Write metrics of an engine from now on, as the section says. All ranks must call.

    Raises:
        ConfigError: on all ranks, if one rank cannot write its file.
    """
    monitor = engine.monitor if section.monitor and getattr(engine.monitor, "enabled", False) else None
    if section.path is None and monitor is None:
        return
    from ort_zero.distributed.raise_on_all_ranks import default_group

    # an actor and a critic may share one config: each engine gets a file, in the order of construction
    taken = {number for path, number in _writers.values() if path == section.path}
    number = next(i for i in range(1, len(taken) + 2) if i not in taken)
    path = path_of_rank(section.path, env.rank())
    if path is not None and number > 1:
        path = path.with_name(f"{path.stem}_{number}{path.suffix}")
        log.get_logger().info("metrics of engine %d go to %s", number, path)
    model = type((runtime or engine).module).__name__
    with default_group().raise_on_all("opening the file for metrics", everywhere=ConfigError):
        writer = engine.__dict__[_WRITER] = MetricsWriter(
            path,
            section.every,
            env.rank(),
            model,
            runtime.status if runtime is not None else None,
            monitor.write_events if monitor is not None else None,
        )
        _writers[writer] = section.path, number


def after_step_of(engine: Any) -> None:
    """Write the metrics of an engine every ``every`` steps; must be called after each ``engine.step()``."""
    writer = engine.__dict__.get(_WRITER)
    if writer is not None:
        writer.after_step(engine.global_steps)


def end_metrics_of(engine: Any) -> None:
    """Stop writing the metrics of an engine; the next engine with this path gets its file."""
    writer = engine.__dict__.pop(_WRITER, None)
    if writer is not None:
        _writers.pop(writer, None)


def save_of(engine: Any) -> AbstractContextManager[None]:
    """Return a context whose block counts as a save of the engine, with its seconds."""
    writer = engine.__dict__.get(_WRITER)
    return writer.counting_a_save() if writer is not None else nullcontext()
