"""Divides the time of a step among its kernels, gathers, reduces, the optimizer, Python and the script.

Two records are put together. torch.profiler gives a tree of ranges and ATen operators of the calling thread; the
ranges are those of :mod:`ort_zero.utils.named_ranges`. ONNX Runtime's profiler gives the time of each node of a
session's run, which torch sees as one range. Each moment counts once, for the innermost range or operator that it lies
in; nodes that ATen or Python runs are divided as torch recorded them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ort_zero.profiling.exchange import Part
from ort_zero.utils import named_ranges

KERNEL, GATHER, REDUCE, OPTIMIZER, PYTHON, EXECUTOR, SCRIPT = (
    "kernels", "gather", "reduce", "optimizer", "Python", "executor", "script",
)  # fmt: skip
KINDS = (KERNEL, GATHER, REDUCE, OPTIMIZER, PYTHON, EXECUTOR, SCRIPT)
"""The kinds of parts: operators; collectives, with the waiting for other ranks; the optimizer's step; Python in
forward and backward; ONNX Runtime between two nodes; what the script does besides."""

IN_TORCH = frozenset({"ATen", "PythonOp", "PythonOpGrad"})
"""Operators of ONNX Runtime whose nodes torch records as well."""
_OF_RANGE = {
    named_ranges.STEP: SCRIPT, named_ranges.FORWARD: PYTHON, named_ranges.BACKWARD: PYTHON,
    named_ranges.OPTIMIZER: OPTIMIZER, named_ranges.SESSION: EXECUTOR, named_ranges.GATHER: GATHER,
    named_ranges.REDUCE: REDUCE, named_ranges.IN_PYTORCH: PYTHON,
}  # fmt: skip
_WHOLE = frozenset({OPTIMIZER, GATHER, REDUCE})
"""Kinds whose operators are not told apart."""
_IN_PYTHON = ("autograd::", "torch::autograd::", "ort_zero_kernels::", "ort_zero_loss::")
_COLLECTIVES = (("reduce", REDUCE), ("gather", GATHER), ("broadcast", GATHER))


@dataclass(slots=True)
class Span:
    """One range or operator that torch.profiler has recorded in one thread."""

    name: str
    seconds: float
    children: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One run of one node, as ONNX Runtime's profiler has recorded it."""

    op_type: str
    seconds: float


def divide(steps: Sequence[Span], nodes: Iterable[NodeRun]) -> list[Part]:
    """Return what the parts of a step take on average, the longest first.

    Args:
        steps: the ranges of the steps.
        nodes: nodes that ran in sessions during those steps.
    """
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    in_sessions = 0.0
    """Seconds of what torch has recorded inside of sessions."""
    stack = [(step, SCRIPT) for step in steps]
    while stack:
        span, outside = stack.pop()
        kind, name = _place(span.name, outside)
        seconds[kind, name] += span.seconds - sum(child.seconds for child in span.children)
        calls[kind, name] += 1
        if span.name == named_ranges.PREFIX + named_ranges.SESSION:
            in_sessions += sum(child.seconds for child in span.children)
        inside = kind if kind != KERNEL else outside
        stack += [(child, inside) for child in span.children]
    in_torch = 0.0
    for node in nodes:
        seconds[EXECUTOR, ""] -= node.seconds
        if node.op_type in IN_TORCH:
            in_torch += node.seconds
        else:
            seconds[KERNEL, node.op_type] += node.seconds
            calls[KERNEL, node.op_type] += 1
    if in_torch:
        # what torch has recorded in those nodes is counted there, and not as a part of the session's own time
        seconds[EXECUTOR, ""] += in_sessions
        seconds[PYTHON, ""] += in_torch - in_sessions
    parts = [Part(kind, name, time / len(steps), calls[kind, name] / len(steps))
             for (kind, name), time in seconds.items()]  # fmt: skip
    return sorted(parts, key=lambda part: -part.seconds)


def _place(name: str, outside: str) -> tuple[str, str]:
    """Return the kind of what torch has recorded under a name, and the operator that it is, if it is one."""
    if name.startswith(named_ranges.PREFIX):
        kind = _OF_RANGE.get(name.removeprefix(named_ranges.PREFIX))
        if kind is not None:
            # a graph's run, or PyTorch's part of one, inside of a gather is still a gather's
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
        # an autograd Function, an operator of ours, a range of the program's: what it calls stands below it
        return PYTHON, ""
    return KERNEL, name


def by_kind(parts: Iterable[Part]) -> Mapping[str, float]:
    """Return the seconds of each kind."""
    found = dict.fromkeys(KINDS, 0.0)
    for part in parts:
        found[part.kind] += part.seconds
    return found
