"""Guard on sizes: a graph serves a call if Python code would take from its sizes what it took in the trace.

Sizes themselves are dynamic, but for those that a graph takes for equal, or for 1, where operands are broadcast. A
branch (``x.shape[1] > 8``) holds for all sizes on one side of it, a loop over an axis for one size. What is computed
for the shapes of one call is remembered, so that a call costs a look-up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ort_zero.ortmodule.compat.size_program import Evaluation, SizeProgram
from ort_zero.ortmodule.compat.trace_sizes import COUNT, NUMBER, RANK, TRUTH, result_of

Shapes = tuple
"""Shape of each tensor among the arguments of a call, in their order."""
_MOST_REMEMBERED = 4096
"""Maximum number of different shapes whose answer a guard remembers."""


@dataclass(frozen=True, slots=True)
class GuardedRead:
    """Something that Python code took from sizes in a trace."""

    step: int
    """Step of the program that computes it."""
    kind: str
    """Kind of the result, see :mod:`ort_zero.ortmodule.compat.trace_sizes`."""
    seen: Any
    """The result in the trace."""
    expression: str
    """The Python expression, "" if it is not known."""
    line: str
    """``"FILE:LINE in FUNCTION"`` of the code."""
    path: str
    """Path of the submodule whose code it is, "" for the model itself."""

    def what(self) -> str:
        """Return what the code does, for messages: ``"branches on x.shape[1] > 8 (model.py:12 in forward)"``."""
        if self.kind == TRUTH:
            text = f"branches on {self.expression or 'sizes'}"
        elif self.kind == COUNT:
            text = "takes a tensor apart into as many pieces as its size gives"
        elif self.kind == RANK:
            text = "drops axes of size 1"
        elif self.kind == NUMBER:
            text = f"takes {self.expression or 'a size'} for a Python number"
        else:
            text = f"takes {self.expression or 'what depends on sizes'} for a Python value"
        return f"{text} ({self.line})"


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a tensor among the arguments."""

    tensor: int
    """Number of the tensor in the shapes."""
    axis: int
    name: str
    """Name of the tensor, for messages."""

    def __str__(self) -> str:
        return f"axis {self.axis} of {self.name}"


@dataclass(frozen=True, slots=True)
class SizeRelations:
    """What a graph takes for granted of sizes because its operators broadcast, or do not."""

    equal: tuple[tuple[Axis, ...], ...] = ()
    """Axes of equal sizes."""
    fixed: tuple[tuple[Axis, int], ...] = ()
    """Axes whose sizes are what they were."""
    least: tuple[tuple[Axis, int], ...] = ()
    """Axes, and how large they are at least."""

    def hold(self, shapes: Shapes) -> bool:
        """Return whether it is so for the shapes of a call."""
        return (
            all(shapes[one.tensor][one.axis] == size for one, size in self.fixed)
            and all(shapes[one.tensor][one.axis] >= size for one, size in self.least)
            and all(
                shapes[one.tensor][one.axis] == shapes[first.tensor][first.axis]
                for first, *more in self.equal
                for one in more
            )
        )

    def reasons(self, shapes: Shapes) -> list[str]:
        """Describe what is not so."""
        sizes = [(one, size, shapes[one.tensor][one.axis]) for one, size in self.fixed]
        found = [f"{one}: {size} -> {now}" for one, size, now in sizes if size != now]
        sizes = [(one, size, shapes[one.tensor][one.axis]) for one, size in self.least]
        found += [f"{one} is {now}, less than {size}" for one, size, now in sizes if now < size]
        for axes in self.equal:
            now = {shapes[one.tensor][one.axis]: one for one in reversed(axes)}
            if len(now) > 1:
                found.append(f"sizes are no longer equal: {', '.join(f'{one} is {size}' for size, one in now.items())}")
        return found


class SizeGuard:
    """What Python code took from sizes while one graph was traced.

    Args:
        shapes: shape of each tensor among the arguments in the trace.
        program: computes what was read.
        reads: the reads, in their order.
        relations: what the graph's operators take for granted.
    """

    def __init__(
        self,
        shapes: Shapes,
        program: SizeProgram,
        reads: Sequence[GuardedRead],
        relations: SizeRelations = SizeRelations(),
    ):
        self.relations = relations
        self.shapes = shapes
        self.program = program
        self.reads = tuple(reads)
        self._failed: dict[Shapes, tuple[GuardedRead, Any] | None] = {shapes: None}

    def holds(self, shapes: Shapes) -> bool:
        """Return whether code takes from these shapes what it took in the trace, and operators broadcast alike."""
        if not self.relations.hold(shapes):
            return False
        if not self.reads:
            return True
        try:
            return self._failed[shapes] is None
        except KeyError:
            return self.first_failed(shapes) is None

    def first_failed(self, shapes: Shapes) -> tuple[GuardedRead, Any] | None:
        """Return the first read that gives something else for `shapes`, and what it gives; None if all give the same.

        What the code does after that one is another trace's matter.
        """
        if shapes not in self._failed:
            if len(self._failed) >= _MOST_REMEMBERED:
                self._failed.clear()
            self._failed[shapes] = self._find(shapes)
        return self._failed[shapes]

    def _find(self, shapes: Shapes) -> tuple[GuardedRead, Any] | None:
        evaluation = Evaluation(self.program, shapes)
        for read in self.reads:
            try:
                now = result_of(read.kind, evaluation.result(read.step))
            except Exception as error:  # a tensor cannot have this shape in the traced code: it takes another way
                return read, error.with_traceback(None)
            if now != read.seen:
                return read, now
        return None

    def reasons(self, shapes: Shapes) -> list[str]:
        """Describe why a graph that was traced with the guard's shapes does not serve these.

        The sizes of other tensors, or of tensors with other numbers of axes, are compared with nothing.
        """
        failed = self.first_failed(shapes) if self.reads else None
        if failed is None:
            other_axes = list(map(len, shapes)) != list(map(len, self.shapes))
            return [] if other_axes else self.relations.reasons(shapes)
        read, now = failed
        if isinstance(now, Exception):
            return [f"other sizes: the forward {read.what()}"]
        return [f"the forward {read.what()}: {read.seen} -> {now}"]


NO_SIZES_READ = SizeGuard((), SizeProgram(), ())
"""For a graph whose trace took nothing from sizes."""


class SizeChanges:
    """Counts how often each read has made one mode of a model export again.

    Args:
        most: number of exports for one read, from which on the submodule that reads stays in PyTorch.
    """

    def __init__(self, most: int):
        self._most = most
        self._counts: Counter[str] = Counter()

    def note(self, guards: Iterable[SizeGuard], shapes: Shapes) -> GuardedRead | None:
        """Count what keeps the graphs from serving a call; return the read that has done so too often, if there is one.

        Args:
            guards: those of the graphs that differ from the call in nothing but sizes; the last used one first.
            shapes: of the call.
        """
        failed = next((found for guard in guards if (found := guard.first_failed(shapes)) is not None), None)
        if failed is None:
            return None
        read, _ = failed
        self._counts[read.line] += 1
        return read if self._counts[read.line] > self._most else None
