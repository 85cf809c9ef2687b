"""Reports on a module's runtime as plain values: the graphs, why they were built, and what has run.

``ort_zero.status()`` and the summary after the first step show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ort_zero.ortmodule.recompute.block_recomputation import BlockRecomputation
from ort_zero.ortmodule.recompute.optimizer import MemoryOptimizer
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.submodule_graphs import SubmoduleGraphs, merged_graphs
from ort_zero.ortmodule.runtime.transitions import CompletedTransition, GraphTransitionManager, counted

NOT_CALLED = "not called yet"
"""The ``backend`` of a model that nobody has called so far."""


def report(
    module: torch.nn.Module,
    *,
    stage: int,
    fallback_reason: str | None,
    excluded: ExcludedModules,
    modes: Mapping[bool, GraphTransitionManager],
    runs: Mapping[bool, Counter[str]],
    transitions: Iterable[CompletedTransition],
    memory: MemoryOptimizer | BlockRecomputation | None,
    called_in_torch: Mapping[str, int],
    submodule_graphs: SubmoduleGraphs | None = None,
) -> dict[str, Any]:
    """Return what runs and why, as plain values.

    Args:
        module: the user's module.
        stage: ZeRO stage.
        fallback_reason: why PyTorch runs the module; None while ONNX Runtime does.
        excluded: submodules that run in PyTorch.
        modes: whether for training, to the graphs.
        runs: whether for training, to completed runs by ``"forward"`` and ``"backward"``.
        transitions: transitions of all modes, the oldest first.
        memory: computes activations again; None if the configuration asks for no recomputation.
        called_in_torch: calls of the model's modules that PyTorch ran, by the method that made them.
        submodule_graphs: graphs of the submodules, where PyTorch runs the module's own code.
    """
    transitions = list(transitions)
    if submodule_graphs is not None:
        parts = {path: part.status() for path, part in submodule_graphs.parts.items()}
        return _report_divided(module, stage, submodule_graphs.why, excluded, parts, called_in_torch)
    policies = [mode.builder.fallback_policy for mode in modes.values()]
    return {
        "module": type(module).__name__,
        "zero_stage": stage,
        "backend": _backend(fallback_reason, runs.values(), called_in_torch),
        "fallbacks": int(fallback_reason is not None),
        "fallback_reason": fallback_reason,
        "in_torch": {
            **excluded.reasons,
            **{name: why for policy in policies for name, why in policy.reasons.items()},
        },
        "called_in_torch": dict(called_in_torch),
        "graphs": {
            mode.mode: _graphs_of(mode, runs[training], transitions) for training, mode in modes.items() if mode.calls
        },
        "transitions": [done.as_dict() for done in transitions],
        "memory": [decision.as_dict() for decision in memory.decisions] if memory is not None else [],
    }


def _report_divided(
    module: torch.nn.Module,
    stage: int,
    why: str,
    excluded: ExcludedModules,
    parts: Mapping[str, Mapping[str, Any]],
    called_in_torch: Mapping[str, int],
) -> dict[str, Any]:
    """Return the report on a module whose own code runs in PyTorch; what its submodules do is added up."""
    in_torch = {f"{type(module).__name__}.forward": why, **excluded.reasons}
    for path, part in parts.items():
        own = f"{part['module']}.forward"
        for name, reason in part["in_torch"].items():
            in_torch[name if "::" in name else path if name == own else f"{path}.{name}"] = reason
    return {
        "module": type(module).__name__,
        "zero_stage": stage,
        "backend": "onnxruntime" if any(part["backend"] == "onnxruntime" for part in parts.values()) else "torch",
        "fallbacks": 0,
        "fallback_reason": None,
        "in_torch": in_torch,
        "called_in_torch": dict(called_in_torch),
        "graphs": merged_graphs(parts),
        "transitions": [done for part in parts.values() for done in part["transitions"]],
        "memory": [decision for part in parts.values() for decision in part["memory"]],
        "submodules": dict(parts),
    }


def _backend(fallback_reason: str | None, runs: Iterable[Counter[str]], called_in_torch: Mapping[str, int]) -> str:
    """Return what has run the model: ``"onnxruntime"``, ``"torch"``, or ``"not called yet"``."""
    if fallback_reason is not None:
        return "torch"
    if any(count.total() for count in runs):
        return "onnxruntime"
    return "torch" if called_in_torch else NOT_CALLED


def memory_summary(memory: MemoryOptimizer | BlockRecomputation | None) -> list[tuple[str, str]]:
    """Return what the newest training graph computes again, and what that brings, line by line."""
    return memory.summary_lines() if memory is not None else []


def _graphs_of(
    mode: GraphTransitionManager, runs: Counter[str], transitions: Iterable[CompletedTransition]
) -> dict[str, Any]:
    """Return what the graphs of one mode are and have done; sizes are those of the graph of the last call."""
    counts = Counter(mode.retired)
    for graph in mode.graphs:
        counts.update(counted(graph))
    current, name = mode.current, type(mode.builder.module).__name__
    built = [done for done in transitions if done.mode == mode.mode and done.transition.action.builds]
    return {
        "exports": mode.exports,
        "kept": len(mode.graphs),
        "nodes": current.nodes if current else 0,
        "python_ops": current.python_ops if current else 0,
        "attributes_written": sorted({write.place.named(name) for write in current.effects.writes}) if current else [],
        "attributes_not_written": list(mode.builder.not_written),
        "attribute_inputs": sorted(
            place.named(current.known.export.read.model) for place in current.known.export.read.inputs
        )
        if current
        else [],
        "inputs": len(current.info.onnx_graph_input_names) if current else 0,
        "seconds": round(built[-1].seconds, 3) if built else 0.0,
        "kernels": dict(sorted(current.kernels.items())) if current else {},
        "collectives": current.collectives if current else None,
        "gather_memory": current.executor.memory.status()
        if current and current.executor is not None and current.executor.memory is not None
        else None,
        "runs": dict(runs),
        **{name: counts[name] for name in ("gathers", "gathered_elements", "reduces")},
    }
