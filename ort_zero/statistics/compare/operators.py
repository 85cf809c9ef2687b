"""Compare the operators of one module in one step of two runs, which ``OperatorRecorder`` has recorded."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from ort_zero.statistics.compare.align import layout_of, pair
from ort_zero.statistics.compare.comparison import Comparison
from ort_zero.statistics.compare.step import StepComparison
from ort_zero.statistics.compare.tolerance import CANCELLATION, EPSILON, FLOOR, HALF_FLOOR, JUMP, LEAF, epsilons
from ort_zero.statistics.files import open_run
from ort_zero.statistics.records import Table, decode_facts
from ort_zero.utils.text import shortened

_PRODUCTS = ("aten.mm(", "aten.addmm(", "aten.bmm(", "aten.baddbmm(")
_JUMPING = ("aten.threshold_backward(", "aten.max_pool")
"""Operators whose results jump where an input changes sign or order."""
_ADDITION = "aten.add("
"""Autograd itself adds up the gradients of a tensor that is used twice; a graph has an operator for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorComparison:
    """The operators of one module in one step of two runs."""

    step: int
    rank: int
    compared: int
    """Number of operators that both runs call."""
    first: str = ""
    """The first operator with a value that differs by more than rounding and its inputs explain, and the value; empty
    for none: ``"aten.mul(8x32), forward of h.0, output[0]"``. An input that differs so comes from elsewhere."""
    line: str = ""
    """The user's line in the first run: ``"model.py:41 in forward"``."""
    error: float = 0.0
    """l2 norm of the difference of the value, relative to the larger norm."""
    tolerance: float = 0.0
    inherited: float = 0.0
    """Largest error of the operator's inputs; for an input, of all values before."""
    only: tuple[list[str], list[str]]
    """Operators that only the first run calls, and only the second, with their lines."""

    @property
    def text(self) -> str:
        """The result in a few words."""
        if not self.compared:
            return "no operator that both runs call: a runtime that shows none has the module in one of them"
        return (
            f"first operator that differs: {self.first}, at {self.line}" if self.first else "no operator adds an error"
        )

    def lines(self) -> list[str]:
        """Return the result with its figures as lines of text."""
        lines = [f"operators of step {self.step}, rank {self.rank}: {self.text} ({self.compared} compared)"]
        if self.first:
            by = f"tolerance {self.tolerance:.1e}, inherited {self.inherited:.1e}"
            lines.append(f"  it differs by {self.error:.1e} ({by})")
        return lines + [f"  only {run} calls {shortened(calls)}" for run, calls in zip("ab", self.only) if calls]


def with_operators(comparison: Comparison, operators: OperatorComparison) -> Comparison:
    """Return a comparison whose verdict also says what the operators show."""
    verdict = dataclasses.replace(comparison.verdict, text=f"{comparison.verdict.text}; {operators.text}")
    return dataclasses.replace(comparison, verdict=verdict)


def compare_operators(a: str, b: str, rank: int) -> OperatorComparison:
    """Compare the recorded operators of one rank in the folders of two runs, of which the first counts as correct."""
    one, two = (next(open_run(folder).tables(rank)) for folder in (a, b))
    step = StepComparison(rank, pair(layout_of(one), layout_of(two)), one, two)
    step.measure()
    error, inherited, tolerance = _judged(step)
    rows = step.pairs.a.rows.tolist()
    found: dict[str, Any] = {}
    for at in np.flatnonzero(error > tolerance)[:1].tolist():
        row = rows[at]
        first, line = f"{one.module[row]}, {one.kind[row]}{one.slot[row]}", _lines_of(one)[one.call[row]]
        figures = {"error": error[at], "tolerance": tolerance[at], "inherited": inherited[at]}
        found = {"first": first, "line": line, **{name: float(value) for name, value in figures.items()}}
    return OperatorComparison(
        step=one.step, rank=rank, compared=len({one.call[row] for row in rows}),
        only=(_alone(one, step.pairs.a.lone), _alone(two, step.pairs.b.lone)), **found,
    )  # fmt: skip


def _lines_of(table: Table) -> list[str]:
    """Return the user's line of each call, with the path of its file from the current folder where it lies below it."""
    return [line.removeprefix(f"{os.getcwd()}{os.sep}") for line in decode_facts(table.facts).lines]


def _alone(table: Table, rows: np.ndarray) -> list[str]:
    """Return the calls of rows without a partner, with their lines."""
    lines, calls = _lines_of(table), {int(table.call[row]): table.module[row] for row in rows.tolist()}
    sums = {call for call, name in calls.items() if name.startswith(_ADDITION) and ", backward" in name}
    return [f"{name}, at {lines[call]}" for call, name in calls.items() if call not in sums]


def _judged(step: StepComparison) -> list[np.ndarray]:
    """Return error, inherited error and tolerance of each pair; the pairs of a call follow each other."""
    a, b, of_a, of_b, error = step.a, step.b, step.pairs.a.rows, step.pairs.b.rows, step.error
    epsilon = np.maximum(epsilons(a.dtype)[of_a], epsilons(b.dtype)[of_b])
    size = a.l2[of_a] / np.sqrt(np.maximum(a.elements[of_a], 1))
    inherited, tolerance = np.zeros(len(of_a)), np.zeros(len(of_a))
    taken: list[int] = []
    worst = 0.0
    for at, row in enumerate(of_a.tolist()):
        if taken and a.call[of_a[taken[0]]] != a.call[row]:
            taken = []
        if a.kind[row] == "input":
            taken.append(at)
            inherited[at], condition = worst, 1.0
        else:
            inherited[at] = error[taken].max(initial=0.0)
            terms = _terms(a, [of_a[t] for t in taken if epsilon[t]], row)
            condition = max(terms / CANCELLATION / size[at], 1.0) if size[at] > 0 else 1.0
        worst = max(worst, error[at])
        coarsest = max(epsilon[at], epsilon[taken].max(initial=0.0))
        floor = coarsest * (HALF_FLOOR if coarsest > EPSILON["float32"] else FLOOR)
        jumps = epsilon[at] == 0 or a.module[row].startswith(_JUMPING)
        tolerance[at] = (floor + LEAF * inherited[at]) * condition + jumps * np.sqrt(JUMP * inherited[at])
    return [error, inherited, tolerance]


def _terms(table: Table, inputs: list[int], result: int) -> float:
    """Return the root mean square that an operator's result has if its terms do not cancel."""
    sizes = [table.l2[row] / math.sqrt(max(table.elements[row], 1)) for row in inputs]
    if table.module[result].startswith(_PRODUCTS) and len(inputs) > 1:
        return sizes[-1] * sizes[-2] * math.sqrt(table.shape[inputs[-2]][-1])
    if table.module[result].startswith("aten.sum(") and inputs:
        return sizes[0] * math.sqrt(max(table.elements[inputs[0]] / max(table.elements[result], 1), 1))
    return max(sizes, default=0.0)
