"""Write the figures of an engine every few optimizer steps, to a file for Prometheus and to DeepSpeed's monitors."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ort_zero import log
from ort_zero.errors import ConfigError
from ort_zero.profiling.figures import figures_of, prometheus_text
from ort_zero.utils import atomic_write

_RANK = "{rank}"


def path_of_rank(path: str | None, rank: int) -> Path | None:
    """Return the metrics file of one rank, None if the rank writes no file.

    Args:
        path: ``metrics.path`` of the section; with ``{rank}`` in it each rank writes a file, else rank 0 alone.
        rank: global rank.
    """
    if path is None or (rank != 0 and _RANK not in path):
        return None
    return Path(path.replace(_RANK, str(rank))).expanduser()


class MetricsWriter:
    """The writer of one engine's figures.

    Args:
        path: file of this rank, replaced as a whole at each write; None for no file.
        every: number of optimizer steps between two writes.
        rank: global rank, a label of every figure.
        model: class name of the model, a label of every figure.
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
