"""Tells what a value in a trace depends on: constants and shapes alone, data, or random operators.

:mod:`ort_zero.ortmodule.compat.tracing` asks for each value that Python code reads while a module is traced.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from ort_zero.ortmodule.compat.torch_onnx.traced import TracedNode

_SHAPE_OF = re.compile(r"^aten::(size|sym_size|dim|numel|sym_numel|len|__len__)$|^prim::(shape|dtype|device|layout)$")
_HOLD_TENSORS = frozenset({"TensorType", "ListType", "OptionalType", "TupleType"})
_VALUES_UNREAD = re.compile(r"_like$|::new_(zeros|ones|empty|full)$")
_DATA_SHAPED = frozenset(
    f"aten::{name}"
    for name in "nonzero nonzero_numpy argwhere _unique _unique2 unique_dim unique_consecutive masked_select"
    " bincount _pack_padded_sequence".split()
)
"""Operators whose result has a size that depends on the values of their argument."""
_OPAQUE = frozenset({"prim::PythonOp", "ort_zero::function", "ort_zero::submodule"})
"""Nodes that run code of the user's: what they make of constants may be random all the same."""


class Origin(enum.Enum):
    """What a value, or a shape, is computed from."""

    FIXED = "constants and shapes"
    DATA = "arguments or weights"
    RANDOM_DATA = "arguments or weights, and random numbers"
    RANDOM = "random numbers, and at most single numbers among the arguments and weights"

    @property
    def is_random(self) -> bool:
        """True if a random operator takes part."""
        return self in (Origin.RANDOM_DATA, Origin.RANDOM)


class Origins:
    """Finds the origins of the values of one trace while it is made."""

    def __init__(self) -> None:
        self._fixed: set[tuple[int, str]] = set()
        self._without_random: set[tuple[int, str]] = set()

    def of(self, value: Any, mode: str) -> Origin:
        """Return what a traced value depends on.

        Args:
            value: ``torch._C.Value``.
            mode: ``"value"`` for its elements, ``"shape"`` for its sizes alone.
        """
        stack, seen = [(value, mode)], set()
        random = data = single = opaque = False
        while stack and not (random and data):
            value, mode = stack.pop()
            key = (value.unique(), mode)
            if key in seen or key in self._fixed or (data and key in self._without_random):
                continue
            seen.add(key)
            node = value.node()
            if node.kind() == "prim::Param":
                if mode == "value":
                    single, data = single or _is_single(value), data or not _is_single(value)
            elif mode == "value" and draws(node):
                random = True
                stack += _operands(node, mode)
            elif mode == "value" and node.kind() in _OPAQUE and not TracedNode(node).passes_on:
                opaque = True
                stack += _operands(node, mode)
            elif node.kind() != "prim::Constant":
                stack += _operands(node, mode)
        if not random:
            self._without_random |= seen
        if not (random or data or single):
            if opaque:  # as a sample of torch.distributions.Beta, which no other reason would bring to Python
                return Origin.RANDOM
            self._fixed |= seen
            return Origin.FIXED
        if random:
            return Origin.RANDOM_DATA if data else Origin.RANDOM
        return Origin.DATA


def draws(node: Any) -> bool:
    """Return True for a traced operator that draws random numbers, as it was called."""
    if not _is_seeded(node.kind()):
        return False
    traced = TracedNode(node)
    try:
        switches = [traced.argument(name) for name in ("p", "dropout_p", "dropout", "train", "training")]
    except (TypeError, RuntimeError):
        return True
    # dropout that is switched off
    return not any(switch is not None and switch.is_constant and switch.constant in (0, False) for switch in switches)


@functools.cache
def _is_seeded(kind: str) -> bool:
    """Return True if PyTorch marks an overload of the operator `kind` as one that depends on the seed."""
    space, _, name = kind.partition("::")
    packet = getattr(getattr(torch.ops, space), name, None) if space not in ("prim", "onnx") else None
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _is_single(value: Any) -> bool:
    """Return True for a tensor of one element, such as the probability that a random number is compared with."""
    sizes = value.type().sizes() if value.type().kind() == "TensorType" else None
    return sizes is not None and math.prod(sizes) == 1


def _operands(node: Any, mode: str) -> Iterator[tuple[Any, str]]:
    """Yield what the values (or the shapes) of a node's results are computed from, with the mode of each operand."""
    kind, inputs = node.kind(), list(node.inputs())
    if mode == "shape" and is_data_shaped(kind):
        mode = "value"
    elif mode == "shape" and (mask := bool_index(node)) is not None:
        yield mask, "value"
    elif mode == "value" and leaves_values_unread(kind):
        return
    elif reads_shape(kind):
        mode = "shape"
    overwritten = inputs[0] if _overwrites(kind) else None
    for given in inputs:
        # a Function with several results gives a tuple, which is taken apart by a node of its own
        yield given, "shape" if given is overwritten else mode if holds_tensors(given) else "value"


def reads_shape(kind: str) -> bool:
    """Return whether an operator `kind` looks at shapes and types only."""
    return _SHAPE_OF.search(kind) is not None


def is_data_shaped(kind: str) -> bool:
    """Return whether the size of an operator's result depends on the values of its argument."""
    return kind in _DATA_SHAPED


def leaves_values_unread(kind: str) -> bool:
    """Return whether an operator takes nothing but shape and type from its first argument, as ``zeros_like``."""
    return _VALUES_UNREAD.search(kind) is not None and not _is_seeded(kind)


def holds_tensors(value: Any) -> bool:
    """Return whether a traced value is a tensor, or may hold tensors."""
    return value.type().kind() in _HOLD_TENSORS and not _is_numbers(value)


def _overwrites(kind: str) -> bool:
    """Return True if a random operator reads no elements of its first argument, as ``rand_like`` and ``uniform_``."""
    return (
        _is_seeded(kind) and kind.endswith(("_like", "_")) and not ("dropout" in kind or "rrelu" in kind)
    )  # these change what is there


def _is_numbers(value: Any) -> bool:
    kind = value.type()
    return kind.kind() == "ListType" and kind.getElementType().kind() not in ("TensorType", "OptionalType")


def bool_index(node: Any) -> Any | None:
    """Return the mask or masks by which a node picks elements, so that their number depends on values; else None."""
    inputs = list(node.inputs())
    if node.kind() == "aten::where":
        return inputs[0] if len(inputs) == 1 else None
    if node.kind() != "aten::index":
        return None
    indices = inputs[1].node().inputs()
    masks = any(i.type().kind() == "TensorType" and i.type().scalarType() in ("Bool", "Byte") for i in indices)
    return inputs[1] if masks else None
