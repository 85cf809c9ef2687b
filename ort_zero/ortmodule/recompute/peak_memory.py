"""The memory that a training graph needs while it runs, computed without running it.

The executor frees a value when the last node that reads it has run; the backward goes on with what the forward left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ort_zero.ortmodule.compat.ort_kernels import BARRIER
from ort_zero.ortmodule.recompute.arena_model import Arena
from ort_zero.ortmodule.recompute.graph_model import GraphModel

OVERHEAD = 8 << 20
"""Bytes that a first step takes for other things: buffers of kernels and threads. Measured, the same for all models."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a run of a graph needs at one time."""

    live: int
    """Bytes of all values that exist at one time."""
    resident: int
    """Bytes that the process grows by: what lies between the values counts as well."""
    at: int
    """Index of the node at which `live` is reached."""
    name: str
    """Name of that node."""
    first: int
    """Bytes that the process grows by in the first run alone: later ones find an arena that is as large already when
    most lies outside of it."""


def reads_left(graph: GraphModel) -> Counter[int]:
    """Return how often the memory of each value is still to be read, what outlives the run counted once more."""
    left: Counter[int] = Counter()
    for node in graph.nodes:
        left.update(graph.owner(value) for value in node.reads)
        if node.operator == BARRIER:
            left.update(graph.owner(value) for value in node.reads)  # the caller's until the backward is over
    left.update(graph.owner(value) for value in graph.results)
    return left


def peak(graph: GraphModel, *, steps: int = 2) -> Peak:
    """Return the most memory that `graph` needs, its nodes run in their order.

    Args:
        graph: the graph, its nodes in the order of execution.
        steps: number of runs that follow one another in one arena: the second finds other gaps than the first.
    """
    arena = Arena()
    for size in graph.constants:
        arena.take(size)
    before = arena.resident  # they fill the first gaps, and shift what comes later
    most = at = resident = outside = in_first = 0
    first = reads_left(graph)
    sizes, owner = graph.sizes, graph.owner
    for step in range(steps):
        left = Counter(first)
        held: dict[int, int] = {}
        live = 0
        for i, node in enumerate(graph.nodes):
            blocks = [arena.take(size) for size in node.scratch if size]  # before the results
            for value in node.makes:
                size = sizes[value]
                if not size:
                    continue
                live += size
                if value in graph.outside:
                    outside += size
                    held[value] = -1
                else:
                    held[value] = arena.take(size)
            for block in blocks:
                arena.give(block)
            now = live + sum(node.scratch) + node.heap
            if step == 0 and now > most:
                most, at = now, i
            resident = max(resident, arena.resident - before + outside + node.heap)
            for value in node.reads:
                left[owner(value)] -= 1
            for value in (*node.reads, *node.makes):
                mine = owner(value)
                if not left[mine] and mine in held:
                    live -= sizes[mine]
                    outside -= _free(arena, held.pop(mine), sizes[mine])
        for value, place in held.items():
            outside -= _free(arena, place, sizes[value])
        in_first = in_first or resident
    return Peak(most, resident + OVERHEAD, at, graph.nodes[at].name if graph.nodes else "", in_first + OVERHEAD)


def _free(arena: Arena, place: int, size: int) -> int:
    """Free a value; return its size if it was outside of the arena."""
    if place < 0:
        return size
    arena.give(place)
    return 0
