"""Which weights to gather where in ORT's gradient graph, and when to hand over which gradient: a pure function.

ORT's graph has every weight as a graph input and every weight's gradient as a graph output. Under ZeRO-3 no rank holds
a whole weight, so each *use* of a weight has to read the output of a **gather**, and each gradient goes into a
**reduce** the moment it exists. The plan lists these events in the one order in which every rank performs them.

The order is a valid schedule by construction. ``level`` is the longest path from the graph's inputs. A gather is
anchored to an activation that its first consumer reads, so all that depends on the gather has a higher level than the
anchor; a reduce comes at the level of its gradient. Hence a path from an event's output to an earlier event's input
would have to descend in level, which is impossible. Forward events come before backward ones: an anchor in the forward
part does not depend on any backward value.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from ort_zero.errors import BridgeError

PRODUCTS = frozenset(("MatMul", "FusedMatMul", "Gemm"))
ANEW = PRODUCTS | {
    "ReduceSum", "GatherGrad", "ConvGrad", "LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad"
}  # fmt: skip
"""Operators whose kernels write each result into memory of its own, never into that of an input.

Checked for ORT's CPU provider: the planner lets values share memory where a kernel's definition says Alias,
VariadicAlias, MayInplace or MayStridedOutput (core/framework/allocation_planner.cc), and the definitions of these say
nothing of the kind (core/providers/cpu/{math/matmul,math/gemm,reduction/reduction_ops}.cc,
contrib_ops/cpu/fusedmatmul.cc, orttraining/training_ops/cpu/{tensor/gather_grad,nn/conv_grad,nn/layer_norm}.cc).
The files were read at other commits than that of 1.19.2; a contract test runs the kernels of the installed version.
"""
_ATEN_ANEW = frozenset(("embedding_backward", "aten::embedding_backward"))
"""The same for operators of ATen nodes, which return tensors of PyTorch's."""

NEAR = 8
"""Uses of a weight within so many levels share one gather; a farther use gathers again, so nothing is kept between."""

SOURCES = ("YieldOp", "PythonOp", "PythonOpGrad")
"""Operators whose outputs are never made of weights only: what they do is not known, or happens once."""
_RANDOM = frozenset(
    ("Dropout", "BitmaskDropout", "BiasDropout", "BitmaskBiasDropout", "Bernoulli", "Multinomial",
     "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "multinomial", "bernoulli")
)  # fmt: skip
"""Operators (the last two of ATen nodes) that draw anew each time: a copy for the backward would draw otherwise."""


class Phase(enum.Enum):
    """The part of the training graph in which an event happens."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter as the graph sees it."""

    name: str
    shape: tuple[int, ...]
    """Full shape, not the partition's."""
    elem_type: int
    """ONNX element type."""
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements of the full weight."""
        size = 1
        for dim in self.shape:
            size *= dim
        return size


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """Makes the full weights available to the nodes in `readers`."""

    phase: Phase
    weights: tuple[str, ...]
    anchor: str | None
    """Activation that must exist before the gather runs; None: at the start."""
    readers: tuple[tuple[str, ...], ...]
    """For each weight the keys (see :func:`node_key`) of the nodes that read it, or something made of it only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduce:
    """Hands the gradients of `weights` to ZeRO's reduction."""

    phase: Phase
    weights: tuple[str, ...]
    gradients: tuple[str, ...]
    after: tuple[str, ...] = ()
    """Values that must exist before: what is still to be computed from the weights, which a hook may change."""


Event = Gather | Reduce
_NOTHING = Reduce(phase=Phase.BACKWARD, weights=(), gradients=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The events of one graph in execution order."""

    events: tuple[Event, ...]
    weights: Mapping[str, Weight]
    takes_weights: bool = True
    """Whether the weights stop being graph inputs, be they gathered anywhere or not."""
    own_memory: frozenset[str] = frozenset()
    """Gradients that share their memory with no other value of the graph: the parameter may keep it."""

    def gathers(self, phase: Phase | None = None) -> list[tuple[int, Gather]]:
        """Return (index, gather) in order, of one phase or of both."""
        return [
            (i, e) for i, e in enumerate(self.events) if isinstance(e, Gather) and (phase is None or e.phase == phase)
        ]

    def reduces(self) -> list[tuple[int, Reduce]]:
        """Return (index, reduce) in order."""
        return [(i, e) for i, e in enumerate(self.events) if isinstance(e, Reduce)]

    def digest(self) -> str:
        """Return a hash of the event list; ranks with equal digests perform the same collectives in one order."""
        h = hashlib.sha256()
        for event in self.events:
            h.update(type(event).__name__.encode())
            h.update(event.phase.value.encode())
            for name in event.weights:
                w = self.weights[name]
                h.update(f"{name}{w.shape}{w.elem_type}".encode())
        return h.hexdigest()


def captured_inputs(node: onnx.NodeProto) -> list[str]:
    """Return the outer values that the bodies of an If, Loop or Scan node read without naming them as inputs."""
    free: list[str] = []
    for body in bodies(node):
        bound = {i.name for i in body.input} | {i.name for i in body.initializer}
        for inner in body.node:
            for name in all_inputs(inner):
                if name not in bound and name not in free:
                    free.append(name)
            bound.update(inner.output)
        for output in body.output:
            if output.name not in bound and output.name not in free:
                free.append(output.name)
    return free


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the sub-graphs of a node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_inputs(node: onnx.NodeProto) -> list[str]:
    """Return the names of all values that a node reads, those of its sub-graphs included."""
    return [name for name in node.input if name] + captured_inputs(node)


def is_random(node: onnx.NodeProto) -> bool:
    """Return True if running the node twice gives two results."""
    name = node.op_type
    if name == "ATen":
        name = next((a.s.decode() for a in node.attribute if a.name == "operator"), name)
    return name in _RANDOM or any(is_random(inner) for body in bodies(node) for inner in body.node)


def node_key(node: onnx.NodeProto) -> str:
    """Return a name that is unique in the graph: that of the first output."""
    return next(name for name in node.output if name)


def sorted_nodes(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto] | None = None) -> list[onnx.NodeProto]:
    """Return the nodes in a stable topological order.

    Raises:
        BridgeError: the graph has a cycle, or a node reads a value that nothing makes.
    """
    nodes = list(graph.node if nodes is None else nodes)
    made_by = {out: i for i, node in enumerate(nodes) for out in node.output if out}
    known = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    state = [0] * len(nodes)  # 0 new, 1 open, 2 done
    order: list[onnx.NodeProto] = []
    for root in range(len(nodes)):
        stack = [(root, iter(all_inputs(nodes[root])))] if state[root] == 0 else []
        while stack:
            index, inputs = stack[-1]
            state[index] = 1
            for name in inputs:
                source = made_by.get(name)
                if source is None:
                    if name not in known:
                        raise BridgeError(f"node {nodes[index].name!r} reads {name!r}, which nothing makes")
                elif state[source] == 1:
                    raise BridgeError(f"the graph has a cycle through {nodes[source].name!r}")
                elif state[source] == 0:
                    stack.append((source, iter(all_inputs(nodes[source]))))
                    break
            else:
                state[index] = 2
                order.append(nodes[index])
                stack.pop()
    return order


@dataclass(frozen=True, slots=True)
class Analysis:
    """What is known of each node and value before anything is decided."""

    order: list[onnx.NodeProto]
    node_level: dict[str, int]
    value_level: dict[str, int]
    backward: set[str]
    """Values that exist only after the forward's outputs were handed to the user."""
    constant: set[str]
    made_of: dict[str, frozenset[str]]
    """Weights that a weight-only value is made of; a weight is made of itself."""


def analyse(graph: onnx.GraphProto, weights: Mapping[str, Weight]) -> Analysis:
    """Classify the values of `graph`: their level, phase, and whether they are made of weights or constants only."""
    order = sorted_nodes(graph)
    node_level: dict[str, int] = {}
    value_level: dict[str, int] = {}
    backward: set[str] = set()
    constant = {i.name for i in graph.initializer}
    inputs = {i.name for i in graph.input}
    made_of = {name: frozenset((name,)) for name in weights if name in inputs}
    for node in order:
        ins = all_inputs(node)
        level = 1 + max((value_level.get(name, 0) for name in ins), default=0)
        node_level[node_key(node)] = level
        outs = [name for name in node.output if name]
        value_level.update(dict.fromkeys(outs, level))
        if node.op_type == "YieldOp" or any(name in backward for name in ins):
            backward.update(outs)
        if node.op_type in SOURCES or is_random(node):
            continue
        if node.op_type in ("Shape", "Size") and node.input[0] in made_of:
            constant.update(outs)
        elif all(name in constant for name in ins) and (ins or node.op_type == "Constant"):
            constant.update(outs)
        elif any(name in made_of for name in ins) and all(name in constant or name in made_of for name in ins):
            weights_in = frozenset().union(*(made_of[name] for name in ins if name in made_of))
            made_of.update(dict.fromkeys(outs, weights_in))
    return Analysis(order, node_level, value_level, backward, constant, made_of)


def plan(
    model: onnx.ModelProto,
    weights: Mapping[str, Weight],
    *,
    training: bool,
    gather: bool = True,
    merge_elements: int = 0,
) -> Plan:
    """Return the events that `model` needs so that none of `weights` is a graph input any more.

    Args:
        model: ORT's optimized gradient graph (training) or forward graph.
        weights: by graph input name; those that the graph does not read are ignored.
        training: whether gradients are to be reduced.
        gather: False plans reduces only (weights stay graph inputs), in the reverse of the order of `weights`: as no
            reduce waits for another, any order is a valid schedule, and graphs that differ hand over alike.
        merge_elements: neighbouring events share a node while they hold no more elements than this: each node costs
            about 0.1 ms of its own. 0 merges nothing.

    Raises:
        BridgeError: a graph output is made of weights only.
    """
    graph = model.graph
    present = {i.name for i in graph.input}
    weights = {name: w for name, w in weights.items() if name in present}
    a = analyse(graph, weights)
    events: list[tuple[tuple, Event]] = []
    if gather:
        for output in graph.output:
            if output.name in a.made_of:
                raise BridgeError(
                    f"the module returns {', '.join(sorted(a.made_of[output.name]))} (or something made of it alone); "
                    "under ZeRO-3 a weight cannot be an output of the graph: return an activation instead"
                )
        events += _gathers(a)
    if training:
        outputs = {o.name for o in graph.output}
        events += _reduces(a, outputs, weights) if gather else _reduces_in_order(a, outputs, weights)
    events.sort(key=lambda item: item[0])
    if merge_elements:
        events = _merge(events, weights, merge_elements)
    gradients = {g for _, event in events if isinstance(event, Reduce) for g in event.gradients}
    return Plan(
        events=tuple(event for _, event in events),
        weights=weights,
        takes_weights=gather,
        own_memory=frozenset(_own_memory(a.order, {o.name for o in graph.output} - gradients, gradients)),
    )


def _merge(events: list[tuple[tuple, Event]], weights: Mapping[str, Weight], limit: int) -> list[tuple[tuple, Event]]:
    """Return sorted events in which neighbours of one kind and phase share a node while they stay small.

    A gather moves up to the first of its group, a reduce down to the last: the levels of a gather's readers only lie
    higher above its anchor, those of a reduce's gradients deeper below it, so the order stays a valid schedule.
    """
    merged: list[tuple[tuple, Event]] = []
    open_gather: int | None = None
    open_reduce: int | None = None
    room_gather = room_reduce = 0
    for key, event in events:
        size = sum(weights[name].numel for name in event.weights)
        if isinstance(event, Gather):
            if open_gather is not None:
                first_key, first = merged[open_gather]
                assert isinstance(first, Gather)
                if first.phase is event.phase and size <= room_gather and not set(first.weights) & set(event.weights):
                    both = replace(first, weights=first.weights + event.weights, readers=first.readers + event.readers)
                    merged[open_gather] = (first_key, both)
                    room_gather -= size
                    continue
            merged.append((key, event))
            open_gather, room_gather = len(merged) - 1, limit - size
        else:
            if open_reduce is not None and size <= room_reduce:
                _, first = merged[open_reduce]
                assert isinstance(first, Reduce)
                merged[open_reduce] = (merged[open_reduce][0], _NOTHING)
                event = replace(
                    event,
                    weights=first.weights + event.weights,
                    gradients=first.gradients + event.gradients,
                    after=tuple(dict.fromkeys(first.after + event.after)),
                )
                room_reduce -= size
            else:
                room_reduce = limit - size
            merged.append((key, event))
            open_reduce = len(merged) - 1
    return [item for item in merged if item[1] is not _NOTHING]


def _gathers(a: Analysis) -> list[tuple[tuple, Gather]]:
    readers: dict[tuple[str, Phase], list[str]] = {}
    by_key = {}
    for node in a.order:
        if any(out in a.made_of for out in node.output if out):
            continue
        key = node_key(node)
        if node.op_type in ("Shape", "Size") and key in a.constant:
            continue
        by_key[key] = node
        read = {w for name in all_inputs(node) if name in a.made_of for w in a.made_of[name]}
        phase = Phase.BACKWARD if node.op_type != "YieldOp" and key in a.backward else Phase.FORWARD
        for weight in sorted(read):
            readers.setdefault((weight, phase), []).append(key)

    groups: dict[tuple[Phase, str], list[tuple[int, str, list[str]]]] = {}
    for (weight, phase), keys in readers.items():
        keys.sort(key=lambda k: (a.node_level[k], k))
        clusters = [[keys[0]]]
        for key in keys[1:]:
            if a.node_level[key] - a.node_level[clusters[-1][-1]] > NEAR:
                clusters.append([key])
            else:
                clusters[-1].append(key)
        module = weight.rpartition(".")[0]
        for cluster in clusters:
            groups.setdefault((phase, module), []).append((a.node_level[cluster[0]], weight, cluster))

    events = []
    for (phase, module), uses in groups.items():
        uses.sort(key=lambda use: (use[0], use[1]))
        merged = [[uses[0]]]
        for use in uses[1:]:
            again = any(use[1] == other[1] for other in merged[-1])
            if again or use[0] - merged[-1][0][0] > NEAR:
                merged.append([use])
            else:
                merged[-1].append(use)
        for part in merged:
            first = min((cluster[0] for _, _, cluster in part), key=lambda k: (a.node_level[k], k))
            anchor = _anchor(a, by_key[first], phase)
            event = Gather(
                phase=phase,
                weights=tuple(weight for _, weight, _ in part),
                anchor=anchor,
                readers=tuple(tuple(cluster) for _, _, cluster in part),
            )
            level = a.value_level.get(anchor, 0) if anchor else 0
            events.append(((phase is Phase.BACKWARD, level, 0, module, part[0][1]), event))
    return events


def _anchor(a: Analysis, node: onnx.NodeProto, phase: Phase) -> str | None:
    names = [n for n in all_inputs(node) if n not in a.made_of and n not in a.constant]
    if phase is Phase.BACKWARD:
        names = [n for n in names if n in a.backward]
    return max(names, key=lambda n: (a.value_level.get(n, 0), n), default=None)


def _reduces(a: Analysis, outputs: set[str], weights: Mapping[str, Weight]) -> list[tuple[tuple, Reduce]]:
    at_level: dict[int, list[str]] = {}
    for name, weight in weights.items():
        if weight.trainable and f"{name}_grad" in outputs:
            at_level.setdefault(a.value_level.get(f"{name}_grad", 0), []).append(name)
    events = []
    for level, names in at_level.items():
        names.sort()
        event = Reduce(phase=Phase.BACKWARD, weights=tuple(names), gradients=tuple(f"{name}_grad" for name in names))
        events.append(((True, level, 1, names[0], ""), event))
    return events


def _reduces_in_order(a: Analysis, outputs: set[str], weights: Mapping[str, Weight]) -> list[tuple[tuple, Reduce]]:
    given = [name for name, weight in weights.items() if weight.trainable and f"{name}_grad" in outputs]
    readers = _late_readers(a, outputs)
    return [
        (
            (at,),
            Reduce(
                phase=Phase.BACKWARD,
                weights=(name,),
                gradients=(f"{name}_grad",),
                after=tuple(out for out in readers.get(name, ()) if out != f"{name}_grad"),
            ),
        )
        for at, name in enumerate(reversed(given))
    ]


def _late_readers(a: Analysis, outputs: set[str]) -> dict[str, list[str]]:
    """Return by weight what nodes make of it that the module's results do not need, so that they may run late."""
    results = {name for node in a.order if node.op_type == "YieldOp" for name in all_inputs(node)}
    early, needed = _ancestors(a, results), _ancestors(a, outputs)
    readers: dict[str, list[str]] = {}
    for node in a.order:
        key = node_key(node)
        if node.op_type in ("YieldOp", "Shape", "Size") or key in a.made_of or key in early or key not in needed:
            continue
        for weight in sorted({w for name in all_inputs(node) for w in a.made_of.get(name, ())}):
            readers.setdefault(weight, []).append(key)
    return readers


def _ancestors(a: Analysis, names: set[str]) -> set[str]:
    """Return the keys of the nodes on which the values `names` depend."""
    wanted, found = set(names), set()
    for node in reversed(a.order):
        if any(out in wanted for out in node.output if out):
            found.add(node_key(node))
            wanted.update(all_inputs(node))
    return found


def _writes_anew(node: onnx.NodeProto, made_by: Mapping[str, onnx.NodeProto], times_read: Mapping[str, int]) -> bool:
    if node.op_type == "ATen":
        return any(a.name == "operator" and a.s.decode() in _ATEN_ANEW for a in node.attribute)
    if node.op_type == "Transpose":
        # ORT optimizes the graph once more: of two Transposes nothing may be left, of one and a product a product is
        product = made_by.get(node.input[0])
        return product is not None and product.op_type in PRODUCTS and times_read[node.input[0]] == 1
    return node.op_type in ANEW


def _own_memory(order: Sequence[onnx.NodeProto], outputs: set[str], gradients: set[str]) -> set[str]:
    """Return those of `gradients` that nothing else reads, and whose memory is theirs alone.

    ORT computes equal expressions once: values that are equal by what makes them count as one value.
    """
    classes: dict[tuple, int] = {}
    class_of: dict[str, int] = {}
    size: dict[int, int] = {}
    made_by: dict[str, onnx.NodeProto] = {}
    read: Counter[str] = Counter(outputs)
    for node in order:
        names = all_inputs(node)
        read.update(names)
        for name in names:
            class_of.setdefault(name, classes.setdefault((name,), len(classes)))
        attributes = tuple(sorted(a.SerializeToString() for a in node.attribute))
        same = (node.op_type, node.domain, attributes, tuple(class_of[name] for name in names))
        for at, out in enumerate(node.output):
            if not out:
                continue
            made_by[out] = node
            class_of[out] = classes.setdefault((*same, at), len(classes))
            size[class_of[out]] = size.get(class_of[out], 0) + 1
    return {
        name
        for name in gradients
        if name in made_by
        and name not in read
        and size[class_of[name]] == 1
        and _writes_anew(made_by[name], made_by, read)
    }


def small_share(weights: Mapping[str, Weight]) -> int:
    """Return how many elements neighbouring events may hold together: a quarter of the largest weight.

    So a group of small weights never decides the peak of gathered elements.
    """
    return max((w.numel for w in weights.values()), default=0) // 4
