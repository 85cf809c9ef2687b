"""Finds the cheapest recomputations that fit a budget.

There is one *path* for a graph: recomputations in the order of what they save for their time, each added in full
before the next. A budget takes the first point of the path that fits, so that a smaller budget never needs more memory
than a larger one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ort_zero.recompute import peak_memory, schedule
from ort_zero.recompute.candidates import Entry, applied, choose
from ort_zero.recompute.cost_model import seconds_of
from ort_zero.recompute.graph_model import Flow
from ort_zero.utils.progress import bar

STEPS = 16
"""A cluster is added in at most so many steps."""
_RESERVE = 0.02
_GAPS = 16 << 20
_SMALL = 128 << 20
"""Of a budget a share is left free, and so many bytes for a value that lands in another gap between the others than was
foreseen. Budgets up to the third need the latter not at all, and those up to twice as much in part."""
_LEAST = 1 << 16
"""Savings of fewer bytes are none."""


def budget_for(resident: int) -> int:
    """Return the least budget in bytes for which a plan is taken that is predicted to need `resident` bytes."""
    share = 1 - _RESERVE
    part = (resident - _GAPS) / (share - _GAPS / _SMALL)
    return math.ceil(max(resident / share, min(part, (resident + _GAPS) / share)))


@dataclass(frozen=True, slots=True)
class Point:
    """A plan, and what it needs."""

    counts: tuple[tuple[str, int], ...]
    """How many places of each cluster, by its key."""
    live: int
    """Bytes, see :class:`ort_zero.recompute.peak_memory.Peak`."""
    resident: int
    seconds: float
    """Estimate of the time of all recomputations of a step."""
    at: str = ""
    """Node at which the most is needed."""


class Search:
    """Works on one graph.

    Args:
        flow: in which ORT has applied every cluster.
        entries: of that flow, those that may be chosen.
        shown: whether a bar shows how far the walk along the path is.
    """

    def __init__(self, flow: Flow, entries: Sequence[Entry], shown: bool = False):
        self._flow = flow
        self._entries = entries
        self.frequency = Counter(entry.cluster for entry in entries)
        """How many places each cluster has."""
        self._known: dict[tuple[tuple[str, int], ...], Point] = {}
        self._shown = shown
        self._path: list[Point] | None = None

    def point(self, counts: Mapping[str, int]) -> Point:
        """Return what a plan needs."""
        key = tuple(sorted((name, count) for name, count in counts.items() if count))
        if key not in self._known:
            chosen = choose(self._entries, counts)
            flow = applied(self._flow, chosen)
            peak = peak_memory.peak(flow.in_order(schedule.order(flow)))
            seconds = sum(seconds_of(flow, node) for node in flow.nodes if node.copy)
            self._known[key] = Point(key, peak.live, peak.resident, seconds, peak.name)
        return self._known[key]

    @property
    def walked(self) -> bool:
        """Whether the path is known."""
        return self._path is not None

    def path(self) -> list[Point]:
        """Return the points from no recomputation to the least memory."""
        if self._path is None:
            self._path = self._walk()
        return self._path

    def fit(self, budget: int) -> Point | None:
        """Return the first point that needs no more than `budget` bytes, None if there is none."""
        return next((point for point in self.path() if budget_for(point.resident) <= budget), None)

    def least(self) -> Point:
        """Return the point that needs the least memory."""
        return min(self.path(), key=lambda point: point.resident)

    def _walk(self) -> list[Point]:
        counts: dict[str, int] = {}
        here = self.point(counts)
        path = [here]
        left = [(name,) for name in self.frequency]
        together = self._together(here)
        with bar(len(left), "planning memory", "cluster", shown=self._shown) as shown:
            while (move := self._best(counts, here, [*left, *together])) is not None:
                path += self._steps(counts, move)
                counts.update({name: self.frequency[name] for name in move})
                here = self.point(counts)
                left = [other for other in left if other[0] not in counts]
                together = [pair for pair in together if not set(pair) <= counts.keys()]
                shown.update(len(counts) - shown.n)
        return path

    def _together(self, here: Point) -> list[tuple[str, ...]]:
        """Return pairs that save together what neither does: what the one holds, the other can compute again."""
        alone = {name: here.live - self.point({name: n}).live for name, n in self.frequency.items()}
        found: list[tuple[str, ...]] = []
        for pair in itertools.combinations(self.frequency, 2):
            saving = here.live - self.point({name: self.frequency[name] for name in pair}).live
            if saving > alone[pair[0]] + alone[pair[1]] + _LEAST:
                found.append(pair)
        return found

    def _best(self, counts: dict[str, int], here: Point, moves: Collection[tuple[str, ...]]) -> tuple[str, ...] | None:
        best, best_worth = None, 0.0
        for move in moves:
            there = self.point(counts | {name: self.frequency[name] for name in move})
            saving = here.live - there.live
            if saving < _LEAST:
                continue
            worth = saving / max(there.seconds - here.seconds, 1e-6)
            if worth > best_worth:
                best, best_worth = move, worth
        return best

    def _steps(self, counts: dict[str, int], move: tuple[str, ...]) -> list[Point]:
        most = max(self.frequency[name] for name in move)
        each = max(1, -(-most // STEPS))
        points = []
        for n in [*range(each, most, each), most]:
            # of clusters that go together the shares grow alike
            part = {name: -(-n * self.frequency[name] // most) for name in move}
            points.append(self.point(counts | part))
        return points
