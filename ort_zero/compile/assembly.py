"""Put the fragments of a segment together to one ONNX model, with names that do not depend on the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnx import GraphProto, ModelProto, TensorProto, helper
from torch.fx import Node

from ort_zero.compile.conversion.fragments import (
    MICROSOFT,
    ONNX_TYPES,
    SIXTEEN_BIT,
    Constant,
    Dim,
    Fragment,
    OnnxNode,
    Size,
    value_name,
)
from ort_zero.compile.conversion.registry import size_of
from ort_zero.compile.plan import Segment
from ort_zero.runtimes.memory_order import dense_order, inverse

_OPSET = 20
"""The ONNX operator set of all models; ONNX Runtime 1.19 and later have it."""
_IR_VERSION = 10


def model_of(graph: GraphProto) -> ModelProto:
    """Return the ONNX model of a graph, with the operator sets that all models here have."""
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)


@dataclass(frozen=True, slots=True)
class Binding:
    """A tensor at the edge of a segment."""

    name: str
    dtype: torch.dtype
    """The dtype in ONNX: float32 for 16-bit tensors that are computed in float32."""
    torch_dtype: torch.dtype
    shape: tuple[Size, ...]
    """The sizes in memory, outermost first: the tensor's sizes in the order of `order`."""
    order: tuple[int, ...] | None
    """The order of the tensor's dimensions in memory; None for the usual one."""


@dataclass(frozen=True, slots=True)
class SegmentModel:
    """The ONNX model of a segment, as plain data that equal segments have in common."""

    nodes: tuple[OnnxNode, ...]
    constants: tuple[tuple[str, Constant], ...]
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    sizes: tuple[str, ...]
    """Names of the inputs that hold a size that changes."""

    def proto(self) -> ModelProto:
        """Return the model for ONNX Runtime."""
        labels: dict[Any, str] = {}

        def info(name: str, dtype: torch.dtype, shape: Sequence[Size]) -> Any:
            dims = [size if isinstance(size, int) else labels.setdefault(size, f"size_{len(labels)}") for size in shape]
            return helper.make_tensor_value_info(name, ONNX_TYPES[dtype], dims)

        graph = helper.make_graph(
            [
                # without names of their own ONNX Runtime 1.19 gives several nodes the same one
                helper.make_node(
                    node.operator, node.inputs, node.outputs, f"n{index}", domain=node.domain, **dict(node.attributes)
                )
                for index, node in enumerate(self.nodes)
            ],
            "segment",
            [info(edge.name, edge.dtype, edge.shape) for edge in self.inputs]
            + [info(name, torch.int64, (1,)) for name in self.sizes],
            [info(edge.name, edge.dtype, edge.shape) for edge in self.outputs],
            [
                TensorProto(name=name, data_type=ONNX_TYPES[c.dtype], dims=c.shape, raw_data=c.data)
                for name, c in self.constants
            ],
        )
        return model_of(graph)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A segment's model, and what the model's inputs are in this graph."""

    model: SegmentModel
    inputs: tuple[int, ...]
    """Positions in ``Segment.inputs`` of the tensors that the model reads."""
    sizes: tuple[Dim, ...]
    """The values of the model's inputs that hold sizes."""


def assemble(segment: Segment, fragments: Mapping[Node, Fragment], widen: bool) -> Assembled:
    """Return the model of a segment."""
    return _Assembly(segment, fragments, widen).run()


class _Assembly:
    def __init__(self, segment: Segment, fragments: Mapping[Node, Fragment], widen: bool):
        self._segment = segment
        self._fragments = fragments
        self._widen = widen
        self._nodes: list[OnnxNode] = []
        self._constants: dict[Constant, str] = {}
        self._names: dict[str, str] = {}
        self._sizes: dict[str, Any] = {}
        self._renamed: dict[str, str] = {}
        self._count = 0

    def run(self) -> Assembled:
        tensors = [n for n in self._segment.inputs if isinstance(n.meta.get("val"), torch.Tensor)]
        inputs = {node: self._input(node, index) for index, node in enumerate(tensors)}
        for node in self._segment.nodes:
            self._add(node)
        outputs = tuple(self._output(node, index) for index, node in enumerate(self._segment.outputs))
        used = {name for node in self._nodes for name in node.inputs}
        kept = [node for node in tensors if inputs[node].name in used]
        model = SegmentModel(
            tuple(self._with_output_names(node) for node in self._nodes),
            tuple((name, constant) for constant, name in self._constants.items() if name in used),
            tuple(inputs[node] for node in kept),
            outputs,
            tuple(self._names[name] for name in self._sizes),
        )
        positions = tuple(self._segment.inputs.index(node) for node in kept)
        return Assembled(model, positions, tuple(Dim(expression) for expression in self._sizes.values()))

    def _with_output_names(self, node: OnnxNode) -> OnnxNode:
        def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(self._renamed.get(name, name) for name in names)

        return OnnxNode(node.operator, renamed(node.inputs), renamed(node.outputs), node.attributes, node.domain)

    def _new(self, prefix: str = "v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._widen and dtype in SIXTEEN_BIT else dtype

    def _edge(self, name: str, node: Node) -> Binding:
        fake = node.meta["val"]
        order = memory_order(fake)
        shape = tuple(size_of(size) for size in fake.shape)
        if order is not None:
            shape = tuple(shape[dim] for dim in order)
        return Binding(name, self._stored(fake.dtype), fake.dtype, shape, order)

    def _input(self, node: Node, index: int) -> Binding:
        edge = self._edge(f"in{index}", node)
        name = edge.name
        if edge.order is not None:
            name = self._append("Transpose", name, perm=inverse(edge.order))
        self._names[value_name(node)] = name
        return edge

    def _output(self, node: Node, index: int) -> Binding:
        edge = self._edge(f"out{index}", node)
        name = self._names[value_name(node)]
        if edge.order is not None:
            self._append("Transpose", name, output=edge.name, perm=edge.order)
        elif name in self._renamed or not any(name in made.outputs for made in self._nodes):
            self._append("Identity", name, output=edge.name)  # one tensor is two results, or an input is a result
        else:
            self._renamed[name] = edge.name
        return edge

    def _append(self, operator: str, name: str, output: str | None = None, **attributes: Any) -> str:
        output = output or self._new()
        self._nodes.append(OnnxNode(operator, (name,), (output,), tuple(attributes.items())))
        return output

    def _add(self, node: Node) -> None:
        fragment = self._fragments[node]
        for name, constant in fragment.constants.items():
            self._names[name] = self._constants.setdefault(constant, f"c{len(self._constants)}")
        for name, expression in fragment.sizes.items():
            if name not in self._sizes:
                self._sizes[name] = expression
                self._names[name] = f"size{len(self._sizes)}"
        for made in fragment.nodes:
            for output in made.outputs:
                self._names[output] = self._new()
            self._nodes.append(
                OnnxNode(
                    made.operator,
                    tuple(self._names[name] if name else "" for name in made.inputs),
                    tuple(self._names[name] for name in made.outputs),
                    made.attributes,
                    made.domain,
                )
            )
        for index, result in enumerate(fragment.results):
            self._names[value_name(node, index)] = self._names[result]


def memory_order(fake: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of the dimensions of a dense tensor in memory, outermost first; None for the usual order.

    Tensors with gaps, or whose sizes change, count as having the usual order: they are copied where that is wrong.
    """
    if not all(isinstance(number, int) for number in (*fake.shape, *fake.stride())) or fake.is_contiguous():
        return None
    return dense_order(fake)
