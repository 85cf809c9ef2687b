"""Record the ranges and operators of a step with torch.profiler, and return them as trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Tree = TypeVar("Tree")


class OperatorProfiler:
    """A recorder of all operators of this process on the CPU, from :meth:`start` to :meth:`stop`.

    Raises:
        RuntimeError: by :meth:`start`, if the program profiles itself.
    """

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def start(self) -> None:
        """Start recording."""
        self._profiler.start()

    def stop(self) -> None:
        """Stop recording."""
        self._profiler.stop()

    def trees(self, root: str, make: Callable[[str, float, list[Tree]], Tree]) -> list[Tree]:
        """Return a tree for each range with the name `root`, in order, with all records below it in its thread.

        Args:
            root: name of a range.
            make: makes a tree from a name, seconds, and the trees below.
        """

        def tree(event: Any) -> Tree:
            return make(event.name, event.time_range.elapsed_us() / 1e6, [tree(one) for one in event.cpu_children])

        events = [event for event in self._profiler.events() or () if event.name == root and not event.is_async]
        return [tree(event) for event in sorted(events, key=lambda event: event.time_range.start)]

    def events_for_chrome(self) -> list[dict[str, Any]]:
        """Return all records of this process: name, number of the thread, begin and duration in microseconds."""
        events = [event for event in self._profiler.events() or () if not event.is_async]
        return [
            {
                "name": event.name,
                "tid": event.thread,
                "ts": event.time_range.start,
                "dur": event.time_range.elapsed_us(),
            }
            for event in events
        ]
