"""Puts a plan's gathers and reduces into ORT's graph as PythonOp nodes: a pure edit, checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ort_zero.compat.ort_kernels import RECOMPUTED
from ort_zero.errors import BridgeError
from ort_zero.onnx_edit.python_op import python_op
from ort_zero.runtime.zero3.collective_plan import (
    SOURCES,
    Analysis,
    Gather,
    Plan,
    Reduce,
    all_inputs,
    analyse,
    bodies,
    is_random,
    node_key,
    sorted_nodes,
)

TRIGGER = "ort_zero_trigger"
"""Graph input of one float that requires grad: it starts the token chain and makes autograd run the backward."""

GATHER = "ort_zero::gather"
REDUCE = "ort_zero::reduce"
_TOKEN = (TensorProto.FLOAT, 1)


def token_name(index: int) -> str:
    """Return the name of the token that event `index` makes."""
    return f"ort_zero_token_{index}"


def gathered_name(weight: str, index: int) -> str:
    """Return the name of the full weight that gather `index` makes."""
    return f"{weight}__gathered_{index}"


def rewrite(model: onnx.ModelProto, plan: Plan, *, table: int, training: bool) -> tuple[onnx.ModelProto, str | None]:
    """Return a copy of `model` in which the plan's events stand for the weights, and the gradient of the trigger.

    Args:
        model: the graph that the plan was made for; left unchanged.
        plan: see :func:`ort_zero.runtime.zero3.collective_plan.plan`.
        table: number under which the running events are registered (see :mod:`ort_zero.runtime.zero3.gather_reduce`).
        training: whether the graph has a backward part; the second result is None if not.

    Raises:
        BridgeError: the result breaks one of the rules of :func:`check`.
    """
    if any(i.name == TRIGGER for i in model.graph.input):
        raise BridgeError("the graph has been rewritten already")
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    gone = set(plan.weights) if plan.takes_weights else set()
    types = {v.name: v.type.tensor_type for v in chain(graph.value_info, graph.input, graph.output)}
    a = analyse(graph, plan.weights if plan.takes_weights else {})
    edit = _Edit(graph, plan, a, types)
    nodes = edit.without_weights() if plan.takes_weights else list(a.order)
    events = edit.event_nodes(table)
    reduced = {g for _, r in plan.reduces() for g in r.gradients}
    frozen = {f"{w}_grad" for w in gone} - reduced
    keep_outputs = [o for o in graph.output if o.name not in reduced and o.name not in frozen]
    needed = {o.name for o in keep_outputs} | {name for node in events for name in node.input}
    nodes = _live(nodes + edit.clones, needed) + events

    last = token_name(len(plan.events) - 1) if plan.events else TRIGGER
    outputs = [_copy(o) for o in keep_outputs]
    if training:
        outputs.append(helper.make_tensor_value_info(last, TensorProto.FLOAT, [1]))
    inputs = [_copy(i) for i in graph.input if i.name not in gone]
    inputs.append(helper.make_tensor_value_info(TRIGGER, TensorProto.FLOAT, [1]))
    # session creation fails for a value that lost its type with its place among the outputs
    infos = [_copy(v) for v in graph.value_info if v.name not in gone]
    infos += [_copy(o) for o in graph.output if o.name in reduced]
    infos += [v for v in edit.infos if v.name != last]
    for field, content in (("input", inputs), ("output", outputs), ("value_info", infos)):
        graph.ClearField(field)
        getattr(graph, field).extend(content)
    graph.initializer.extend(edit.initializers)
    ordered = [_copy(n) for n in sorted_nodes(graph, nodes)]
    graph.ClearField("node")
    graph.node.extend(ordered)
    check(result, plan)
    return result, last if training else None


class _Edit:
    """The pieces that one rewrite adds."""

    def __init__(self, graph: onnx.GraphProto, plan: Plan, a: Analysis, types: Mapping):
        self.graph, self.plan, self.a, self.types = graph, plan, a, types
        self.made_by = {out: node for node in a.order for out in node.output if out}
        self.clones: list[onnx.NodeProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._cloned: dict[tuple, str] = {}
        self._witnesses: set[str] = set()

    def without_weights(self) -> list[onnx.NodeProto]:
        """Return the nodes with every use of a weight renamed to the gather that serves it."""
        source: dict[str, dict[str, str]] = {}
        for index, gather in self.plan.gathers():
            for weight, readers in zip(gather.weights, gather.readers, strict=True):
                for key in readers:
                    source.setdefault(key, {})[weight] = gathered_name(weight, index)
        nodes = []
        for node in self.a.order:
            outs = [out for out in node.output if out]
            if any(out in self.a.made_of for out in outs):
                continue  # made of weights only: cloned for each use
            if node.op_type in ("Shape", "Size") and node.input[0] in self.a.made_of:
                self._fold_shape(node)
                continue
            names = {n for n in all_inputs(node) if n in self.a.made_of}
            if names:
                have = source.get(node_key(node), {})
                node = _copy(node)
                _rename(node, {name: self._resolve(name, have, node) for name in names})
            nodes.append(node)
        return nodes

    def _fold_shape(self, node: onnx.NodeProto) -> None:
        weight = self.plan.weights.get(node.input[0])
        if weight is None:
            # the shape of something made of weights: its static type tells
            info = self.types.get(node.input[0])
            if info is None or not all(d.HasField("dim_value") for d in info.shape.dim):
                raise BridgeError(f"the shape of {node.input[0]!r}, made of weights only, is not known")
            shape = [d.dim_value for d in info.shape.dim]
        else:
            shape = list(weight.shape)
        if node.op_type == "Size":
            value = np.array(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)
        else:
            at = {attribute.name: attribute.i for attribute in node.attribute}
            value = np.array(shape[at.get("start", 0) : at.get("end", len(shape))], dtype=np.int64)
        self.initializers.append(numpy_helper.from_array(value, node.output[0]))

    def _resolve(self, name: str, have: Mapping[str, str], reader: onnx.NodeProto) -> str:
        """Return the value that stands for `name` where the weights `have` were gathered, cloning its makers."""
        if name in self.plan.weights:
            if name not in have:
                raise BridgeError(f"no gather serves {name!r} at node {reader.name!r}")
            return have[name]
        if name not in self.a.made_of:
            return name
        key = (name, tuple(sorted((w, have[w]) for w in self.a.made_of[name])))
        if key in self._cloned:
            return self._cloned[key]
        maker = _copy(self.made_by[name])
        suffix = f"__copy_{len(self._cloned)}"
        _rename(maker, {n: self._resolve(n, have, reader) for n in all_inputs(maker) if n in self.a.made_of})
        for i, out in enumerate(maker.output):
            if not out:
                continue
            self._cloned[(out, key[1])] = maker.output[i] = out + suffix
            if out in self.types:
                info = onnx.ValueInfoProto(name=out + suffix)
                info.type.tensor_type.CopyFrom(self.types[out])
                self.infos.append(info)
        # the nodes of one chain may share the suffix, and ORT refuses equal names
        maker.name = f"{maker.name or self._cloned[key]}{suffix}"
        self.clones.append(maker)
        return self._cloned[key]

    def event_nodes(self, table: int) -> list[onnx.NodeProto]:
        """Return the PythonOp nodes of the plan's events, chained by tokens."""
        nodes = []
        token = TRIGGER
        for index, event in enumerate(self.plan.events):
            read, made = [(token, *_TOKEN)], [(token_name(index), TensorProto.FLOAT, [1])]
            if isinstance(event, Gather):
                read += [(event.anchor, *self._type_of(event.anchor))] if event.anchor else []
                for name in event.weights:
                    w = self.plan.weights[name]
                    made.append((gathered_name(name, index), w.elem_type, list(w.shape)))
            else:
                for name, gradient in zip(event.weights, event.gradients, strict=True):
                    w = self.plan.weights[name]
                    read.append((gradient, w.elem_type, len(w.shape)))
                for name in event.after:
                    if name.endswith(RECOMPUTED):
                        # what is there for a moment only is not held for a reduce: its shape will do
                        witness = f"{name}__exists"
                        if witness not in self._witnesses:
                            self._witnesses.add(witness)
                            nodes.append(helper.make_node("Shape", [name], [witness], witness))
                        read.append((witness, TensorProto.INT64, 1))
                    else:
                        read.append((name, *self._type_of(name)))
            function, name = (GATHER, "gather") if isinstance(event, Gather) else (REDUCE, "reduce")
            ranked = [(value, kind, len(shape)) for value, kind, shape in made]
            nodes.append(python_op(function, f"ort_zero_{name}_{index}", (table, index), read, ranked))
            self.infos += [helper.make_tensor_value_info(*m) for m in made]
            token = token_name(index)
        return nodes

    def _type_of(self, name: str) -> tuple[int, int]:
        info = self.types.get(name)
        if info is None or not info.elem_type:
            return _TOKEN
        return info.elem_type, len(info.shape.dim)


def _copy(message):
    result = type(message)()
    result.CopyFrom(message)
    return result


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename the values that `node` reads, in its sub-graphs too unless a name is bound there."""
    for i, name in enumerate(node.input):
        if name in names:
            node.input[i] = names[name]
    for body in bodies(node):
        bound = {i.name for i in body.input} | {i.name for i in body.initializer}
        bound |= {out for inner in body.node for out in inner.output}
        inside = {old: new for old, new in names.items() if old not in bound}
        for inner in body.node:
            _rename(inner, inside)
        for output in body.output:
            if output.name in inside:
                # a body's output must be made in the body
                inner = helper.make_node("Identity", [inside[output.name]], [output.name])
                body.node.append(inner)


def _live(nodes: list[onnx.NodeProto], needed: set[str]) -> list[onnx.NodeProto]:
    """Return the nodes on which `needed` depends (with YieldOp and user PythonOps, which have effects)."""
    made_by = {out: node for node in nodes for out in node.output if out}
    alive: set[int] = set()
    stack = [made_by[name] for name in needed if name in made_by]
    stack += [n for n in nodes if n.op_type in ("YieldOp", "PythonOp")]
    while stack:
        node = stack.pop()
        if id(node) in alive:
            continue
        alive.add(id(node))
        stack += [made_by[name] for name in all_inputs(node) if name in made_by]
    return [node for node in nodes if id(node) in alive]


def check(model: onnx.ModelProto, plan: Plan) -> None:
    """Raise unless the rewritten graph keeps the bridge's rules.

    Rules: no weight is a graph input or read by a node; the graph is acyclic and every value is made; each gradient in
    the plan is reduced exactly once and is no graph output; the backward never reads what the forward gathered; the
    tokens form one chain through all events in the plan's order.

    Raises:
        BridgeError: names the rule and the weight or node.
    """
    graph = model.graph
    gathers = plan.gathers()
    weights = set(plan.weights) if plan.takes_weights else set()
    left = [i.name for i in graph.input if i.name in weights]
    if left:
        raise BridgeError(f"weights are still graph inputs: {left}")
    nodes = sorted_nodes(graph)
    after_yield: set[str] = set()
    reduced: dict[str, int] = {}
    forward_only = {
        gathered_name(w, i) for i, g in gathers for w in g.weights if g.phase.value == "forward"
    }  # fmt: skip
    constant = {i.name for i in graph.initializer}
    chain_of: dict[int, str] = {}
    for node in nodes:
        names = all_inputs(node)
        for name in names:
            if name in weights:
                raise BridgeError(f"node {node.name!r} still reads the weight {name!r}")
        ours = node.op_type == "PythonOp" and node.name.startswith("ort_zero_")
        data = names[1:] if ours else names
        if node.op_type == "YieldOp" or any(n in after_yield for n in data):
            if not ours:
                bad = next((n for n in names if n in forward_only and node.op_type != "YieldOp"), None)
                if bad:
                    raise BridgeError(f"backward node {node.name!r} reads {bad!r}, which the forward gathered")
            after_yield.update(out for out in node.output if out)
        elif node.op_type not in SOURCES and not is_random(node):
            if all(n in constant for n in names) and (names or node.op_type == "Constant"):
                constant.update(node.output)
            elif names and all(n in forward_only or n in constant for n in names):
                forward_only.update(node.output)
        if ours:
            index = int(node.name.rpartition("_")[2])
            if index in chain_of:
                raise BridgeError(f"event {index} happens twice")
            chain_of[index] = node.input[0]
            if node.name.startswith("ort_zero_reduce"):
                for gradient in node.input[1 : len(node.input) - len(plan.events[index].after)]:
                    reduced[gradient] = reduced.get(gradient, 0) + 1
    for index in range(len(plan.events)):
        expected = token_name(index - 1) if index else TRIGGER
        if chain_of.get(index) != expected:
            raise BridgeError(f"event {index} is not in the token chain")
    outputs = {o.name for o in graph.output}
    for _, event in plan.reduces():
        for weight, gradient in zip(event.weights, event.gradients, strict=True):
            if reduced.get(gradient) != 1 or gradient in outputs:
                raise BridgeError(f"the gradient of {weight!r} is reduced {reduced.get(gradient, 0)} times, not once")


def describe(plan: Plan) -> str:
    """Return one line about the plan for logs."""
    gathers = plan.gathers()
    backward = sum(1 for _, g in gathers if g.phase.value == "backward")
    reduces = [e for e in plan.events if isinstance(e, Reduce)]
    return (
        f"{len(plan.weights)} weights, {len(gathers) - backward} gathers forward, {backward} backward, "
        f"{len(reduces)} reduces"
    )
