"""Write figures of a running training every few optimizer steps: for Prometheus, and to DeepSpeed's monitors."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ort_zero import log
from ort_zero.errors import ConfigError
from ort_zero.utils import atomic_write

_RANK = "{rank}"


class Figure(NamedTuple):
    """The name, type and help text of one figure."""

    name: str
    """Name after ``ort_zero_`` in the text for Prometheus, and after ``ort_zero/`` in monitors; the unit ends it."""
    kind: str
    """``"counter"`` for a figure that counts from the start of the process on, else ``"gauge"``."""
    help: str


FIGURES = (
    Figure("step_seconds", "gauge", "Mean wall time of an optimizer step since the previous figures."),
    Figure("graphs", "gauge", "Graphs that are kept."),
    Figure("fallbacks", "gauge", "Units and models that PyTorch runs because they could not be compiled."),
    Figure("parts_in_torch", "gauge", "Operators that PyTorch runs inside of graphs."),
    Figure("forward_runs", "counter", "Forwards that ONNX Runtime has run."),
    Figure("backward_runs", "counter", "Backwards that ONNX Runtime has run."),
    Figure("saves", "counter", "Checkpoints that this rank has begun to save."),
    Figure("save_seconds", "counter", "Time for which training has waited for saves."),
    Figure("resident_bytes", "gauge", "Resident memory of the process."),
    Figure("peak_resident_bytes", "counter", "Maximum resident memory of the process so far."),
)


def figures_of(status: Mapping[str, Any] | None, saves: int, save_seconds: float, step: float) -> dict[str, float]:
    """Return the value of each figure by its name; a model in PyTorch has no status."""
    status = status or {}
    runs = status.get("graph_runs", {})
    return {
        "step_seconds": step,
        "graphs": status.get("compiled", {}).get("graphs", 0),
        "fallbacks": status.get("fallbacks", 0),
        "parts_in_torch": len(status.get("in_torch", ())),
        "forward_runs": runs.get("forward", 0),
        "backward_runs": runs.get("backward", 0),
        "saves": saves,
        "save_seconds": save_seconds,
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def prometheus_text(figures: Mapping[str, float], step: int, labels: Mapping[str, Any]) -> str:
    """Return a whole file for Prometheus' node exporter (text format 0.0.4): figures of one rank, with labels."""
    values = {"step": step, **figures}
    label = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    lines = []
    for name, kind, text in (Figure("step", "gauge", "Optimizer steps so far."), *FIGURES):
        if name in values:
            full = f"ort_zero_{name}{'_total' if kind == 'counter' else ''}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full}{{{label}}} {values[name]!r}"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def path_of_rank(path: str | None, rank: int) -> Path | None:
    """Return the metrics file of one rank, None if the rank writes no file.

    Args:
        path: ``metrics.path`` of the section; with ``{rank}`` in it each rank writes a file, else rank 0 alone.
    """
    if path is None or (rank != 0 and _RANK not in path):
        return None
    return Path(path.replace(_RANK, str(rank))).expanduser()


class MetricsWriter:
    """The writer of one engine's figures.

    Args:
        path: file of this rank, replaced as a whole at each write; None for no file.
        status: returns the status of the model; None for a model in PyTorch.
        monitor: takes the figures of rank 0 as ``(name, value, step)`` for DeepSpeed's monitors; None if none is on.

    Raises:
        ConfigError: the file cannot be written on this rank.
    """

    def __init__(
        self,
        path: Path | None,
        every: int,
        rank: int,
        model: str,
        status: Callable[[], Any] | None,
        monitor: Callable[[Sequence[tuple[str, float, int]]], Any] | None = None,
    ):
        self._path = path
        self._every = every
        self._labels = {"rank": rank, "host": socket.gethostname(), "model": model}
        self._status = status
        self._monitor = monitor
        self._written_at: tuple[int, float] | None = None
        self._saves, self._save_seconds = 0, 0.0
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("ab").close()
            except OSError as error:
                raise ConfigError(f"ort_zero.metrics.path: {path} cannot be written on rank {rank}: {error}") from error

    @contextmanager
    def counting_a_save(self) -> Iterator[None]:
        """Count the block as a save, with its seconds."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._saves += 1
            self._save_seconds += time.monotonic() - start

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
        seconds = (now - then) / (step - before) if step > before else 0.0
        status = self._status() if self._status is not None else None
        figures = figures_of(status, self._saves, self._save_seconds, seconds)
        if self._path is not None:
            try:
                atomic_write.write_text(self._path, prometheus_text(figures, step, self._labels))
            except OSError as error:  # a file of figures must not stop the training
                log.get_logger().warning("no metrics are written any more: %s: %s", self._path, error)
                self._path = None
        if self._monitor is not None:
            self._monitor([(f"ort_zero/{name}", value, step) for name, value in figures.items()])
