"""Write what a command asks of a script's first step, and end the script: what runs where and why, or memory plans."""

from __future__ import annotations

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
    }


def way_out(reason: str) -> str:
    """Return what it would take to run an operator in ONNX Runtime."""
    return next((way for part, way in _WAYS_OUT if part in reason), "")


def end_if_asked(
    record: UnitsRecord[Any],
    status: Callable[[], dict[str, Any]],
    plans: Callable[[Sequence[str]], Any] | None = None,
) -> None:
    """Write a report and end the script, if ``ort-zero explain`` or ``ort-zero memory plan`` has started it.

    Args:
        record: the graphs of the model.
        status: returns the model's entry in ``ort_zero.status()["models"]``.
        plans: returns what budgets would have units compute again; None where an engine has no such plans.

    Raises:
        SystemExit: after the report is written.
    """
    request, make = env.explain_file(), lambda asked: explanation(record, status())
    if request is None and plans is not None:
        request, make = env.memory_trial_file(), lambda asked: plans(asked["budgets"])
    if request is not None:
        asked = json.loads(request.read_text(encoding="utf-8"))
        write_json(Path(f"{asked['report']}.{env.rank()}"), make(asked))
        raise SystemExit(0)
