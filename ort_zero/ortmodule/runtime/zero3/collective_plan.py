"""Plans which weights to gather where in ORT's graph, and when to reduce which gradient: a pure function.

ORT's graph has every weight as a graph input and every weight's gradient as a graph output. Under ZeRO-3 no rank holds
a whole weight, so each *use* of a weight has to read the output of a **gather**, and each gradient goes into a
**reduce** the moment it exists. The plan lists these events in the one order in which every rank performs them.

The order is a valid schedule by construction. ``level`` is the longest path from the graph's inputs. A gather is
anchored to an activation that its first reader reads, so all that depends on the gather has a higher level than the
anchor; a reduce comes at the level of its gradient. Hence a path from an event's output to an earlier event's input
would have to descend in level, which is impossible. Forward events come before backward ones: an anchor in the forward
part does not depend on any backward value.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce as fold

import onnx

from ort_zero.errors import GraphEditError
from ort_zero.ortmodule.onnx_edit.topology import input_names, node_key, nodes_reached_from, output_names
from ort_zero.ortmodule.runtime.zero3.gradient_memory import gradients_with_own_memory
from ort_zero.ortmodule.runtime.zero3.graph_analysis import GraphAnalysis, analyse

MAX_LEVEL_DISTANCE = 8
"""Maximum distance in levels of uses of a weight that share one gather; a farther use gathers again, so nothing is kept
between."""


class Phase(enum.Enum):
    """The part of the training graph in which an event happens."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter as the graph sees it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full weight, not of its partition."""
    elem_type: int
    """Element type by its number in ONNX."""
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements of the full weight."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gather:
    """Makes the full weights available to the nodes in `readers`."""

    phase: Phase
    weights: tuple[str, ...]
    anchor: str | None
    """Name of the activation that must exist before the gather runs; None for a gather at the start."""
    readers: tuple[tuple[str, ...], ...]
    """For each weight the keys (see :func:`~.onnx_edit.topology.node_key`) of the nodes that read it, or
    something computed from weights only."""
    after: tuple[str, ...] = ()
    """Names of further values that must exist before the gather runs: what reads the weights of the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduce:
    """Hands the gradients of `weights` to ZeRO's reduction."""

    phase: Phase
    weights: tuple[str, ...]
    gradients: tuple[str, ...]
    after: tuple[str, ...] = ()
    """Names of values that must exist before the reduce runs: what is still to be computed from the weights, which a
    hook may change."""


Event = Gather | Reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePlan:
    """The events of one graph in execution order."""

    events: tuple[Event, ...]
    weights: Mapping[str, Weight]
    gathers_weights: bool = True
    """Whether the weights are partitioned, so that they stop being graph inputs, be they gathered anywhere or not."""
    own_memory: frozenset[str] = frozenset()
    """Names of gradients that share their memory with no other value of the graph, so that the parameter may keep
    it."""

    def gathers(self, phase: Phase | None = None) -> list[tuple[int, Gather]]:
        """Return (index, gather) in order, of one phase or of both."""
        return [
            (i, e) for i, e in enumerate(self.events) if isinstance(e, Gather) and (phase is None or e.phase == phase)
        ]

    def reduces(self) -> list[tuple[int, Reduce]]:
        """Return the pairs (index, reduce) in execution order."""
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

    def __str__(self) -> str:
        gathers = self.gathers()
        backward = sum(1 for _, g in gathers if g.phase is Phase.BACKWARD)
        return (
            f"{len(self.weights)} weights, {len(gathers) - backward} gathers forward, {backward} backward, "
            f"{len(self.reduces())} reduces"
        )


@dataclass(frozen=True, slots=True)
class _Placed:
    """An event with what decides its place in the execution order."""

    place: tuple
    event: Event


def plan_collectives(
    model: onnx.ModelProto,
    weights: Mapping[str, Weight],
    *,
    training: bool,
    gather: bool = True,
    merge_elements: int = 0,
    one_by_one: bool = False,
) -> CollectivePlan:
    """Return the events that `model` needs so that none of `weights` is a graph input any more.

    Args:
        model: ORT's optimized gradient graph (training) or forward graph.
        weights: by graph input name; those that the graph does not read are ignored.
        training: whether gradients are to be reduced.
        gather: False plans reduces only (weights stay graph inputs), in the reverse of the order of `weights`: as no
            reduce waits for another, any order is a valid schedule, and graphs that differ hand over alike.
        merge_elements: neighbouring events share a node while they hold no more elements than this: each node costs
            about 0.1 ms of its own. 0 merges nothing.
        one_by_one: a gather waits until the weights of the one before are read, if both together have more elements
            than the largest weight: ONNX Runtime may run the gathers before any reader.

    Raises:
        GraphEditError: a graph output is computed from weights only.
    """
    graph = model.graph
    inputs, outputs = {i.name for i in graph.input}, {o.name for o in graph.output}
    weights = {name: w for name, w in weights.items() if name in inputs}
    analysis = analyse(graph, weights)
    placed: list[_Placed] = []
    if gather:
        _refuse_weight_outputs(graph, analysis)
        placed += _gathers(analysis)
    if training:
        trained = [name for name, w in weights.items() if w.trainable and f"{name}_grad" in outputs]
        placed += _reduces_by_level(analysis, trained) if gather else _reduces_by_name(analysis, outputs, trained)
    placed.sort(key=lambda item: item.place)
    events = [item.event for item in placed]
    if merge_elements:
        events = _merged(events, weights, merge_elements)
    if one_by_one:
        events = _waiting(events, weights, analysis)
    gradients = {g for event in events if isinstance(event, Reduce) for g in event.gradients}
    return CollectivePlan(
        events=tuple(events),
        weights=weights,
        gathers_weights=gather,
        own_memory=gradients_with_own_memory(analysis.order, outputs - gradients, gradients),
    )


def small_share(weights: Mapping[str, Weight]) -> int:
    """Return how many elements neighbouring events may hold together: a quarter of the largest weight.

    So a group of small weights never decides the peak of gathered elements.
    """
    return max((w.numel for w in weights.values()), default=0) // 4


def _refuse_weight_outputs(graph: onnx.GraphProto, analysis: GraphAnalysis) -> None:
    for output in graph.output:
        sources = analysis.source_weights.get(output.name)
        if sources is not None:
            raise GraphEditError(
                f"the module returns {', '.join(sorted(sources))} (or something made of it alone); "
                "under ZeRO-3 a weight cannot be an output of the graph: return an activation instead"
            )


# -- gathers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Use:
    """Nodes of one phase, near each other, that read one weight."""

    level: int
    """Level of the first reader."""
    weight: str
    readers: list[str]
    """Keys of the nodes, the first to run first."""


def _gathers(analysis: GraphAnalysis) -> list[_Placed]:
    """Return a gather for each group of nearby uses of one module's weights, apart for forward and backward."""
    nodes = {node_key(node): node for node in analysis.order}
    placed = []
    for (phase, module), uses in _uses_by_module(analysis).items():
        for group in _nearby_uses(uses):
            first = min((use.readers[0] for use in group), key=lambda key: (analysis.node_level[key], key))
            anchor = _anchor(analysis, nodes[first], phase)
            event = Gather(
                phase=phase,
                weights=tuple(use.weight for use in group),
                anchor=anchor,
                readers=tuple(tuple(use.readers) for use in group),
            )
            level = analysis.value_level.get(anchor, 0) if anchor else 0
            placed.append(_Placed((phase is Phase.BACKWARD, level, 0, module, group[0].weight), event))
    return placed


def _uses_by_module(analysis: GraphAnalysis) -> dict[tuple[Phase, str], list[_Use]]:
    """Return the uses of each module's weights in each phase; readers of a weight that are far apart are two uses."""
    found: dict[tuple[Phase, str], list[_Use]] = {}
    for (weight, phase), keys in _readers(analysis).items():
        keys.sort(key=lambda key: (analysis.node_level[key], key))
        near = [[keys[0]]]
        for key in keys[1:]:
            if analysis.node_level[key] - analysis.node_level[near[-1][-1]] > MAX_LEVEL_DISTANCE:
                near.append([key])
            else:
                near[-1].append(key)
        module = weight.rpartition(".")[0]
        uses = [_Use(analysis.node_level[readers[0]], weight, readers) for readers in near]
        found.setdefault((phase, module), []).extend(uses)
    return found


def _readers(analysis: GraphAnalysis) -> dict[tuple[str, Phase], list[str]]:
    """Return for each weight and phase the keys of the nodes that need it, without those that are cloned for others."""
    readers: dict[tuple[str, Phase], list[str]] = {}
    for node in analysis.order:
        key = node_key(node)
        if analysis.is_weight_only(node) or (node.op_type in ("Shape", "Size") and key in analysis.constant):
            continue
        phase = Phase.BACKWARD if node.op_type != "YieldOp" and key in analysis.backward else Phase.FORWARD
        for weight in sorted(analysis.weights_read_by(node)):
            readers.setdefault((weight, phase), []).append(key)
    return readers


def _nearby_uses(uses: Iterable[_Use]) -> list[list[_Use]]:
    """Return the uses of one module's weights in groups that share a gather: near each other, no weight twice."""
    first, *rest = sorted(uses, key=lambda use: (use.level, use.weight))
    groups = [[first]]
    for use in rest:
        again = any(use.weight == other.weight for other in groups[-1])
        if again or use.level - groups[-1][0].level > MAX_LEVEL_DISTANCE:
            groups.append([use])
        else:
            groups[-1].append(use)
    return groups


def _anchor(analysis: GraphAnalysis, node: onnx.NodeProto, phase: Phase) -> str | None:
    """Return the latest activation that `node` reads, one of the backward there; None if it reads no activation."""
    names = [n for n in input_names(node) if n not in analysis.source_weights and n not in analysis.constant]
    if phase is Phase.BACKWARD:
        names = [n for n in names if n in analysis.backward]
    return max(names, key=lambda n: (analysis.value_level.get(n, 0), n), default=None)


# -- reduces -----------------------------------------------------------------------------------------------------------


def _reduces_by_level(analysis: GraphAnalysis, trained: Sequence[str]) -> list[_Placed]:
    """Return a reduce for each level at which gradients of the weights `trained` come to exist."""
    at_level: dict[int, list[str]] = {}
    for name in trained:
        at_level.setdefault(analysis.value_level.get(f"{name}_grad", 0), []).append(name)
    placed = []
    for level, names in at_level.items():
        names.sort()
        event = Reduce(phase=Phase.BACKWARD, weights=tuple(names), gradients=tuple(f"{name}_grad" for name in names))
        placed.append(_Placed((True, level, 1, names[0], ""), event))
    return placed


def _reduces_by_name(analysis: GraphAnalysis, outputs: Collection[str], trained: Sequence[str]) -> list[_Placed]:
    """Return a reduce for each of the weights `trained`, the last one first, wherever in the graph its gradient is."""
    readers = _late_readers(analysis, outputs)
    return [
        _Placed(
            (place,),
            Reduce(
                phase=Phase.BACKWARD,
                weights=(name,),
                gradients=(f"{name}_grad",),
                after=tuple(value for value in readers.get(name, ()) if value != f"{name}_grad"),
            ),
        )
        for place, name in enumerate(reversed(trained))
    ]


def _late_readers(analysis: GraphAnalysis, outputs: Collection[str]) -> dict[str, list[str]]:
    """Return by weight what nodes compute from it that the module's results do not need, so that they may run late."""
    order = analysis.order
    results = {name for node in order if node.op_type == "YieldOp" for name in input_names(node)}
    early, needed = ({node_key(n) for n in nodes_reached_from(order, names)} for names in (results, outputs))
    readers: dict[str, list[str]] = {}
    for node in order:
        key = node_key(node)
        if (
            node.op_type in ("YieldOp", "Shape", "Size")
            or key in analysis.source_weights
            or key in early
            or key not in needed
        ):
            continue
        for weight in sorted(analysis.weights_read_by(node)):
            readers.setdefault(weight, []).append(key)
    return readers


# -- merging -----------------------------------------------------------------------------------------------------------


def _merged(events: Sequence[Event], weights: Mapping[str, Weight], limit: int) -> list[Event]:
    """Return events in which neighbours of one kind and phase share a node while they hold at most `limit` elements.

    A gather moves up to the first of its group, a reduce down to the last: the levels of a gather's readers only lie
    higher above its anchor, those of a reduce's gradients deeper below it, so the order stays a valid schedule.
    """
    gathers = [i for i, event in enumerate(events) if isinstance(event, Gather)]
    reduces = [i for i, event in enumerate(events) if isinstance(event, Reduce)]
    size = [sum(weights[name].numel for name in event.weights) for event in events]

    def may_join(group: Sequence[int], i: int) -> bool:
        gathered = {name for j in group for name in events[j].weights}
        return events[group[0]].phase is events[i].phase and gathered.isdisjoint(events[i].weights)

    at = {
        group[0]: fold(_both_gathers, (events[i] for i in group)) for group in _groups(gathers, size, limit, may_join)
    }
    for group in _groups(reduces, size, limit, lambda group, i: True):
        at[group[-1]] = fold(_both_reduces, (events[i] for i in group))
    return [at[i] for i in sorted(at)]


def _groups(
    indices: Sequence[int], size: Sequence[int], limit: int, may_join: Callable[[Sequence[int], int], bool]
) -> list[list[int]]:
    """Return `indices` in runs whose sizes add up to `limit` at most; what is larger stands alone."""
    groups: list[list[int]] = []
    room = 0
    for i in indices:
        if groups and size[i] <= room and may_join(groups[-1], i):
            groups[-1].append(i)
            room -= size[i]
        else:
            groups.append([i])
            room = limit - size[i]
    return groups


def _waiting(events: Sequence[Event], weights: Mapping[str, Weight], analysis: GraphAnalysis) -> list[Event]:
    """Return events whose gathers wait for the readers of the one before, where both hold more than the largest weight.

    None waits for what depends on itself or on a later event.
    """
    largest = max((weight.numel for weight in weights.values()), default=0)
    size = [sum(weights[name].numel for name in event.weights) for event in events]
    needs = _last_needed(events, analysis)
    result, before = list(events), None
    for i, event in enumerate(events):
        if not isinstance(event, Gather):
            continue
        if before is not None and events[before].phase is event.phase and size[before] + size[i] > largest:
            earlier = events[before]
            assert isinstance(earlier, Gather)
            read = dict.fromkeys(key for keys in earlier.readers for key in keys)
            result[i] = replace(event, after=tuple(name for name in read if needs.get(name, i) < i))
        before = i
    return result


def _last_needed(events: Sequence[Event], analysis: GraphAnalysis) -> dict[str, int]:
    """Return for each value of the graph the last event that it depends on, -1 for none."""
    serving: dict[str, int] = {}
    for i, event in enumerate(events):
        if isinstance(event, Gather):
            serving.update((key, i) for keys in event.readers for key in keys)
    needs: dict[str, int] = {}
    for node in analysis.order:
        last = max((needs.get(name, -1) for name in input_names(node)), default=-1)
        needs.update(dict.fromkeys(output_names(node), max(last, serving.get(node_key(node), -1))))
    return needs


def _both_gathers(one: Event, other: Event) -> Event:
    assert isinstance(one, Gather) and isinstance(other, Gather)
    return replace(one, weights=one.weights + other.weights, readers=one.readers + other.readers)


def _both_reduces(one: Event, other: Event) -> Event:
    assert isinstance(one, Reduce) and isinstance(other, Reduce)
    return replace(
        other,
        weights=one.weights + other.weights,
        gradients=one.gradients + other.gradients,
        after=tuple(dict.fromkeys(one.after + other.after)),
    )
