"""What a module's runtime tells about itself: the graphs, why they were built, and what has run.

``ort_zero.status()`` and the summary that is printed after the first step show it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ort_zero.runtime.transitions import GraphTransitionManager, counted

if TYPE_CHECKING:
    from ort_zero.runtime.runtime import Runtime


def status_of(runtime: Runtime) -> dict[str, Any]:
    """Return what runs and why, as plain values."""
    policies = [mode.builder.routes for mode in runtime.modes.values()]
    return {
        "module": type(runtime.module).__name__,
        "zero_stage": runtime.stage,
        "backend": "torch" if runtime.fallback_reason else "onnxruntime",
        "fallbacks": int(runtime.fallback_reason is not None),
        "fallback_reason": runtime.fallback_reason,
        "in_torch": {
            **runtime.excluded.reasons,
            **{name: why for policy in policies for name, why in policy.taken.items()},
        },
        "graphs": {
            mode.mode: _graphs_of(runtime, mode, runtime.runs[training])
            for training, mode in runtime.modes.items()
            if mode.calls
        },
        "transitions": [done.as_dict() for done in runtime.history.done],
        "memory": [decision.as_dict() for decision in runtime.memory.decisions] if runtime.memory is not None else [],
    }


def memory_summary(runtime: Runtime) -> list[tuple[str, str]]:
    """Return what the newest training graph computes again, and what that brings, line by line."""
    if runtime.memory is None or not runtime.memory.decisions:
        return []
    return runtime.memory.decisions[-1].in_words()


def _graphs_of(runtime: Runtime, mode: GraphTransitionManager, runs: Counter[str]) -> dict[str, Any]:
    """Return what the graphs of one mode are and have done; sizes are those of the graph of the last call."""
    counts = Counter(mode.retired)
    for graph in mode.graphs:
        counts.update(counted(graph))
    current = mode.current
    built = [done for done in runtime.history.done if done.mode == mode.mode and done.transition.action.builds]
    return {
        "exports": mode.exports,
        "kept": len(mode.graphs),
        "nodes": current.nodes if current else 0,
        "python_ops": current.python_ops if current else 0,
        "inputs": len(current.info.onnx_graph_input_names) if current else 0,
        "seconds": round(built[-1].seconds, 3) if built else 0.0,
        "bridge": current.bridge if current else None,
        "runs": dict(runs),
        **{name: counts[name] for name in ("gathers", "gathered_elements", "reduces")},
    }
