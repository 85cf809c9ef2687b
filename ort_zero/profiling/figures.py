"""Compute the figures of one rank at one moment, and format them for Prometheus."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """The name, type and help text of one figure."""

    name: str
    """Name after ``ort_zero_`` in the text for Prometheus, and after ``ort_zero/`` in monitors; the unit ends it."""
    kind: str
    """``"counter"`` for a figure that counts from the start of the process on, else ``"gauge"``."""
    help: str


FIGURES = (
    Figure("step_seconds", "gauge", "Mean wall time of an optimizer step since the previous figures."),
    Figure("graphs", "gauge", "Graphs that are kept."),
    Figure("fallbacks", "gauge", "Units and models that PyTorch runs because they could not be compiled."),
    Figure("parts_in_torch", "gauge", "Operators that PyTorch runs inside of graphs."),
    Figure("forward_runs", "counter", "Forwards that ONNX Runtime has run."),
    Figure("backward_runs", "counter", "Backwards that ONNX Runtime has run."),
    Figure("saves", "counter", "Checkpoints that this rank has begun to save."),
    Figure("save_seconds", "counter", "Time for which training has waited for saves."),
    Figure("resident_bytes", "gauge", "Resident memory of the process."),
    Figure("peak_resident_bytes", "counter", "Maximum resident memory of the process so far."),
)


def figures_of(status: Mapping[str, Any] | None, saves: int, save_seconds: float, step: float) -> dict[str, float]:
    """Return the value of each figure by its name.

    Args:
        status: status of the model's runtime; None for a model in PyTorch, which has no graphs.
        saves: number of saves of the model's engine.
        save_seconds: time of these saves.
        step: mean wall time of the last steps, in seconds.
    """
    status = status or {}
    runs = status.get("graph_runs", {})
    return {
        "step_seconds": step,
        "graphs": status.get("compiled", {}).get("graphs", 0),
        "fallbacks": status.get("fallbacks", 0),
        "parts_in_torch": len(status.get("in_torch", ())),
        "forward_runs": runs.get("forward", 0),
        "backward_runs": runs.get("backward", 0),
        "saves": saves,
        "save_seconds": save_seconds,
        **_memory(),
    }


def _memory() -> dict[str, int]:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return {"resident_bytes": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), **peak}
    except OSError:  # no Linux
        return peak


def prometheus_text(figures: Mapping[str, float], step: int, labels: Mapping[str, Any]) -> str:
    """Return a whole file for Prometheus' node exporter (text format 0.0.4).

    Args:
        figures: figures of one rank by name.
        step: number of optimizer steps so far.
        labels: labels of each figure.
    """
    values = {"step": step, **figures}
    label = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    lines = []
    for name, kind, text in (Figure("step", "gauge", "Optimizer steps so far."), *FIGURES):
        if name in values:
            full = f"ort_zero_{name}{'_total' if kind == 'counter' else ''}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full}{{{label}}} {values[name]!r}"]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
