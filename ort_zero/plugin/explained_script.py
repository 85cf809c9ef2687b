"""Write what ``ort-zero explain`` or ``ort-zero memory plan`` asks of a script, and end the script."""

from __future__ import annotations

import atexit
from collections import Counter
from typing import Any

from ort_zero import env

_WAYS_OUT = (
    ("no conversion", "nothing to do: PyTorch's own kernel runs between the parts in ONNX Runtime"),
    ("depends on values", "sizes that follow from values (nonzero, masks) stay in PyTorch"),
    ("ONNX Runtime has no", "use a dtype that the provider has kernels for, such as float32"),
    ("excluded", 'take the pattern of the module out of "exclude"'),
)
_MOST_STEPS = 400
"""Steps after which a model is explained although it is not settled where everything runs."""
_newest: list[dict[str, Any]] = []
"""The newest report, for a script that ends before it is settled where all runs."""


def end_if_asked(running: Any, is_settled: bool) -> None:
    """Write the report of a command, if one has started the script, and end the script by SystemExit.

    Memory plans are written after the first step, ``ort-zero explain``'s report once all is settled or the script ends.
    """
    plan = env.request(env.MEMORY_TRIAL)
    if plan is not None:
        env.answer(env.MEMORY_TRIAL, running.engine.memory_plans(plan["budgets"]))
        raise SystemExit(0)
    if env.request(env.EXPLAIN) is None:
        return
    if not _newest:
        atexit.register(lambda: env.answer(env.EXPLAIN, _newest[0]))
    _newest[:] = [{**explanation(running), "steps": running.engine.steps, "settled": is_settled}]
    if is_settled or running.engine.steps >= _MOST_STEPS:
        env.answer(env.EXPLAIN, _newest[0])
        raise SystemExit(0)


def explanation(running: Any) -> dict[str, Any]:
    """Return what runs where in a model, by unit, as plain values."""
    from ort_zero.compat import torch_compile  # not with DeepSpeed: it imports torch's compiler

    status = running.status()
    units: dict[str, Any] = {}
    for graph in running.engine.graphs:
        unit = units.setdefault(graph.unit, {"graphs": [], "in_torch": {}, "recompilations": []})
        calls = graph.calls_in_torch()
        torch_calls = sum(count for _, count, _ in calls)
        told = {"direction": graph.direction, "segments": graph.segments_as_dicts(), "torch_calls": torch_calls}
        unit["graphs"].append(told)
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
        "runners": status["runners"],
    }


def way_out(reason: str) -> str:
    """Return what it would take to run an operator in ONNX Runtime."""
    return next((way for part, way in _WAYS_OUT if part in reason), "")
