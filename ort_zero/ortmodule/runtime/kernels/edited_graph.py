"""A gradient graph whose nodes are being replaced, and the nodes that take their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from ort_zero.ortmodule.compat.ortmodule import GraphInfo
from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, swaps_two_dimensions
from ort_zero.ortmodule.onnx_edit.node_edits import aten_node
from ort_zero.ortmodule.runtime.kernels import operators

FLOAT = onnx.TensorProto.FLOAT


@dataclass(slots=True)
class EditedGraph:
    """A graph whose nodes are being replaced."""

    values: GraphValues
    info: GraphInfo
    replaced: Counter[str] = field(default_factory=Counter)
    losses: dict[str, Loss] = field(default_factory=dict)
    """Cross entropies that were replaced, by the name of the log-probabilities that they no longer compute."""
    norms: dict[str, list[str]] = field(default_factory=dict)
    """What the gradient of a batch norm reads besides that of its result, by the context that is no longer there."""
    left_out: set[int] = field(default_factory=set)
    """``id()`` of the nodes that are not needed any more."""
    renamed: dict[str, str] = field(default_factory=dict)
    """What takes the place of the results of nodes that were left out."""

    unread: Counter[str] = field(default_factory=Counter)
    """How many readers of a value have been replaced by nodes that do not read it."""

    def without_transpose(self, name: str) -> tuple[str, bool]:
        """Return what a value is the transpose of, and True; the value itself, and False, if it is none of a matrix."""
        node = self.values.producers.get(name)
        return (node.input[0], True) if node is not None and swaps_two_dimensions(node) else (name, False)

    def reads_no_more(self, name: str) -> None:
        """Note that a reader of a transposed matrix now reads the matrix; the last one leaves the Transpose out."""
        self.unread[name] += 1
        if self.unread[name] == len(self.values.readers[name]) and name not in self.values.outputs:
            self.left_out.add(id(self.values.producers[name]))

    def all_float(self, names: Sequence[str]) -> bool:
        """Return whether all values are float32."""
        return all(self.values.element_type(name) == FLOAT for name in names)


@dataclass(frozen=True, slots=True)
class Loss:
    """The values that the gradient of a replaced cross entropy reads."""

    logits: str
    labels: str
    scale: str
    ignored: str


def own_node(operator: str, inputs: Sequence[str], node: onnx.NodeProto, outputs: Sequence[str] = ()) -> onnx.NodeProto:
    """Return a node that runs an operator of :mod:`.operators` in the place of `node`."""
    return aten_node(f"{operators.NAMESPACE}::{operator}", inputs, outputs or list(node.output), node.name)
