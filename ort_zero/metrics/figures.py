"""Compute the figures of one rank at one moment from the status of its model: flat names, plain numbers."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """The name, unit and help text of one figure.

    Attributes:
        name: name in files, and after ``ort_zero/`` in monitors.
        unit: unit of the figure, empty for a count.
        help: meaning of the figure, in one sentence.
        only_grows: True if the figure counts from the start of the process on.
    """

    name: str
    unit: str
    help: str
    only_grows: bool = False


FIGURES = (
    Figure("step_seconds", "seconds", "Mean wall time of an optimizer step since the previous figures."),
    Figure("graphs", "", "Graphs that are kept."),
    Figure("fallbacks", "", "Units and models that PyTorch runs because they could not be compiled."),
    Figure("parts_in_torch", "", "Operators that PyTorch runs inside of graphs."),
    Figure("forward_runs", "", "Forwards that ONNX Runtime has run.", only_grows=True),
    Figure("backward_runs", "", "Backwards that ONNX Runtime has run.", only_grows=True),
    Figure("saves", "", "Checkpoints that this rank has begun to save.", only_grows=True),
    Figure("save_seconds", "seconds", "Time for which training has waited for saves.", only_grows=True),
    Figure("resident_bytes", "bytes", "Resident memory of the process."),
    Figure("peak_resident_bytes", "bytes", "Maximum resident memory of the process so far.", only_grows=True),
)


@dataclass
class Saves:
    """The number and total time of one engine's saves so far."""

    count: int = 0
    seconds: float = 0.0


def figures_of(status: Mapping[str, Any] | None, saves: Saves, step_seconds: float) -> dict[str, float]:
    """Return the value of each figure by its name.

    Args:
        status: status of the model's runtime; None for a model in PyTorch, which has no graphs.
        saves: saves of the model's engine.
        step_seconds: mean wall time of the last steps, in seconds.
    """
    return _ordered(_graphs(status or {}) | _common(saves, step_seconds))


def _graphs(status: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a model's graphs; DeepSpeed makes the gathers and reduces."""
    graphs, runs = status.get("compiled", {}).get("graphs", 0), status.get("graph_runs", {})
    return {
        "graphs": graphs,
        "fallbacks": status.get("fallbacks", 0),
        "parts_in_torch": len(status.get("in_torch", ())),
        "forward_runs": runs.get("forward", 0),
        "backward_runs": runs.get("backward", 0),
    }


def _common(saves: Saves, step_seconds: float) -> dict[str, float]:
    return {"step_seconds": step_seconds, "saves": saves.count, "save_seconds": saves.seconds, **_memory()}


def _ordered(values: Mapping[str, float]) -> dict[str, float]:
    return {figure.name: values[figure.name] for figure in FIGURES if figure.name in values}


def _memory() -> dict[str, int]:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return {"resident_bytes": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
                    "peak_resident_bytes": peak}  # fmt: skip
    except OSError:  # no Linux
        return {"peak_resident_bytes": peak}
