"""What of a training graph can be computed again: the entries of ORT's table, each with the nodes that it takes.

ORT's memory optimizer (``recompute_analysis.cc``) looks from every *stashed* value, one that both the forward and the
backward read, towards the inputs, until it meets other stashed values. The nodes on the way are a cluster, named by
their operators: ``"FastGelu+Reshape+"``. It applies all clusters of one name or none: the counts of its plans have no
effect in 1.19.2 (``FinalizeNodePlansFromUserConfig`` counts each cluster once, so nothing is ever skipped). Here every
entry can be had alone: what is not wanted is taken back after ORT has applied everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_zero.compat.ort_kernels import RECOMPUTED
from ort_zero.recompute.cost_model import seconds_of
from ort_zero.recompute.graph_model import Flow, Node

COMPROMISE = 2
"""Kind of a recomputation that stops early, at a smaller value; 1 goes all the way."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A row of ORT's table."""

    name: str
    """Operators in order: ``"FastGelu+Reshape+"``."""
    kind: int
    """1: recompute, 2: with compromise."""
    frequency: int
    symbolic: str = ""
    """Saving of all entries in bytes, as ORT writes it."""

    @property
    def key(self) -> str:
        """``"FastGelu+Reshape+:1"``."""
        return f"{self.name}:{self.kind}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One place of the graph where a cluster can be applied."""

    cluster: str
    """Key of the cluster."""
    number: int
    """Among the entries of the cluster, in the order of the forward, from 0."""
    values: tuple[str, ...]
    """Stashed values that are computed again."""
    saving: int
    """Bytes of those values."""
    seconds: float
    """Estimate of what computing them again takes."""
    nodes: tuple[str, ...] = ()
    """Names of the copies that do it."""
    weights: tuple[str, ...] = ()
    """Graph inputs that they read, by name."""


def clusters_of(table: Mapping[str, tuple[str, int]]) -> dict[str, Cluster]:
    """Return the rows of ORT's table by key.

    Args:
        table: see :meth:`ort_zero.compat.ortmodule.Manager.recomputable`; a row may hold several, of which a place
            takes one each.
    """
    found: dict[str, Cluster] = {}
    for row, (symbolic, frequency) in table.items():
        for part in row.split(","):
            name, kind, _ = part.rsplit(":", 2)
            key = f"{name}:{kind}"
            if key not in found or found[key].frequency < frequency:
                found[key] = Cluster(name, int(kind), frequency, symbolic)
    return found


def entries_of(flow: Flow, kinds: Mapping[str, int], weights: Collection[str] = ()) -> list[Entry]:
    """Return the entries of a graph in which ORT has applied every cluster, in the order of the forward.

    Args:
        flow: of that graph, its nodes in the order of the forward.
        kinds: kind by name of each cluster that was applied.
        weights: graph inputs whose use is to be noted.
    """
    number = {name: i for i, name in enumerate(flow.values)}
    made_by = {value: node for node in flow.nodes for value in node.makes}
    place = {node.name: i for i, node in enumerate(flow.nodes)}
    copies = {node.name: node for node in flow.nodes if node.copy}
    operator_of = {node.name: node.operator for node in flow.nodes}
    stashed = _stashed(flow)
    found: list[tuple[int, str, dict[str, Any]]] = []
    for name, values in stashed.items():
        taken: list[Node] = []
        stack, seen = [copies[name]], {name}
        read: set[str] = set()
        while stack:
            node = stack.pop()
            taken.append(node)
            read.update(flow.values[value] for value in node.reads if flow.values[value] in weights)
            makers = {made_by[value].name for value in node.reads if value in made_by and made_by[value].copy}
            for other in makers - seen - stashed.keys():
                seen.add(other)
                stack.append(copies[other])
        taken.sort(key=lambda node: place[node.name.removesuffix(RECOMPUTED)])
        # a copy may be of another operator than its original, by which the cluster is known
        operators = "".join(f"{operator_of[node.name.removesuffix(RECOMPUTED)]}+" for node in taken)
        seconds = sum(seconds_of(flow, node) for node in taken)
        about: dict[str, Any] = {
            "values": values,
            "saving": sum(flow.sizes[flow.owner(number[value])] for value in values),
            "seconds": seconds,
            "nodes": tuple(node.name for node in taken),
            "weights": tuple(sorted(read)),
        }
        found.append((place[name.removesuffix(RECOMPUTED)], operators, about))
    found.sort(key=lambda item: item[0])
    same = {tuple(sorted(name.split("+"))): name for name in kinds}
    counted: Counter[str] = Counter()
    entries = []
    for _, operators, about in found:
        # nodes that do not depend on each other may stand in another order in ORT's name
        name = operators if operators in kinds else same.get(tuple(sorted(operators.split("+"))), operators)
        key = f"{name}:{kinds.get(name, 1)}"
        entries.append(Entry(key, counted[key], **about))
        counted[key] += 1
    return entries


def choose(entries: Sequence[Entry], counts: Mapping[str, int]) -> list[Entry]:
    """Return the entries that are computed again where so many are asked for of each cluster: the first ones.

    What the forward stashes first is held longest.

    Args:
        entries: all.
        counts: by key of the cluster.
    """
    return [entry for entry in entries if entry.number < counts.get(entry.cluster, 0)]


def applied(flow: Flow, chosen: Collection[Entry]) -> Flow:
    """Return the flow of a graph with all entries in which only those of `chosen` are computed again."""
    return flow.with_copies(copies_of(chosen))


def copies_of(chosen: Collection[Entry]) -> set[str]:
    """Return the names of the copies that the entries `chosen` need."""
    return {name for entry in chosen for name in entry.nodes}


def _stashed(flow: Flow) -> dict[str, tuple[str, ...]]:
    """Return by name of a copy which stashed values it stands for: the backward now takes them from it."""
    # as in ORT, what runs after the barrier is backward, even where it does not depend on it
    turned = {value for node in flow.nodes[flow.barrier :] if not node.copy for value in node.reads}
    found = {}
    for node in flow.nodes:
        values = tuple(flow.values[value].removesuffix(RECOMPUTED) for value in node.makes if value in turned)
        if node.copy and values:
            found[node.name] = values
    return found
