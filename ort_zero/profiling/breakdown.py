"""Divide the time of a step among its kernels, gathers, reduces, the optimizer, Python and the script.

torch.profiler records a tree of ranges and ATen operators of the calling thread, where a run of a session is one range.
ONNX Runtime's profiler records the nodes in the run. Each moment counts once, for the innermost range or operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ort_zero.profiling.exchange import Part
from ort_zero.utils import named_ranges

KERNEL, GATHER, REDUCE, OPTIMIZER, PYTHON, EXECUTOR, SCRIPT = (
    "kernels", "gather", "reduce", "optimizer", "Python", "executor", "script",
)  # fmt: skip
"""The kinds of parts: operators; collectives, including the waiting for other ranks; the optimizer's step; Python in
forward and backward; ONNX Runtime between two nodes; the rest of the script."""

IN_TORCH = frozenset({"ATen", "PythonOp", "PythonOpGrad"})
"""Operators of ONNX Runtime that run operators of PyTorch, which torch.profiler records."""
_OF_RANGE = {
    named_ranges.STEP: SCRIPT, named_ranges.FORWARD: PYTHON, named_ranges.BACKWARD: PYTHON,
    named_ranges.OPTIMIZER: OPTIMIZER, named_ranges.SESSION: EXECUTOR, named_ranges.GATHER: GATHER,
    named_ranges.REDUCE: REDUCE,
}  # fmt: skip
_WHOLE = frozenset({OPTIMIZER, GATHER, REDUCE})
"""Kinds that are one part each, whatever operators run inside."""
_IN_PYTHON = ("autograd::", "torch::autograd::", "ort_zero_kernels::", "ort_zero_loss::")
_COLLECTIVES = (("reduce", REDUCE), ("gather", GATHER), ("broadcast", GATHER))


def seconds_of(event: Any) -> float:
    """Return the time of an event of torch.profiler, with the events below it."""
    return event.time_range.elapsed_us() / 1e6


def divide(steps: Sequence[Any], nodes: Iterable[tuple[str, float]]) -> list[Part]:
    """Return the mean time of each part of a step, the longest part first.

    Args:
        steps: the events of torch.profiler that are steps.
        nodes: operator and seconds of each node that ran in sessions during these steps.
    """
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    stack = [(step, SCRIPT) for step in steps]
    while stack:
        event, outside = stack.pop()
        kind, name = _place(event.name, outside)
        seconds[kind, name] += seconds_of(event) - sum(map(seconds_of, event.cpu_children))
        calls[kind, name] += 1
        inside = kind if kind != KERNEL else outside
        stack += [(child, inside) for child in event.cpu_children]
    for operator, time in nodes:
        if operator not in IN_TORCH:
            seconds[EXECUTOR, ""] -= time
            seconds[KERNEL, operator] += time
            calls[KERNEL, operator] += 1
    parts = [Part(kind, name, time / len(steps), calls[kind, name] / len(steps))
             for (kind, name), time in seconds.items()]  # fmt: skip
    return sorted(parts, key=lambda part: -part.seconds)


def _place(name: str, outside: str) -> tuple[str, str]:
    """Return the kind of a range or operator of torch.profiler, and the name of the operator, empty for a range."""
    if name.startswith(named_ranges.PREFIX):
        kind = _OF_RANGE.get(name.removeprefix(named_ranges.PREFIX).partition(" ")[0])
        if kind is not None:
            # a graph that runs inside of a gather or reduce belongs to the gather or reduce
            return (outside, "") if outside in _WHOLE and kind in (PYTHON, EXECUTOR) else (kind, "")
    if name.startswith(("c10d::", "gloo:", "nccl:")):
        for word, kind in _COLLECTIVES:
            if word in name:
                return kind, ""
    if outside in _WHOLE:
        return outside, ""
    if name.startswith("Optimizer."):
        return OPTIMIZER, ""
    if name.startswith("enumerate(DataLoader)"):
        return SCRIPT, ""
    if "::" not in name or name.startswith(_IN_PYTHON):
        # an autograd Function, an operator of ort_zero or a range of the script: their children are parts themselves
        return PYTHON, ""
    return KERNEL, name
