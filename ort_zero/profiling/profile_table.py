"""Print a comparison of two profiles as text."""

from __future__ import annotations

from collections.abc import Sequence

from ort_zero.profiling.comparison import Comparison, Row
from ort_zero.profiling.exchange import Part
from ort_zero.utils import tables

_OPERATORS = 3
"""Maximum number of operators that are named in a row."""


def text(comparison: Comparison) -> str:
    """Return the time of a step, the times of its parts, and the largest differences, as lines."""
    return "\n".join([headline(comparison), "", *_steps(comparison), "", *_differences(comparison), *notes(comparison)])


def headline(comparison: Comparison) -> str:
    """Return script, model, steps and ranks of a comparison in one line."""
    of, ranks = comparison, comparison.ort.ranks
    mean = f", mean of {ranks} ranks" if ranks > 1 else ""
    return f"{of.script}: {of.model}, {of.steps} step{'s' * (of.steps != 1)} in ONNX Runtime and in PyTorch{mean}"


def milliseconds(seconds: float | None, signed: bool = False) -> str:
    """Return a time as text for a table, ``"12.34 ms"``; a dash for None."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:{'+' if signed else ''}.2f} ms"


def names_of(parts: Sequence[Part]) -> str:
    """Return the names of a row's longest operators."""
    return ", ".join(part.name for part in parts[:_OPERATORS])


def notes(comparison: Comparison) -> list[str]:
    """Return warnings about the times of a comparison, line by line."""
    lines = []
    if comparison.ort.graphs_built:
        lines.append(f"{comparison.ort.graphs_built} graphs were built during these steps: give a larger --warmup")
    slower = [side.profiled_seconds / side.timed_seconds for side in (comparison.ort, comparison.torch)
              if side.timed_seconds]  # fmt: skip
    if slower and max(slower) > 1.3:
        lines.append("the profilers make steps slower by a third or more: parts with many short calls appear too long")
    return [f"note: {line}" for line in lines]


def _steps(comparison: Comparison) -> list[str]:
    head = ("", "ONNX Runtime", "PyTorch", "difference")
    ours, theirs = comparison.ort, comparison.torch
    difference = None
    if ours.timed_seconds is not None and theirs.timed_seconds is not None:
        difference = ours.timed_seconds - theirs.timed_seconds
    rows = [
        ("a step", *(milliseconds(side.timed_seconds) for side in (ours, theirs)), milliseconds(difference, True)),
        ("under the profilers", milliseconds(ours.profiled_seconds), milliseconds(theirs.profiled_seconds), ""),
        *(("  " + row.name, *_times(row)) for row in comparison.kinds if row.ort or row.torch),
    ]
    return tables.aligned([head, *rows], right={1, 2, 3})


def _differences(comparison: Comparison) -> list[str]:
    head = ("largest differences", "ONNX Runtime", "PyTorch", "difference", "of ONNX Runtime", "of PyTorch")
    rows = [
        (row.name, *_times(row), names_of(row.ort_operators), names_of(row.torch_operators))
        for row in comparison.differences
    ]
    return tables.aligned([head, *rows], right={1, 2, 3})


def _times(row: Row) -> tuple[str, str, str]:
    return milliseconds(row.ort), milliseconds(row.torch), milliseconds(row.difference, True)
