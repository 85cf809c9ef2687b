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

from ort_zero.ortmodule.recompute import peak_memory, schedule
from ort_zero.ortmodule.recompute.candidates import Candidate, applied, choose
from ort_zero.ortmodule.recompute.cost_model import seconds_of
from ort_zero.ortmodule.recompute.graph_model import GraphModel
from ort_zero.utils.progress import bar

STEPS = 16
"""Number of points of the path, at most, in which one cluster is added."""
_RESERVE = 0.02
_GAPS = 16 << 20
_SMALL = 128 << 20
"""What of a budget is left free: the share `_RESERVE`, and `_GAPS` bytes for a value that lands in another gap between
the others than was foreseen. Budgets up to `_SMALL` bytes do without these bytes, those up to twice as much need a
part of them."""
_LEAST = 1 << 16
"""Bytes below which a saving counts as none."""


def budget_for(resident: int) -> int:
    """Return the least budget in bytes for which a plan is taken that is predicted to need `resident` bytes."""
    share = 1 - _RESERVE
    part = (resident - _GAPS) / (share - _GAPS / _SMALL)
    return math.ceil(max(resident / share, min(part, (resident + _GAPS) / share)))


@dataclass(frozen=True, slots=True)
class Point:
    """A plan, with the memory and the time that it needs."""

    counts: tuple[tuple[str, int], ...]
    """Key of each cluster with the number of its places that are computed again."""
    live: int
    """Bytes, see :class:`ort_zero.ortmodule.recompute.peak_memory.Peak`."""
    resident: int
    """Bytes, see :class:`ort_zero.ortmodule.recompute.peak_memory.Peak`."""
    seconds: float
    """Estimated seconds that all recomputations of a step take."""
    at: str = ""
    """Name of the node at which the most is needed."""


class Search:
    """Searches the recomputations of one graph that fit a budget.

    Args:
        graph: a graph in which ORT has applied every cluster.
        candidates: the candidates of that graph that may be chosen.
        shown: whether a bar shows how far the walk along the path is.
    """

    def __init__(self, graph: GraphModel, candidates: Sequence[Candidate], shown: bool = False):
        self._graph = graph
        self._candidates = candidates
        self.frequency = Counter(candidate.cluster for candidate in candidates)
        """Key of each cluster, to the number of its places."""
        self._known: dict[tuple[tuple[str, int], ...], Point] = {}
        self._shown = shown
        self._path: list[Point] | None = None

    def point(self, counts: Mapping[str, int]) -> Point:
        """Return the memory and the time that a plan needs.

        Args:
            counts: key of a cluster, to the number of its places that are computed again.
        """
        key = tuple(sorted((name, count) for name, count in counts.items() if count))
        if key not in self._known:
            chosen = choose(self._candidates, counts)
            graph = applied(self._graph, chosen)
            peak = peak_memory.peak(graph.in_order(schedule.order(graph)))
            seconds = sum(seconds_of(graph, node) for node in graph.nodes if node.copy)
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
