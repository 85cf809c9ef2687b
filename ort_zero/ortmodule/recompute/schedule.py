"""The order in which the nodes of a training graph run, so that little memory is held.

Sessions that run with priorities take the node that comes first in the file among those that can run, so the order in
the file is the order of execution. ORT's own orders leave the gradients of weights for the end of the backward
(DEFAULT), with all the activations that they are made of, or do not know how large anything is (MEMORY_EFFICIENT).
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

from ort_zero.ortmodule.recompute.graph_model import GraphModel
from ort_zero.ortmodule.recompute.peak_memory import reads_left

_NOTHING = 4096
"""Bytes up to which growth counts as none."""


def order(graph: GraphModel) -> list[int]:
    """Return the places of the nodes of `graph` in the order in which they are to run.

    The forward stays as it is. In the backward what frees most of all that frees as much as it takes runs first: one
    node, or several that free together what each of them reads (a weight's gradient and its bias's); where nothing
    does, the next node of the given order runs. A copy runs when the first of its readers does.

    Args:
        graph: a graph whose nodes stand in an order in which they can run.
    """
    return _Scheduler(graph).run()


class _Scheduler:
    def __init__(self, graph: GraphModel):
        self._graph = graph
        made_by = graph.makers()
        self._needs = [tuple(dict.fromkeys(made_by[v] for v in node.reads if v in made_by)) for node in graph.nodes]
        self._left = reads_left(graph)
        self._read = [tuple(Counter(map(graph.owner, node.reads)).items()) for node in graph.nodes]
        """For each node the values whose memory it reads, and how often."""
        self._made = [sum(graph.sizes[v] for v in node.makes if self._left[v]) for node in graph.nodes]
        """For each node the bytes of those of its results that are read."""
        self._done = [False] * len(graph.nodes)
        self._order: list[int] = []

    def run(self) -> list[int]:
        nodes = self._graph.nodes
        self._forward()
        waiting = [i for i, node in enumerate(nodes) if not node.copy and not self._done[i]]
        missing = {i: self._missing(i) for i in waiting}
        readers: dict[int, list[int]] = defaultdict(list)
        for i, needed in missing.items():
            for other in needed:
                readers[other].append(i)
        count = {i: len(needed) for i, needed in missing.items()}
        ready = [i for i in waiting if not count[i]]
        while ready:
            for i in self._next(ready):
                ready.remove(i)
                self._execute(self._group(i))
                for reader in readers[i]:
                    count[reader] -= 1
                    if not count[reader]:
                        bisect.insort(ready, reader)
        return self._order

    def _forward(self) -> None:
        """Run the forward: as it stands, and what the barrier needs although it stands behind as soon as it can."""
        barrier = self._graph.barrier
        if barrier < 0:
            return
        left = [i for i in self._group(barrier) if i > barrier]
        for i in range(barrier):
            if self._graph.nodes[i].copy or self._done[i]:
                continue
            self._execute(self._group(i))
            left = [j for j in left if not self._done[j]]
            while (ready := next((j for j in left if all(self._done[k] for k in self._needs[j])), None)) is not None:
                left.remove(ready)
                self._execute([ready])
        self._execute([barrier])

    def _next(self, ready: list[int]) -> list[int]:
        """Return the nodes to run next: one, or all that still read a value that only their last one frees."""
        groups = {i: self._group(i) for i in ready}
        best: tuple[int, ...]
        least, best = min((self._growth(group), (i,)) for i, group in groups.items())
        for together in self._last_readers(ready):
            growth = self._growth(list(dict.fromkeys(chain.from_iterable(groups[i] for i in together))))
            least, best = min((least, best), (growth, together))
        return list(best) if least <= _NOTHING else ready[:1]

    def _last_readers(self, ready: list[int]) -> set[tuple[int, ...]]:
        """Return for each value that several nodes still read, and all of them can run, those nodes."""
        reading: dict[int, list[int]] = defaultdict(list)
        times: dict[int, int] = defaultdict(int)
        for i in ready:
            for value, read in self._read[i]:
                if self._graph.sizes[value] > _NOTHING:
                    times[value] += read
                    reading[value].append(i)
        return {
            tuple(nodes) for value, nodes in reading.items() if len(nodes) > 1 and times[value] == self._left[value]
        }

    def _missing(self, i: int) -> set[int]:
        """Return the nodes, not copies, that have to run before node `i` and its copies can."""
        found: set[int] = set()
        seen, stack = {i}, [i]
        while stack:
            for other in self._needs[stack.pop()]:
                if other in seen or self._done[other]:
                    continue
                seen.add(other)
                if self._graph.nodes[other].copy:
                    stack.append(other)
                else:
                    found.add(other)
        return found

    def _group(self, i: int) -> list[int]:
        """Return the nodes that node `i` still needs, in order, and itself."""
        if all(self._done[other] for other in self._needs[i]):
            return [i]
        found: list[int] = []
        seen, stack = {i}, [(i, iter(self._needs[i]))]
        while stack:
            node, needs = stack[-1]
            for other in needs:
                if not self._done[other] and other not in seen:
                    seen.add(other)
                    stack.append((other, iter(self._needs[other])))
                    break
            else:
                found.append(node)
                stack.pop()
        return found

    def _growth(self, group: Sequence[int]) -> int:
        """Return by how many bytes the memory grows when `group` has run."""
        sizes, left = self._graph.sizes, self._left
        if len(group) == 1:
            (i,) = group
            return self._made[i] - sum(sizes[value] for value, times in self._read[i] if left[value] <= times)
        read: dict[int, int] = {}
        for i in group:
            for value, times in self._read[i]:
                read[value] = read.get(value, 0) + times
        made = sum(self._made[i] for i in group)
        return made - sum(sizes[value] for value, times in read.items() if left[value] <= times)

    def _execute(self, group: list[int]) -> None:
        for i in group:
            self._done[i] = True
            self._order.append(i)
            for value, times in self._read[i]:
                self._left[value] -= times
