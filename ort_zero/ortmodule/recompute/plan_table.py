"""A decision as text: the table of what can be computed again, with what that needs; and runs beside each other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ort_zero.utils import tables
from ort_zero.utils.sizes import size_in

_HEAD = ("cluster", "kind", "frequency", "saving", "symbolic saving", "requested", "actual", "applied")
_LEFT = frozenset(("cluster", "kind", "symbolic saving", "applied", "run"))
_WRAPPED = {"cluster": 16, "symbolic saving": 14, "kind": 10}
"""Columns that may become narrower, and how narrow."""
_KINDS = {1: "recompute", 2: "with compromise"}


def text(decision: Mapping[str, Any], width: int | None = None) -> str:
    """Return a decision as lines: what it needs, the table, the plan in the form of the section.

    Args:
        decision: see :meth:`ort_zero.ortmodule.recompute.decision.Decision.as_dict`.
        width: characters of a line; long names are wrapped to fit. None wraps nothing.
    """
    lines = [*_needs(decision), ""]
    rows = decision["table"]
    if rows:
        lines += aligned(_HEAD, [_cells(row) for row in rows], width)
        lines += [f"note: of {row['cluster']} {row['note']}" for row in rows if row["note"]]
    else:
        lines.append("ONNX Runtime finds nothing that could be computed again.")
    lines += ["", *plan_lines(decision["plan"], width)]
    if decision.get("fused_loss"):
        lines.append(f"head and loss in one node: {decision['fused_loss']}")
        lines.append('the plan as a list needs "ortmodule": {"fuse_loss": "on"}')
    return "\n".join(lines)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return a table as lines with a rule below its head.

    Args:
        head: names of the columns; those of text are aligned left.
        rows: cells.
        width: characters of a line, as far as the columns that may be wrapped can be made narrower.
    """
    widths = tables.column_widths([head, *rows])
    if width is not None:
        least = [_WRAPPED.get(name, w) for name, w in zip(head, widths, strict=True)]
        widths = tables.narrowed(widths, width - len(tables.GAP) * (len(widths) - 1), least)
    right = {i for i, name in enumerate(head) if name not in _LEFT}
    first, *others = (
        tables.row_lines([_wrap(cell, w) for cell, w in zip(row, widths, strict=True)], widths, right)
        for row in (head, *rows)
    )
    return [*first, tables.GAP.join("-" * w for w in widths), *(line for lines in others for line in lines)]


def plan_lines(plan: Sequence[str], width: int | None = None) -> list[str]:
    """Return a plan as it can be pasted into the section."""
    if not plan:
        return ["plan: nothing is computed again"]
    one = f'"memory": {{"recompute": {json.dumps(list(plan))}}}'
    if width is None or len(one) + len("plan: ") <= width:
        return [f"plan: {one}"]
    items = [f"  {json.dumps(item)}{',' if n < len(plan) - 1 else ''}" for n, item in enumerate(plan)]
    return ['plan: "memory": {"recompute": [', *items, "]}"]


def mib(size: int | None) -> str:
    """Return bytes as MiB, a dash where they are not known."""
    return "-" if size is None else size_in(size, "MiB")


def percent(share: float) -> str:
    """Return a share of 1 with its sign: ``"+3 %"``, ``"0 %"``."""
    rounded = round(100 * share)
    return f"{rounded:+d} %" if rounded else "0 %"


def against(share: float) -> str:
    """Return how a measured peak stands to the predicted one, in words."""
    if abs(share) < 0.005:
        return "as predicted"
    return f"{abs(share):.0%} {'above' if share > 0 else 'below'} the predicted one"


def _needs(decision: Mapping[str, Any]) -> list[str]:
    predicted, measured, budget = (decision[f"{key}_bytes"] for key in ("predicted", "measured", "budget"))
    first = decision.get("predicted_first_bytes", predicted)
    at = f", the most at {decision['predicted_at']}" if decision["predicted_at"] else ""
    facts = [("without recomputation", decision["unconstrained_bytes"], " predicted")]
    facts.append(("with this plan", predicted, f" predicted{at}"))
    if mib(first) != mib(predicted):
        facts.append(("in its first step", first, " predicted"))
    if measured is not None:
        off = f", {against(measured / first - 1)}" if first else ""
        facts.append(("", measured, f" measured{off}"))
    if budget is not None:
        above = (predicted if measured is None else measured) > budget
        facts.append(("budget", budget, ", which is exceeded" if above else ""))
    if decision["least_bytes"] is not None:
        facts.append(("least possible", decision["least_bytes"], " predicted"))
    rows = tables.aligned([(name, mib(size)) for name, size, _ in facts], right={1})
    return [f"{row}{more}" for row, (_, _, more) in zip(rows, facts, strict=True)]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    applied = "yes" if row["actual"] >= row["frequency"] > 0 else "part" if row["actual"] else "no"
    return (
        row["cluster"],
        _KINDS.get(row["kind"], str(row["kind"])),
        str(row["frequency"]),
        mib(row["saving"]),
        row["symbolic"],
        "all" if row["requested"] < 0 else str(row["requested"]),
        str(row["actual"]),
        applied,
    )


def _wrap(cell: str, width: int) -> list[str]:
    """Return the lines of a cell, broken behind an operator or a space where possible."""
    if len(cell) <= width:
        return [cell]
    lines = [""]
    for piece in re.findall(r"[^+*\s]*(?:[+*\s]|$)", cell):
        if len((lines[-1] + piece).rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines if line.strip()]
