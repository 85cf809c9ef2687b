"""Runs ORT's symbolic shape inference (1.19.2, ``onnxruntime/tools/symbolic_shape_infer.py``) over a whole model.

Upstream stops at the first operator whose rule fails. Here the results of such an operator get unknown sizes instead,
see :mod:`ort_zero.ortmodule.compat.shape_inference_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TakenSizes:
    """What a graph takes for granted of the sizes of its inputs, by the symbols that stand for them."""

    equal: tuple[tuple[str, ...], ...] = ()
    """Symbols of sizes that are equal."""
    fixed: tuple[tuple[str, int], ...] = ()
    """Symbols of sizes that are what they were."""
    least: tuple[tuple[str, int], ...] = ()
    """Symbols of sizes, and how large they are at least."""


def infer_shapes(model: Any, infer_python_op: Callable, sizes: Mapping[str, int]) -> tuple[Any, TakenSizes]:
    """Return `model` with the types and shapes of its values, as far as they can be known; changes `model`.

    ORT builds gradients for operands of equal sizes, or with a size that is 1 in every call. So a size that is 1 in the
    call that was traced, and is broadcast, is 1 in the result. Where sizes are computed, and may be 1 or not, operands
    are broadcast by nodes of their own, see :mod:`ort_zero.ortmodule.compat.differing_sizes`.

    Args:
        model: ONNX ModelProto.
        infer_python_op: ``(node, input shapes, input types) -> output shapes or None``, with None for unknown sizes;
            called for the nodes of PyTorch functions.
        sizes: of the inputs in the call that was traced, by their symbols.

    Returns:
        The model, and what it takes for granted now.
    """
    from ort_zero.ortmodule.compat.differing_sizes import DifferingSizes
    from ort_zero.ortmodule.compat.shape_inference_rules import LastingShapeInference

    def run(kind: type[LastingShapeInference]) -> Any:
        inference = kind(2**31 - 1, True, True, 0)
        inference.infer_python_op = infer_python_op
        inference.traced_sizes = sizes
        inference.infer_all(model)
        return inference

    differing = run(DifferingSizes)
    inference = run(LastingShapeInference) if differing.let_differ(model) else differing
    ones: dict[str, int] = {}
    while True:
        equal = _groups([*differing.assumed_equal, *inference.taken_for_equal])
        groups = [{symbol: _value(symbol, sizes) for symbol in group} for group in equal]
        broadcast = {symbol for group in groups if max(group.values()) > 1 for symbol, n in group.items() if n == 1}
        broadcast &= sizes.keys() - ones.keys()
        if not broadcast:
            break
        ones |= dict.fromkeys(broadcast, 1)
        for given in model.graph.input:
            for dim in given.type.tensor_type.shape.dim:
                if dim.dim_param in broadcast:
                    dim.dim_value = 1
        inference = run(LastingShapeInference)
    return inference.out_mp_, TakenSizes(
        tuple(sorted(alike for group in groups for alike in _alike(group, sizes))),
        tuple(sorted((ones | dict(_numbers(groups, sizes))).items())),
        tuple(sorted((differing.least | inference.least).items())),
    )


def _value(symbol: str, sizes: Mapping[str, int]) -> int:
    """Return the size in the traced call, -1 if it is not that of an input."""
    return int(symbol) if symbol.isdigit() else sizes.get(symbol, -1)


def _groups(pairs: Iterable[Iterable[Any]]) -> list[set[str]]:
    """Return the sets of symbols and numbers that were taken for equal, directly or by way of others."""
    groups: list[set[str]] = []
    for pair in pairs:
        joined = {str(one) for one in pair}
        apart = [group for group in groups if group.isdisjoint(joined)]
        groups = [*apart, joined.union(*(group for group in groups if not group.isdisjoint(joined)))]
    return groups


def _alike(group: Mapping[str, int], sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield the symbols of inputs in a group whose sizes were equal."""
    numbers = {int(symbol) for symbol in group if symbol.isdigit()}
    for size in sorted(set(group.values()) - numbers):
        alike = sorted(symbol for symbol, n in group.items() if n == size and symbol in sizes)
        if len(alike) > 1:
            yield tuple(alike)


def _numbers(groups: Iterable[Mapping[str, int]], sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the symbols of inputs that were taken for a number, with it."""
    for group in groups:
        numbers = {int(symbol) for symbol in group if symbol.isdigit()}
        yield from ((symbol, n) for symbol, n in group.items() if symbol in sizes and n in numbers)
