"""Finds the gradients whose memory belongs to no other value of the graph, so that a parameter may keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import onnx

from ort_zero.ortmodule.compat.ort_kernels import ATEN_NEW_MEMORY, NEW_MEMORY, PRODUCTS
from ort_zero.ortmodule.onnx_edit.topology import input_names, producers


def gradients_with_own_memory(
    order: Sequence[onnx.NodeProto], outputs: Collection[str], gradients: Collection[str]
) -> frozenset[str]:
    """Return those of `gradients` that nothing else reads, and whose memory is theirs alone.

    Args:
        order: nodes of the graph in a topological order.
        outputs: graph outputs that are not among `gradients`.
        gradients: names of values.
    """
    made_by = producers(order)
    times_read: Counter[str] = Counter(outputs)
    for node in order:
        times_read.update(input_names(node))
    equal = _numbers_of_equal_values(order)
    sharing = Counter(equal[name] for name in made_by)
    return frozenset(
        name
        for name in gradients
        if name in made_by
        and name not in times_read
        and sharing[equal[name]] == 1
        and _writes_new_memory(made_by[name], made_by, times_read)
    )


def _numbers_of_equal_values(order: Sequence[onnx.NodeProto]) -> dict[str, int]:
    """Return a number for each value, the same for values that are computed alike: ORT computes those only once."""
    numbers: dict[tuple, int] = {}
    number_of: dict[str, int] = {}
    for node in order:
        names = input_names(node)
        for name in names:
            number_of.setdefault(name, numbers.setdefault((name,), len(numbers)))
        attributes = tuple(sorted(a.SerializeToString() for a in node.attribute))
        expression = (node.op_type, node.domain, attributes, tuple(number_of[name] for name in names))
        for i, name in enumerate(node.output):
            if name:
                number_of[name] = numbers.setdefault((*expression, i), len(numbers))
    return number_of


def _writes_new_memory(
    node: onnx.NodeProto, made_by: Mapping[str, onnx.NodeProto], times_read: Mapping[str, int]
) -> bool:
    """Return whether ORT is sure to put the results of `node` into memory that is no other value's."""
    if node.op_type == "ATen":
        return any(a.name == "operator" and a.s.decode() in ATEN_NEW_MEMORY for a in node.attribute)
    if node.op_type == "Transpose":
        # ORT optimizes the graph once more: of two Transposes nothing may be left, of one and a product a product is
        product = made_by.get(node.input[0])
        return product is not None and product.op_type in PRODUCTS and times_read[node.input[0]] == 1
    return node.op_type in NEW_MEMORY
