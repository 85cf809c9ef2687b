"""Guards on values: a graph holds while tensors have the values that Python code took from them during the trace.

Their values now are further outputs of the graph, so a forward call learns after the run whether its graph holds
(:mod:`ort_zero.ortmodule.runtime.forward_call`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ort_zero.ortmodule.compat.value_reads import ValueReadError

MOST_FAILURES = 3
"""Number of times that a graph is exported again because one value changed, before its module runs in PyTorch
instead."""


def first_failed(guards: Sequence[tuple[list, ValueReadError]], values: Sequence[Any]) -> int | None:
    """Return the index of the first guard that does not hold, -1 if all do, None if there are no guards.

    Args:
        guards: values as they were in the trace, and where Python code took them.
        values: one flat tensor for each guard, as it is in this call.
    """
    if not guards:
        return None
    for index, ((value, _), now) in enumerate(zip(guards, values, strict=True)):
        if value != now.tolist():
            return index
    return -1


class GuardFailures:
    """Counts how often each guard of a model has failed."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def happens_often(self, cause: str) -> bool:
        """Count that a graph did not run for a cause; return whether exporting again has become a waste."""
        self._counts[cause] += 1
        return self._counts[cause] > MOST_FAILURES

    def changes_often(self, read: ValueReadError) -> bool:
        """Count a failure of the guard on `read`; return whether exporting again has become a waste.

        It is at once where random numbers take part.
        """
        self._counts[str(read)] += 1
        return read.random or self._counts[str(read)] > MOST_FAILURES
