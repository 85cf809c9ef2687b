"""Counts the gathered elements that are alive at once, for benchmarks and tests: it copies every weight."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ort_zero.ortmodule.runtime.zero3.gather_reduce import CollectiveExecutor


class LiveElements:
    """Counts elements of the weights that ORT holds, from the gather of each to the end of its memory.

    Attributes:
        current: elements alive now.
        peak: the most that were alive at once.
        peak_with_ahead: the same with those that were gathered ahead of their use.
    """

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.peak_with_ahead = 0

    def count(self, executor: CollectiveExecutor) -> None:
        """Count what the nodes of `executor` gather from now on.

        ORT then gets copies: weights that it holds are not found by their memory any more
        (:mod:`ort_zero.ortmodule.runtime.zero3.gathered_weights`), so nodes that run in PyTorch must not read any.
        """
        gather = executor.gather

        def counted(index: int) -> tuple[torch.Tensor, ...]:
            parameters = executor.parameters_of(index)
            gathered_here = [not _is_whole_already(executor, parameter) for parameter in parameters]
            weights = gather(index)
            tracked = tuple(self._track(w) if here else w for w, here in zip(weights, gathered_here, strict=True))
            self.peak_with_ahead = max(self.peak_with_ahead, self.current + executor.ahead_elements())
            return tracked

        executor.gather = counted  # type: ignore[method-assign]

    def _track(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of `weight` whose memory reports its own end."""
        array = weight.cpu().numpy().copy()
        self.current += array.size
        self.peak = max(self.peak, self.current)
        weakref.finalize(array, self._untrack, array.size)
        return torch.from_numpy(array)

    def _untrack(self, size: int) -> None:
        self.current -= size


def _is_whole_already(executor: CollectiveExecutor, parameter: Any) -> bool:
    """Return whether `parameter` is whole and not because of an event of `executor`."""
    if executor.store.partitioned([parameter]) or executor.store.in_flight(parameter):
        return False
    return not any(parameter is other for _, parameters in executor.ahead.values() for other in parameters)
