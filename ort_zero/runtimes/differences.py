"""Compare results of a compiled graph with PyTorch's: float64 is the judge where rounding may explain a difference."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from ort_zero.compat.torch_graphs import is_random

Outputs = Sequence[torch.Tensor]
Judges = Callable[[], tuple[Outputs, Iterable[Outputs]]]
"""Returns a segment's results in float64, and the results of PyTorch's runs with inputs changed by a few roundings.
These runs may be made as their results are read."""
_PART = 1 << 20
"""Number of elements of a large result that are compared at a time."""
_FACTOR = 8
"""Error of ONNX Runtime that is accepted, as a multiple of PyTorch's own error against float64."""
_SCALE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-12}
"""Difference that rounding explains, relative to the largest element, before float64 is asked."""

MOVES = range(0x3504F333, 0x3504F333 + 16 * 0x1234567, 2 * 0x1234567)
"""Odd numbers that spread the bits of a float: factors of :func:`moved`."""
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def moved(value: Any, factor: int) -> Any:
    """Return a tensor whose elements are moved by a few roundings, up or down; anything else unchanged.

    Runs with moved inputs show how far rounding alone takes the results, as sums in another order do: one run can be
    near float64 by chance. Equal numbers move alike, since a graph may look for the elements that equal the largest.
    Tensors of 16 bits stay: PyTorch's rounding to 16 bits is larger.
    """
    bits = _BITS.get(value.dtype) if isinstance(value, torch.Tensor) else None
    if bits is None:
        return value
    value = value.contiguous()
    return value + value * ((value.view(bits) * factor >> 7) % 3 - 1) * torch.finfo(value.dtype).eps * 4


def in_float64(module: GraphModule) -> GraphModule:
    """Return a graph with float64 in place of the floating-point dtypes that its calls name.

    Run on inputs of float64, the graph is the judge between two computations in less. Random numbers are drawn in their
    own dtype, since others would be drawn in float64; they and constants are widened then.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    drawn: set[Node] = set()
    for node in module.graph.nodes:
        is_drawn = is_random(node.target) or (node.target is operator.getitem and node.args[0] in drawn)
        if is_drawn or node.op == "get_attr":
            copies[node] = graph.node_copy(node, lambda each: _cast(graph, copies[each], each, _dtype_of(each)))
            copies[node] = _cast(graph, copies[node], node, torch.float64)
            drawn.update([node] if is_drawn else [])
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        for holder in ("args", "kwargs"):
            setattr(copies[node], holder, map_aggregate(getattr(copies[node], holder), _wider))
        if node.op == "call_method" and node.target == "float":
            copies[node].target = "double"
    return GraphModule(module, graph)


def _dtype_of(node: Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _cast(graph: Graph, copied: Node, node: Node, dtype: torch.dtype | None) -> Node:
    """Return a copied node, in a dtype where the value is a tensor of floats."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return copied
    return graph.call_function(torch.ops.prims.convert_element_type.default, (copied, dtype))


def _wider(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument.is_floating_point else argument


def explain_difference(results: Outputs, wanted: Outputs, judges: Judges) -> str | None:
    """Return how the results of ONNX Runtime differ from PyTorch's, in words; None if rounding explains all.

    Where they are further apart than rounding usually puts them, float64 is the judge: ONNX Runtime may be further
    from it than PyTorch by a small factor. PyTorch's distance is the largest of a few runs with slightly moved inputs.
    An integer or a bool that differs counts where it is the same in all these runs.
    """
    judged = _Judged(judges, wanted)
    for index, (ours, theirs) in enumerate(zip(results, wanted, strict=True)):
        if not isinstance(theirs, torch.Tensor):  # a size, or no gradient
            continue
        if ours.shape != theirs.shape:
            return f"result {index} has the sizes {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        if not theirs.dtype.is_floating_point:
            differ = ours != theirs
            runs = iter(judged)
            while differ.any():  # which side of a comparison a number is on can hang on its last bit
                run = next(runs, None)
                if run is None:
                    return f"result {index}: {int(differ.sum())} of {theirs.numel()} elements differ"
                differ &= run[index] == theirs
            continue
        if _is_near(ours, theirs):
            continue
        if not _same_special(ours, theirs):
            return f"result {index} has NaN or infinity at other places than in PyTorch"
        error, scale = _distance(ours, theirs), _size_of(theirs)
        if error <= _SCALE[theirs.dtype] * scale:
            continue
        runs, torchs = iter(judged), 0.0
        exact = next(runs)[index]
        ort = _distance(ours, exact)
        while ort > _FACTOR * (torchs + torch.finfo(theirs.dtype).eps * scale):
            run = next(runs, None)
            if run is None:
                parts = ort / max(scale, 1e-300), torchs / max(scale, 1e-300)
                return f"result {index} is wrong by {parts[0]:.1e} of its size (PyTorch: {parts[1]:.1e})"
            torchs = max(torchs, _distance(run[index], exact))
    return None


class _Judged:
    """Runs that tell rounding from an error: in float64, in PyTorch, and in PyTorch with slightly moved inputs.

    Each run is made once, when it is read. All results together would not fit into memory for a layer of a large model,
    whose gradients take a gigabyte a run.
    """

    def __init__(self, judges: Judges, wanted: Outputs):
        self._judges, self._wanted = judges, wanted
        self._runs: list[Outputs] = []
        self._more: Iterator[Outputs] = iter(())

    def __iter__(self) -> Iterator[Outputs]:
        if not self._runs:
            exact, more = self._judges()
            self._runs, self._more = [exact, self._wanted], iter(more)
        yield from self._runs
        for run in self._more:
            self._runs.append(run)
            yield run


def _is_near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return True if two float32 or float64 results without NaN and infinity differ by rounding at most.

    This takes no memory of the results' size, and a fourth of the time of the comparison in float64: a layer of a large
    model has gradients of a gigabyte.
    """
    if theirs.dtype not in (torch.float32, torch.float64) or theirs.dim() == 0 or theirs.numel() == 0:
        return False
    rows = max(1, _PART * len(theirs) // theirs.numel())
    norm = functools.partial(torch.linalg.vector_norm, ord=float("inf"))  # NaN if an element is
    parts = zip(ours.split(rows), theirs.split(rows), strict=True)
    error, scale = torch.stack([torch.stack((norm(a - b), norm(b))) for a, b in parts]).amax(0).tolist()
    return math.isfinite(error) and math.isfinite(scale) and error <= _SCALE[theirs.dtype] * scale


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((_finite(a) - _finite(b)).abs().max()) if a.numel() else 0.0


def _size_of(tensor: torch.Tensor) -> float:
    return float(_finite(tensor).abs().max()) if tensor.numel() else 0.0


def _same_special(a: torch.Tensor, b: torch.Tensor) -> bool:
    if bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all()):
        return True
    plain: Any = torch.isfinite(a)
    return bool(torch.equal(plain, torch.isfinite(b))) and bool(torch.equal(torch.isnan(a), torch.isnan(b)))
