"""The memory that a training graph needs while it runs, told without running it.

The executor frees a value when the last node that reads it has run; the backward goes on with what the forward left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ort_zero.compat.ort_kernels import BARRIER
from ort_zero.recompute.arena_model import Arena
from ort_zero.recompute.graph_model import Flow

OVERHEAD = 8 << 20
"""Bytes that a first step takes for other things: buffers of kernels and threads. Measured, the same for all models."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a run needs."""

    live: int
    """Bytes of all values that exist at one time."""
    resident: int
    """Bytes that the process grows by: what lies between the values counts as well."""
    at: int
    """Place of the node at which `live` is reached."""
    name: str
    """Of that node."""


def reads_left(flow: Flow) -> Counter[int]:
    """Return how often the memory of each value is still to be read, what outlives the run counted once more."""
    left: Counter[int] = Counter()
    for node in flow.nodes:
        left.update(flow.owner(value) for value in node.reads)
        if node.operator == BARRIER:
            left.update(flow.owner(value) for value in node.reads)  # the caller's until the backward is over
    left.update(flow.owner(value) for value in flow.results)
    return left


def peak(flow: Flow, *, steps: int = 2) -> Peak:
    """Return the most memory that `flow` needs, its nodes run in their order.

    Args:
        flow: see :class:`Flow`.
        steps: so many runs follow one another in one arena: the second finds other gaps than the first.
    """
    arena = Arena()
    most = at = resident = outside = 0
    first = reads_left(flow)
    sizes, owner = flow.sizes, flow.owner
    for step in range(steps):
        left = Counter(first)
        held: dict[int, int] = {}
        live = 0
        for i, node in enumerate(flow.nodes):
            for value in node.makes:
                size = sizes[value]
                if not size:
                    continue
                live += size
                if value in flow.outside:
                    outside += size
                    held[value] = -1
                else:
                    held[value] = arena.take(size)
            for block in [arena.take(size) for size in node.scratch if size]:
                arena.give(block)
            now = live + sum(node.scratch) + node.heap
            if step == 0 and now > most:
                most, at = now, i
            resident = max(resident, arena.resident + outside + node.heap)
            for value in node.reads:
                left[owner(value)] -= 1
            for value in (*node.reads, *node.makes):
                mine = owner(value)
                if not left[mine] and mine in held:
                    live -= sizes[mine]
                    outside -= _free(arena, held.pop(mine), sizes[mine])
        for value, place in held.items():
            outside -= _free(arena, place, sizes[value])
    return Peak(most, resident + OVERHEAD, at, flow.nodes[at].name if flow.nodes else "")


def _free(arena: Arena, place: int, size: int) -> int:
    """Free a value; return its size if it was outside of the arena."""
    if place < 0:
        return size
    arena.give(place)
    return 0
