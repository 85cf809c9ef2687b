"""A gradient graph whose nodes are being replaced, and the nodes that take their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx

from ort_zero.compat.ortmodule import GraphInfo
from ort_zero.onnx_edit.graph_values import GraphValues
from ort_zero.onnx_edit.node_edits import aten_node
from ort_zero.runtime.kernels import operators

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
