"""Write what a command asks of a script's first step, and end the script: what runs where and why, or memory plans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.compat import torch_compile
from ort_zero.compile.records import ModelRecord
from ort_zero.utils.atomic_write import write_json

_WAYS_OUT = (
    ("no conversion", "nothing to do: PyTorch's own kernel runs between the parts in ONNX Runtime"),
    ("depends on values", "sizes that follow from values (nonzero, masks) stay in PyTorch"),
    ("ONNX Runtime has no", "use a dtype that the provider has kernels for, such as float32"),
    ("excluded", 'take the pattern of the module out of "exclude"'),
)


def explanation(record: ModelRecord, status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what runs where in a model, by unit, as plain values; `status` is the model's."""
    units: dict[str, Any] = {}
    for graph in record.graphs:
        unit = units.setdefault(graph.unit, {"graphs": [], "in_torch": {}, "recompilations": []})
        unit["graphs"].append(
            {
                "direction": graph.direction,
                "segments": [
                    {
                        "nodes": segment.nodes,
                        "flops": segment.flops,
                        "runner": "onnxruntime" if segment.in_ort else "torch",
                        "reason": segment.trial.reason,
                    }
                    for segment in graph.segments
                ],
                "torch_calls": graph.in_torch.total(),
            }
        )
        for name, why in graph.reasons.items():
            entry = unit["in_torch"].setdefault(name, {"count": 0, "why": why, "way_out": way_out(why)})
            entry["count"] += graph.in_torch[name]
        if graph.recompile_reason and graph.recompile_reason not in unit["recompilations"]:
            unit["recompilations"].append(graph.recompile_reason)
    return {
        "model": status["module"],
        "modules": Counter(status["unit_classes"]),
        "units": units,
        "failures": status["failures"],
        "graph_breaks": [{"reason": reason, "where": where} for reason, where in torch_compile.graph_breaks()],
        "flop_share": status["compiled"]["flop_share"],
    }


def way_out(reason: str) -> str:
    """Return what it would take to run an operator in ONNX Runtime."""
    return next((way for part, way in _WAYS_OUT if part in reason), "")


def end_if_asked(record: ModelRecord, status: Callable[[], dict[str, Any]]) -> None:
    """Write a report and end the script, if ``ort-zero explain`` or ``ort-zero memory plan`` has started it.

    Raises:
        SystemExit: after the report is written.
    """
    reports = (
        (env.explain_file(), lambda asked: explanation(record, status())),
        (env.memory_trial_file(), lambda asked: [record.memory.plan(budget) for budget in asked["budgets"]]),
    )
    for request, make in reports:
        if request is not None:
            asked = json.loads(request.read_text(encoding="utf-8"))
            write_json(Path(f"{asked['report']}.{env.rank()}"), make(asked))
            raise SystemExit(0)
