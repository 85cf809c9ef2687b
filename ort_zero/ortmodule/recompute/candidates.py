"""Finds the candidates for recomputation in a training graph: places of the clusters in ORT's table, with their nodes.

ORT's memory optimizer (``recompute_analysis.cc``) looks from every *stashed* value, one that both the forward and the
backward read, towards the inputs, until it meets other stashed values. The nodes on the way are a cluster, named by
their operators: ``"FastGelu+Reshape+"``. It applies all clusters of one name or none: the counts of its plans have no
effect in 1.19.2 (``FinalizeNodePlansFromUserConfig`` counts each cluster once, so nothing is ever skipped). Here every
candidate can be chosen alone: what is not wanted is taken back after ORT has applied everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_zero.ortmodule.compat.ort_kernels import RECOMPUTED
from ort_zero.ortmodule.recompute.cost_model import seconds_of
from ort_zero.ortmodule.recompute.graph_model import GraphModel, Node

COMPROMISE = 2
"""Kind of a recomputation that stops early, at a smaller value; 1 goes all the way."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A row of ORT's table: a sequence of operators that can be computed again, wherever it occurs in the graph."""

    name: str
    """The operators in order, each followed by a plus sign: ``"FastGelu+Reshape+"``."""
    kind: int
    """1: recompute, 2: with compromise."""
    frequency: int
    """Number of places in the graph where ORT finds the cluster."""
    symbolic: str = ""
    """Bytes that all candidates of the cluster save together, as the symbolic expression that ORT writes."""

    @property
    def key(self) -> str:
        """Name and kind of the cluster in ORT's notation, such as ``"FastGelu+Reshape+:1"``."""
        return f"{self.name}:{self.kind}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place of the graph where a cluster can be applied."""

    cluster: str
    """Key of the cluster, see :attr:`Cluster.key`."""
    number: int
    """Index of this place among those of the cluster, in the order of the forward, from 0."""
    values: tuple[str, ...]
    """Names of the stashed values that are computed again."""
    saving: int
    """Bytes of those values."""
    seconds: float
    """Estimated seconds per step that computing them again takes."""
    nodes: tuple[str, ...] = ()
    """Names of the copied nodes that compute those values again."""
    weights: tuple[str, ...] = ()
    """Names of the weights that these nodes read."""


def clusters_of(table: Mapping[str, tuple[str, int]]) -> dict[str, Cluster]:
    """Return the rows of ORT's table by key.

    Args:
        table: see :meth:`.compat.ortmodule.Manager.recomputable`; a row may hold several, of which a place
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


def find_candidates(graph: GraphModel, kinds: Mapping[str, int], weights: Collection[str] = ()) -> list[Candidate]:
    """Return the candidates of a graph in which ORT has applied every cluster, in the order of the forward.

    Args:
        graph: model of that graph, its nodes in the order of the forward.
        kinds: name of each cluster that was applied, to its kind (1 or 2).
        weights: names of the graph inputs whose use is to be noted.
    """
    number = {name: i for i, name in enumerate(graph.values)}
    made_by = {value: node for node in graph.nodes for value in node.makes}
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    copies = {node.name: node for node in graph.nodes if node.copy}
    operator_of = {node.name: node.operator for node in graph.nodes}
    stashed = _stashed(graph)
    found: list[tuple[int, str, dict[str, Any]]] = []
    for name, values in stashed.items():
        taken: list[Node] = []
        stack, seen = [copies[name]], {name}
        read: set[str] = set()
        while stack:
            node = stack.pop()
            taken.append(node)
            read.update(graph.values[value] for value in node.reads if graph.values[value] in weights)
            makers = {made_by[value].name for value in node.reads if value in made_by and made_by[value].copy}
            for other in makers - seen - stashed.keys():
                seen.add(other)
                stack.append(copies[other])
        taken.sort(key=lambda node: place[node.name.removesuffix(RECOMPUTED)])
        # a copy may be of another operator than its original, by which the cluster is known
        operators = "".join(f"{operator_of[node.name.removesuffix(RECOMPUTED)]}+" for node in taken)
        seconds = sum(seconds_of(graph, node) for node in taken)
        about: dict[str, Any] = {
            "values": values,
            "saving": sum(graph.sizes[graph.owner(number[value])] for value in values),
            "seconds": seconds,
            "nodes": tuple(node.name for node in taken),
            "weights": tuple(sorted(read)),
        }
        found.append((place[name.removesuffix(RECOMPUTED)], operators, about))
    found.sort(key=lambda item: item[0])
    same = {tuple(sorted(name.split("+"))): name for name in kinds}
    counted: Counter[str] = Counter()
    candidates = []
    for _, operators, about in found:
        # nodes that do not depend on each other may stand in another order in ORT's name
        name = operators if operators in kinds else same.get(tuple(sorted(operators.split("+"))), operators)
        key = f"{name}:{kinds.get(name, 1)}"
        candidates.append(Candidate(key, counted[key], **about))
        counted[key] += 1
    return candidates


def choose(candidates: Sequence[Candidate], counts: Mapping[str, int]) -> list[Candidate]:
    """Return the first candidates of each cluster, as many as `counts` asks for.

    What the forward stashes first is held longest.

    Args:
        candidates: all candidates of the graph.
        counts: key of a cluster, to the number of its places that are to be computed again.
    """
    return [candidate for candidate in candidates if candidate.number < counts.get(candidate.cluster, 0)]


def applied(graph: GraphModel, chosen: Collection[Candidate]) -> GraphModel:
    """Return a graph with all candidates as one in which only those of `chosen` are computed again."""
    return graph.with_copies(copies_of(chosen))


def copies_of(chosen: Collection[Candidate]) -> set[str]:
    """Return the names of the copies that the candidates `chosen` need."""
    return {name for candidate in chosen for name in candidate.nodes}


def _stashed(graph: GraphModel) -> dict[str, tuple[str, ...]]:
    """Return by name of a copy which stashed values it stands for: the backward now takes them from it."""
    # as in ORT, what runs after the barrier is backward, even where it does not depend on it
    turned = {value for node in graph.nodes[graph.barrier :] if not node.copy for value in node.reads}
    found = {}
    for node in graph.nodes:
        values = tuple(graph.values[value].removesuffix(RECOMPUTED) for value in node.makes if value in turned)
        if node.copy and values:
            found[node.name] = values
    return found
