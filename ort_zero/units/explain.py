"""Write what a command asks of a script, and end the script: what runs where and why, or memory plans."""

from __future__ import annotations

import atexit
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.compat import torch_compile
from ort_zero.units.records import UnitsRecord
from ort_zero.utils.atomic_write import write_json

_WAYS_OUT = (
    ("no conversion", "nothing to do: PyTorch's own kernel runs between the parts in ONNX Runtime"),
    ("depends on values", "sizes that follow from values (nonzero, masks) stay in PyTorch"),
    ("ONNX Runtime has no", "use a dtype that the provider has kernels for, such as float32"),
    ("excluded", 'take the pattern of the module out of "exclude"'),
)


_MOST_STEPS = 400
"""Steps after which a model is explained although it is not settled where everything runs."""
_unwritten: list[dict[str, Any]] = []
"""The newest report of a model that is not settled."""


def explanation(record: UnitsRecord[Any], status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what runs where in a model, by unit, as plain values; `status` is the model's."""
    units: dict[str, Any] = {}
    for graph in record.graphs:
        unit = units.setdefault(graph.unit, {"graphs": [], "in_torch": {}, "recompilations": []})
        calls = graph.calls_in_torch()
        unit["graphs"].append(
            {
                "direction": graph.direction,
                "segments": graph.segments_as_dicts(),
                "torch_calls": sum(count for _, count, _ in calls),
            }
        )
        for name, count, why in calls:
            entry = unit["in_torch"].setdefault(name, {"count": 0, "why": why, "way_out": way_out(why)})
            entry["count"] += count
        if graph.recompile_reason and graph.recompile_reason not in unit["recompilations"]:
            unit["recompilations"].append(graph.recompile_reason)
    return {
        "model": status["module"],
        "engine": status["engine"],
        "modules": Counter(status["unit_classes"]),
        "units": units,
        "failures": status["failures"],
        "graph_breaks": [{"reason": reason, "where": where} for reason, where in torch_compile.graph_breaks()],
        "flop_share": status["compiled"]["flop_share"],
        "units_in_torch": status["compiled"]["units_in_torch"],
    }


def way_out(reason: str) -> str:
    """Return what it would take to run an operator in ONNX Runtime."""
    return next((way for part, way in _WAYS_OUT if part in reason), "")


def end_if_asked(record: UnitsRecord[Any], status: Callable[[], dict[str, Any]], is_settled: bool) -> None:
    """Write the report of ``ort-zero explain``, if that has started the script, and end the script.

    While it is not settled where all runs, the script goes on; the report is then written when it ends by itself.

    Args:
        record: the graphs of the model.
        status: returns the model's entry in ``ort_zero.status()["models"]``.
        is_settled: whether it is decided where everything runs.

    Raises:
        SystemExit: after the report is written.
    """
    request = env.explain_file()
    if request is None:
        return
    if not _unwritten:
        atexit.register(_write, request)
    _unwritten[:] = [{**explanation(record, status()), "steps": record.steps, "settled": is_settled}]
    if is_settled or record.steps >= _MOST_STEPS:
        _write(request)
        raise SystemExit(0)


def plan_if_asked(plans: Callable[[Sequence[str]], Any]) -> None:
    """Write the plans of ``ort-zero memory plan``, if that has started the script, and end the script.

    Args:
        plans: returns what budgets would have units compute again.

    Raises:
        SystemExit: after the plans are written.
    """
    request = env.memory_trial_file()
    if request is not None:
        asked = json.loads(request.read_text(encoding="utf-8"))
        write_json(Path(f"{asked['report']}.{env.rank()}"), plans(asked["budgets"]))
        raise SystemExit(0)


def _write(request: Path) -> None:
    """Write the newest report, for a command that still waits for it."""
    if request.exists():
        path = json.loads(request.read_text(encoding="utf-8"))["report"]
        write_json(Path(f"{path}.{env.rank()}"), _unwritten[0])
