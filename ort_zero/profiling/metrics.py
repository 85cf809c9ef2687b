"""Write figures of a running training every few optimizer steps: for Prometheus, and to DeepSpeed's monitors."""

from __future__ import annotations

import os
import resource
import socket
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ort_zero import env, log
from ort_zero.distributed.raise_on_all_ranks import default_group
from ort_zero.errors import ConfigError
from ort_zero.utils import atomic_write

_WRITER = "ort_zero_metrics"
_RANK = "{rank}"
FIGURES = {
    "step": ("gauge", "Optimizer steps so far."),
    "step_seconds": ("gauge", "Mean wall time of an optimizer step since the previous figures."),
    "graphs": ("gauge", "Graphs that are kept."),
    "fallbacks": ("gauge", "Units and models that PyTorch runs because they could not be compiled."),
    "parts_in_torch": ("gauge", "Operators that PyTorch runs inside of graphs."),
    "forward_runs": ("counter", "Forwards that ONNX Runtime has run."),
    "backward_runs": ("counter", "Backwards that ONNX Runtime has run."),
    "saves": ("counter", "Checkpoints that this rank has begun to save."),
    "save_seconds": ("counter", "Time for which training has waited for saves."),
    "resident_bytes": ("gauge", "Resident memory of the process."),
    "peak_resident_bytes": ("counter", "Maximum resident memory of the process so far."),
}
"""Type and help text of each figure. Its name stands after ``ort_zero_`` in the text for Prometheus, and after
``ort_zero/`` in monitors; a counter counts from the start of the process on."""
_writers: weakref.WeakKeyDictionary[MetricsWriter, tuple[str | None, int]] = weakref.WeakKeyDictionary()
"""For the writer of each living engine: path in the section, and number of the engine among those with this path."""


def write_metrics_of(engine: Any, section: Any, runtime: Any) -> None:
    """Write metrics of an engine from now on, as the section says. All ranks must call.

    Args:
        section: a :class:`~ort_zero.config.MetricsConfig`.
        runtime: runs the engine's model in ONNX Runtime; None for a model in PyTorch.
    """
    monitor = engine.monitor if section.monitor and getattr(engine.monitor, "enabled", False) else None
    if section.path is None and monitor is None:
        return
    # an actor and a critic may share one config: each engine gets a file, in the order of construction
    taken = {number for path, number in _writers.values() if path == section.path}
    number = next(i for i in range(1, len(taken) + 2) if i not in taken)
    path = path_of_rank(section.path, env.rank())
    if path is not None and number > 1:
        path = path.with_name(f"{path.stem}_{number}{path.suffix}")
        log.get_logger().info("metrics of engine %d go to %s", number, path)
    with default_group().raise_on_all("opening the file for metrics", everywhere=ConfigError):
        model = type((runtime or engine).module).__name__
        writer = engine.__dict__[_WRITER] = MetricsWriter(path, section.every, model, runtime, monitor)
        _writers[writer] = section.path, number


def end_metrics_of(engine: Any) -> None:
    """Stop writing the metrics of an engine; the next engine with this path gets its file."""
    if writer := engine.__dict__.pop(_WRITER, None):
        _writers.pop(writer, None)


def after_step_of(engine: Any) -> None:
    """Write the metrics of an engine every ``every`` steps; must be called after each ``engine.step()``."""
    if writer := engine.__dict__.get(_WRITER):
        writer.after_step(engine.global_steps)


@contextmanager
def counting_a_save_of(engine: Any) -> Iterator[None]:
    """Count the block as a save of the engine, with its seconds."""
    start = time.monotonic()
    try:
        yield
    finally:
        if writer := engine.__dict__.get(_WRITER):
            writer.saves += 1
            writer.save_seconds += time.monotonic() - start


def path_of_rank(path: str | None, rank: int) -> Path | None:
    """Return the metrics file of one rank, None if only rank 0 writes one: a path without ``{rank}``."""
    if path is None or (rank != 0 and _RANK not in path):
        return None
    return Path(path.replace(_RANK, str(rank))).expanduser()


def prometheus_text(figures: Mapping[str, float], step: int, labels: Mapping[str, Any]) -> str:
    """Return a whole file for Prometheus' node exporter (text format 0.0.4): figures of one rank, with labels."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    label = ",".join(f'{name}="{str(value).translate(escapes)}"' for name, value in labels.items())
    lines = []
    for name, value in {"step": step, **figures}.items():
        kind, text = FIGURES[name]
        full = f"ort_zero_{name}{'_total' if kind == 'counter' else ''}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full}{{{label}}} {value!r}"]
    return "\n".join(lines) + "\n"


class MetricsWriter:
    """The writer of one engine's figures.

    Args:
        path: file of this rank, replaced as a whole at each write; None for no file.
        runtime: has the status of the model; None for a model in PyTorch.
        monitor: DeepSpeed's monitors, which take the figures of rank 0; None if none is on.
    """

    def __init__(self, path: Path | None, every: int, model: str, runtime: Any = None, monitor: Any = None):
        self._path, self._every, self._runtime, self._monitor = path, every, runtime, monitor
        self._labels = {"rank": env.rank(), "host": socket.gethostname(), "model": model}
        self._written_at: tuple[int, float] | None = None
        self.saves, self.save_seconds = 0, 0.0
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("ab").close()
            except OSError as error:
                text = f"ort_zero.metrics.path: {path} cannot be written on rank {env.rank()}: {error}"
                raise ConfigError(text) from error

    def after_step(self, step: int) -> None:
        """Write the figures every few steps; `step` is the number of optimizer steps that the engine has done."""
        now = time.monotonic()
        if self._written_at is None:  # the first step also builds graphs
            self._written_at = step, now
        elif step == self._written_at[0]:
            return
        if step == 0 or step % self._every:
            return
        before, then = self._written_at
        self._written_at = step, now
        figures = self._figures((now - then) / (step - before) if step > before else 0.0)
        if self._path is not None:
            try:
                atomic_write.write_text(self._path, prometheus_text(figures, step, self._labels))
            except OSError as error:  # a file of figures must not stop the training
                log.get_logger().warning("no metrics are written any more: %s: %s", self._path, error)
                self._path = None
        if self._monitor is not None:
            self._monitor.write_events([(f"ort_zero/{name}", value, step) for name, value in figures.items()])

    def _figures(self, step_seconds: float) -> dict[str, float]:
        status = self._runtime.status() if self._runtime is not None else {}
        runs = status.get("graph_runs", {})
        return {
            "step_seconds": step_seconds,
            "graphs": status.get("compiled", {}).get("graphs", 0),
            "fallbacks": status.get("fallbacks", 0),
            "parts_in_torch": len(status.get("in_torch", ())),
            "forward_runs": runs.get("forward", 0),
            "backward_runs": runs.get("backward", 0),
            "saves": self.saves,
            "save_seconds": self.save_seconds,
            "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
