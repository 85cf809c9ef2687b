"""Puts a plan's gathers and reduces into ORT's graph as PythonOp nodes: a pure edit, verified before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ort_zero.errors import GraphEditError
from ort_zero.ortmodule.compat.ort_kernels import RECOMPUTED
from ort_zero.ortmodule.onnx_edit.node_edits import copied, rename_inputs, replace_field
from ort_zero.ortmodule.onnx_edit.python_op import Value, python_op
from ort_zero.ortmodule.onnx_edit.topology import (
    input_names,
    node_key,
    nodes_reached_from,
    producers,
    topological_order,
    value_types,
)
from ort_zero.ortmodule.runtime.zero3.collective_plan import CollectivePlan, Gather, Reduce
from ort_zero.ortmodule.runtime.zero3.graph_analysis import GraphAnalysis, analyse
from ort_zero.ortmodule.runtime.zero3.node_names import (
    GATHER_FUNCTION,
    REDUCE_FUNCTION,
    TRIGGER,
    gathered_name,
    node_name,
    token_name,
)
from ort_zero.ortmodule.runtime.zero3.verify import verify

_TOKEN_TYPE = (TensorProto.FLOAT, 1)
_EFFECT_OPERATORS = frozenset(("YieldOp", "PythonOp"))
"""Operators that run whether or not somebody reads their results: YieldOp, and a user's Python code."""


def insert_collectives(
    model: onnx.ModelProto, plan: CollectivePlan, *, executor: int, training: bool
) -> tuple[onnx.ModelProto, str | None]:
    """Return a copy of `model` in which the plan's events stand for the weights, and the gradient of the trigger.

    Args:
        model: the graph that the plan was made for; left unchanged.
        plan: see :func:`ort_zero.ortmodule.runtime.zero3.collective_plan.plan_collectives`.
        executor: number of the :class:`~.runtime.zero3.gather_reduce.CollectiveExecutor` that the nodes call.
        training: whether the graph has a backward part; the second result is None if not.

    Raises:
        GraphEditError: the result breaks one of the rules of :func:`~ort_zero.ortmodule.runtime.zero3.verify.verify`.
    """
    if any(i.name == TRIGGER for i in model.graph.input):
        raise GraphEditError("the graph has been rewritten already")
    result = copied(model)
    graph = result.graph
    analysis = analyse(graph, plan.weights if plan.gathers_weights else ())
    uses = _WeightUses(graph, plan, analysis)
    collectives = _CollectiveNodes(graph, plan, executor)
    reduced = {gradient for _, event in plan.reduces() for gradient in event.gradients}
    removed = set(plan.weights) if plan.gathers_weights else set()
    outputs = [o for o in graph.output if o.name not in reduced | {f"{weight}_grad" for weight in removed}]
    needed = {o.name for o in outputs} | {name for node in collectives.nodes for name in node.input}
    nodes = [*uses.nodes, *uses.clones]
    effects = [node for node in nodes if node.op_type in _EFFECT_OPERATORS]
    nodes = nodes_reached_from(nodes, needed, effects) + collectives.nodes

    last = token_name(len(plan.events) - 1) if plan.events else TRIGGER
    # session creation fails for a value that lost its type with its place among the outputs
    infos = [v for v in graph.value_info if v.name not in removed]
    infos += [o for o in graph.output if o.name in reduced]
    infos += [v for v in (*uses.infos, *collectives.infos) if v.name != last]
    if training:
        outputs.append(helper.make_tensor_value_info(last, TensorProto.FLOAT, [1]))
    inputs = [i for i in graph.input if i.name not in removed]
    inputs.append(helper.make_tensor_value_info(TRIGGER, TensorProto.FLOAT, [1]))
    for field, content in (("input", inputs), ("output", outputs), ("value_info", infos)):
        replace_field(graph, field, content)
    graph.initializer.extend(uses.initializers)
    replace_field(graph, "node", topological_order(graph, nodes))
    verify(result, plan)
    return result, last if training else None


class _WeightUses:
    """The nodes of a graph after each use of a weight was renamed to the gather that serves it.

    A node that computes something from weights only, such as a transpose, would hold a whole weight from the forward
    to the backward: it is cloned for each gather whose readers want its result.

    Args:
        graph: with weights among its inputs.
        plan: plan of the graph.
        analysis: analysis of the graph; without weights if the plan gathers none.

    Raises:
        GraphEditError: no gather of the plan serves a use of a weight.
    """

    def __init__(self, graph: onnx.GraphProto, plan: CollectivePlan, analysis: GraphAnalysis):
        self._weights = plan.weights
        self._analysis = analysis
        self._types = value_types(graph)
        self._made_by = producers(analysis.order)
        self._cloned: dict[tuple, str] = {}
        self.clones: list[onnx.NodeProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        """Types of the values that the clones produce."""
        self.initializers: list[onnx.TensorProto] = []
        """Shapes of weights, which nodes of the graph have read from the weights."""
        self.nodes = self._renamed(_gathered_for(plan)) if plan.gathers_weights else list(analysis.order)

    def _renamed(self, gathered: Mapping[str, Mapping[str, str]]) -> list[onnx.NodeProto]:
        """Return the nodes that stay; `gathered` has by a node's key the gathered weights that serve it."""
        sources = self._analysis.source_weights
        nodes = []
        for node in self._analysis.order:
            if self._analysis.is_weight_only(node):
                continue
            if node.op_type in ("Shape", "Size") and node.input[0] in sources:
                self.initializers.append(self._folded_shape(node))
                continue
            names = {name for name in input_names(node) if name in sources}
            if names:
                serving = gathered.get(node_key(node), {})
                node = copied(node)
                rename_inputs(node, {name: self._resolved(name, serving, node) for name in names})
            nodes.append(node)
        return nodes

    def _folded_shape(self, node: onnx.NodeProto) -> onnx.TensorProto:
        """Return as a constant what a Shape or Size node says of a weight, or of what is computed from weights only."""
        weight = self._weights.get(node.input[0])
        if weight is None:
            info = self._types.get(node.input[0])
            if info is None or not all(d.HasField("dim_value") for d in info.shape.dim):
                raise GraphEditError(f"the shape of {node.input[0]!r}, made of weights only, is not known")
            shape = [d.dim_value for d in info.shape.dim]
        else:
            shape = list(weight.shape)
        if node.op_type == "Size":
            value = np.array(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)
        else:
            at = {attribute.name: attribute.i for attribute in node.attribute}
            value = np.array(shape[at.get("start", 0) : at.get("end", len(shape))], dtype=np.int64)
        return numpy_helper.from_array(value, node.output[0])

    def _resolved(self, name: str, serving: Mapping[str, str], reader: onnx.NodeProto) -> str:
        """Return the value that stands for `name` where the weights `serving` were gathered, cloning its producers."""
        if name in self._weights:
            if name not in serving:
                raise GraphEditError(f"no gather serves {name!r} at node {reader.name!r}")
            return serving[name]
        sources = self._analysis.source_weights
        if name not in sources:
            return name
        gathered = tuple(sorted((weight, serving[weight]) for weight in sources[name]))
        if (name, gathered) not in self._cloned:
            self._clone(self._made_by[name], gathered, serving, reader)
        return self._cloned[name, gathered]

    def _clone(self, node: onnx.NodeProto, gathered: tuple, serving: Mapping[str, str], reader: onnx.NodeProto) -> None:
        """Add a clone of a weight-only node, and those that it depends on, which computes from gathered weights."""
        clone = copied(node)
        suffix = f"__copy_{len(self._cloned)}"
        sources = self._analysis.source_weights
        rename_inputs(clone, {n: self._resolved(n, serving, reader) for n in input_names(clone) if n in sources})
        for i, name in enumerate(node.output):
            if not name:
                continue
            self._cloned[name, gathered] = clone.output[i] = name + suffix
            if name in self._types:
                info = onnx.ValueInfoProto(name=name + suffix)
                info.type.tensor_type.CopyFrom(self._types[name])
                self.infos.append(info)
        # the nodes of one chain may share the suffix, and ORT refuses equal names
        clone.name = f"{clone.name or node_key(clone)}{suffix}"
        self.clones.append(clone)


def _gathered_for(plan: CollectivePlan) -> dict[str, dict[str, str]]:
    """Return by key of a node, then by weight, the name of the gathered weight that the node is to read."""
    names: dict[str, dict[str, str]] = {}
    for index, gather in plan.gathers():
        for weight, readers in zip(gather.weights, gather.readers, strict=True):
            for key in readers:
                names.setdefault(key, {})[weight] = gathered_name(weight, index)
    return names


class _CollectiveNodes:
    """The PythonOp nodes of a plan's events, chained by tokens.

    Args:
        graph: gives the types of the values that the events wait for.
        plan: plan of the graph.
        executor: number of the executor that the nodes call.
    """

    def __init__(self, graph: onnx.GraphProto, plan: CollectivePlan, executor: int):
        self._plan = plan
        self._executor = executor
        self._types = value_types(graph)
        self.nodes: list[onnx.NodeProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        """Types of the values that the nodes produce."""
        self._existence: dict[str, str] = {}
        for index, event in enumerate(plan.events):
            if isinstance(event, Gather):
                self._add_gather(index, event)
            else:
                self._add_reduce(index, event)

    def _add_gather(self, index: int, event: Gather) -> None:
        read = [(name, *self._type_of(name)) for name in dict.fromkeys((event.anchor, *event.after)) if name]
        made = [
            (gathered_name(name, index), self._plan.weights[name].elem_type, list(self._plan.weights[name].shape))
            for name in event.weights
        ]
        self._add(index, GATHER_FUNCTION, node_name("gather", index), read, made)

    def _add_reduce(self, index: int, event: Reduce) -> None:
        read = []
        for name, gradient in zip(event.weights, event.gradients, strict=True):
            weight = self._plan.weights[name]
            read.append((gradient, weight.elem_type, len(weight.shape)))
        read += [self._awaited(name) for name in event.after]
        self._add(index, REDUCE_FUNCTION, node_name("reduce", index), read, [])

    def _add(self, index: int, function: str, name: str, read: Sequence[Value], made: Sequence[tuple]) -> None:
        token = token_name(index - 1) if index else TRIGGER
        made = [(token_name(index), TensorProto.FLOAT, [1]), *made]
        ranked = [(value, elem_type, len(shape)) for value, elem_type, shape in made]
        self.nodes.append(python_op(function, name, (self._executor, index), [(token, *_TOKEN_TYPE), *read], ranked))
        self.infos += [helper.make_tensor_value_info(*m) for m in made]

    def _awaited(self, name: str) -> Value:
        """Return what a reduce reads so that it runs after `name` exists."""
        if not name.endswith(RECOMPUTED):
            return (name, *self._type_of(name))
        # what is there for a moment only is not held for a reduce: its shape will do
        if name not in self._existence:
            self._existence[name] = existence = f"{name}__exists"
            self.nodes.append(helper.make_node("Shape", [name], [existence], existence))
        return (self._existence[name], TensorProto.INT64, 1)

    def _type_of(self, name: str) -> tuple[int, int]:
        """Return the element type and rank of a value, those of a token if the graph does not state them."""
        info = self._types.get(name)
        if info is None or not info.elem_type:
            return _TOKEN_TYPE
        return info.elem_type, len(info.shape.dim)
