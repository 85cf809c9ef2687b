"""Makes a training graph that computes some of its activations again: what, how much, and in which order.

::

    gradient graph -> ORT optimizes it -> ORT's table -> ORT applies all of it -> search -> what is wanted is left
        -> (gathers) -> order of execution -> prediction

The prediction is made of the very graph that will run.
"""

from __future__ import annotations

import dataclasses
import difflib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from ort_zero import env
from ort_zero.errors import MemoryPlanError
from ort_zero.ortmodule.compat import cpu_allocator
from ort_zero.ortmodule.compat.c_library import return_large_blocks
from ort_zero.ortmodule.compat.ort_kernels import LOGITS_AT_ONCE
from ort_zero.ortmodule.recompute import graph_edits
from ort_zero.ortmodule.recompute.arrangement import arranged
from ort_zero.ortmodule.recompute.candidates import (
    COMPROMISE,
    Candidate,
    Cluster,
    choose,
    clusters_of,
    copies_of,
    find_candidates,
)
from ort_zero.ortmodule.recompute.decision import Decision, plan_texts, table_rows
from ort_zero.ortmodule.recompute.graph_model import GraphModel
from ort_zero.ortmodule.recompute.options import ALL, AUTO, PLAN, RecomputeRequest, free_memory, machine_memory
from ort_zero.ortmodule.recompute.own_clusters import own_table
from ort_zero.ortmodule.recompute.plan_store import PlanStore, plan_digest
from ort_zero.ortmodule.recompute.planner import Point, Search, budget_for
from ort_zero.utils.sizes import binary_size

if TYPE_CHECKING:
    from ort_zero.ortmodule.compat.ortmodule import GraphInfo, Manager

_SHARE = 0.8
"""Share of the free memory that a training graph may take when no budget is given."""


class LogitsTooLargeError(Exception):
    """A graph is better planned with head and loss in one node, which never holds all logits.

    Attributes:
        why: the reason, in words.
        budget: bytes that a step may take.
        unconstrained: what this graph needs where nothing is computed again.
    """

    def __init__(self, why: str, budget: int, unconstrained: Point):
        super().__init__(why)
        self.why, self.budget, self.unconstrained = why, budget, unconstrained


@dataclass(slots=True)
class _Choice:
    """How many places of each cluster are computed again, and how that was found."""

    requested: Mapping[str, int]
    """Key of a cluster, to the number of its places that the user wants, -1 for all."""
    counts: Mapping[str, int]
    """Key of a cluster, to the number of its places that are computed again."""
    budget: int | None = None
    """Bytes that a step may take; None without a budget."""
    path: list[Point] = field(default_factory=list)
    least: Point | None = None
    file: str = ""
    found: bool = False


class MemoryOptimizer:
    """Serves the training graphs of one model.

    Args:
        request: what the user asks for.
        folder: in which plans are stored.
        share: calls what it is given on the first rank, and returns the result on every rank; all ranks call it once
            for each graph.
        walk: let decisions for a budget hold the whole path on the first rank, also where a plan was stored.
    """

    def __init__(
        self,
        request: RecomputeRequest,
        folder: Path,
        share: Callable[[Callable[[], Any]], Any] = lambda make: make(),
        walk: bool = False,
    ):
        self.request = request
        self._store = PlanStore(folder)
        self._share = share
        self._walk = walk and env.rank() == 0
        self.decisions: list[Decision] = []
        """One decision for each graph that was built, the newest last."""

    def recompute(
        self,
        manager: Manager,
        model: onnx.ModelProto,
        info: GraphInfo,
        sizes: Mapping[str, int],
        *,
        partitioned: Collection[str] = (),
        released: Collection[str] = (),
        logits: int = 0,
        refused: LogitsTooLargeError | None = None,
    ) -> tuple[onnx.ModelProto, Decision]:
        """Return the graph with the copies that the request asks for, and the decision.

        A budget that is a share is one of what the graph takes whose logits exist, also where `refused` tells of it.

        Args:
            manager: manager of the training mode.
            model: gradient graph, before gathers and reduces are put in.
            info: what ORT knows of it.
            sizes: size of each named dimension.
            partitioned: weights that no rank holds in whole: what reads them cannot be computed again.
            released: results that leave the graph the moment they exist.
            logits: number of logits that a node of head and loss would save this graph; 0 where there can be none.
            refused: why the graph with all logits is not taken; `model` is the one with the node then.

        Raises:
            LogitsTooLargeError: the graph should have that node; never without `logits`.
            MemoryPlanError: a cluster of the plan is not in the graph, or nothing fits the budget.
        """
        started = time.perf_counter()
        if self.request.mode == AUTO:
            return_large_blocks()
            cpu_allocator.keep_nothing()
        agent, optimized = graph_edits.optimized(manager, model, info)
        table = manager.recomputable(agent, self.request.probe)
        del agent
        clusters = clusters_of(table | own_table(optimized))
        self._check_names(clusters)

        def with_copies(names: Sequence[str]) -> onnx.ModelProto:
            return graph_edits.with_copies(manager, optimized, info, names, self.request.probe) if names else optimized

        def candidates_of(names: Sequence[str]) -> list[Candidate]:
            return find_candidates(GraphModel.from_onnx(with_copies(names), sizes), _kinds(names))

        names = self._applied(clusters, candidates_of)
        full = with_copies(names)
        graph = GraphModel.from_onnx(full, sizes)
        early = set(released)
        graph = dataclasses.replace(graph, results=frozenset(i for i in graph.results if graph.values[i] not in early))
        candidates = find_candidates(graph, _kinds(names), partitioned)
        usable = [candidate for candidate in candidates if not candidate.weights]
        # only plans that were searched for are stored
        digest = ""
        if self.request.mode == AUTO:
            fixed = refused.budget if refused is not None else None
            digest = plan_digest(self.request, optimized, sizes, partitioned, fixed)
        decision = self._decide(graph, clusters, candidates, usable, digest, sizes, logits, refused)
        kept = copies_of(choose(usable, dict(decision.chosen.counts)))
        decision.seconds = time.perf_counter() - started
        self.decisions.append(decision)
        return graph_edits.only_copies(full, kept), decision

    def arrange(self, model: onnx.ModelProto, sizes: Mapping[str, int], decision: Decision) -> onnx.ModelProto:
        """Return the graph in the order in which it is to run, and note in `decision` what that needs."""
        return arranged(model, sizes, decision)

    def summary_lines(self) -> list[tuple[str, str]]:
        """Return what the newest graph computes again and the bytes that it saves, as lines of a name and a text."""
        return self.decisions[-1].summary_lines() if self.decisions else []

    # -- decide ----------------------------------------------------------------------------------------------------

    def _applied(
        self, clusters: Mapping[str, Cluster], candidates_of: Callable[[Sequence[str]], list[Candidate]]
    ) -> list[str]:
        """Return the keys of the clusters that ORT is to apply; where a place has two kinds, it takes the full one.

        Args:
            clusters: all of the graph, by key.
            candidates_of: returns the candidates of the graph in which ORT has applied the clusters with these keys.
        """
        compromises = [key for key, cluster in clusters.items() if cluster.kind == COMPROMISE]
        full = [key for key in clusters if key not in compromises]
        if self.request.mode == PLAN:
            planned = [requested.key for requested in self.request.cluster_counts]
            return planned if set(planned) & set(compromises) else full
        if self.request.level != COMPROMISE or not compromises:
            return full
        stashed = {value for candidate in candidates_of(compromises) for value in candidate.values}
        replaced = {candidate.cluster for candidate in candidates_of(full) if stashed.intersection(candidate.values)}
        return compromises + [key for key in full if key not in replaced]

    def _check_names(self, clusters: Mapping[str, Cluster]) -> None:
        for requested in self.request.cluster_counts:
            if requested.key in clusters:
                continue
            near = difflib.get_close_matches(requested.key, clusters, n=1, cutoff=0.3)
            have = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(clusters) or 'none'}"
            where = f" of {self.request.source}" if self.request.source else ""
            raise MemoryPlanError(
                f"the plan{where} asks for cluster {requested.key!r}, which this model does not have; {have} "
                '(ort-zero memory plan prints the table; "recompute": "auto" finds a plan)'
            )

    def _decide(
        self,
        graph: GraphModel,
        clusters: Mapping[str, Cluster],
        candidates: Sequence[Candidate],
        usable: Sequence[Candidate],
        digest: str,
        sizes: Mapping[str, int],
        logits: int,
        refused: LogitsTooLargeError | None,
    ) -> Decision:
        """Return what the graph computes again. All ranks must call this with graphs of the same structure.

        Args:
            graph: model of the graph in which everything is computed again.
            clusters: all of the graph, by key.
            candidates: all places of the clusters.
            usable: those of the places that may be chosen.
            digest: name of the plan in the store.
            sizes: size of each named dimension.
            logits: see :meth:`recompute`.
            refused: see :meth:`recompute`.
        """
        search = Search(graph, usable, shown=env.rank() == 0)
        unconstrained = refused.unconstrained if refused is not None else search.point({})
        if self.request.mode == AUTO:
            budget = refused.budget if refused is not None else self._budget(unconstrained)
            node = " and head and loss in one node" if refused is not None else ""
            choice = self._within_budget(search, unconstrained, digest, clusters, budget, logits, node)
        else:
            choice = self._everything(search) if self.request.mode == ALL else self._as_planned(search)
        counts = choice.counts
        return Decision(
            mode=self.request.mode,
            rows=table_rows(clusters, candidates, usable, choice.requested, counts, sizes),
            plan=[f"{key}:{count}" for key, count in counts.items() if count],
            unconstrained=unconstrained,
            chosen=search.point(counts),
            least=choice.least,
            budget=choice.budget,
            path=choice.path,
            sizes=dict(sizes),
            plan_file=choice.file,
            from_store=choice.found,
            fused_loss=refused.why if refused is not None else "",
        )

    def _within_budget(
        self,
        search: Search,
        unconstrained: Point,
        digest: str,
        clusters: Mapping[str, Cluster],
        budget: int,
        logits: int,
        node: str,
    ) -> _Choice:
        def stored_or_searched() -> tuple[dict[str, int] | None, bool, str]:
            stored = self._store.load(digest)
            if stored is not None:
                return stored, True, ""
            if logits and (why := self._store.refusal(digest)):
                return None, True, why
            if logits >= LOGITS_AT_ONCE and budget_for(unconstrained.resident) > budget:
                return None, False, f"{binary_size(4 * logits)} of logits need not exist at one time"
            fit = search.fit(budget)
            if fit is not None:
                return dict(fit.counts), False, ""
            if logits:
                needed = budget_for(search.least().resident)
                return None, False, f"with all logits a step needs {binary_size(needed)} at least"
            return None, False, self._too_small(budget, unconstrained, search.least(), node)

        counts, found, why = self._share(stored_or_searched)
        if counts is None and logits:
            if not found:
                self._store.save_refusal(digest, why)
            raise LogitsTooLargeError(why, budget, unconstrained)
        if counts is None:
            raise MemoryPlanError(why)
        choice = _Choice(counts, counts, budget=budget, found=found)
        if search.walked or self._walk:
            choice.path, choice.least = search.path(), search.least()
        frequencies = {key: cluster.frequency for key, cluster in clusters.items()}
        choice.file = self._store.save(
            digest, counts, budget=budget, unconstrained=unconstrained.resident, frequencies=frequencies
        )
        return choice

    def _everything(self, search: Search) -> _Choice:
        return _Choice(dict.fromkeys(search.frequency, -1), self._share(lambda: dict(search.frequency)))

    def _as_planned(self, search: Search) -> _Choice:
        requested = {part.key: part.count for part in self.request.cluster_counts}
        frequency = search.frequency
        possible = {k: frequency[k] if n < 0 else min(n, frequency[k]) for k, n in requested.items()}
        counts = self._share(lambda: possible)
        if not any(counts.values()) and any(requested.values()):
            raise MemoryPlanError(
                f"nothing of the plan {', '.join(requested)} can be computed again: it reads weights that ZeRO-3 "
                "partitions; choose clusters without weights, or use ZeRO-1 or 2"
            )
        return _Choice(requested, counts)

    def _budget(self, unconstrained: Point) -> int:
        if self.request.budget is not None:
            return self.request.budget.in_bytes(unconstrained.resident)
        free = free_memory() or machine_memory()
        return int(_SHARE * free / env.local_world_size()) if free else unconstrained.resident

    def _too_small(self, budget: int, unconstrained: Point, least: Point, node: str) -> str:
        needed = budget_for(least.resident)
        return (
            f"a training graph cannot run within the budget of {binary_size(budget)}: it needs "
            f"{binary_size(needed)} at least, with the plan "
            f"{', '.join(plan_texts(least.counts)) or 'of no recomputation'}{node} "
            f"({binary_size(unconstrained.resident)} without recomputation); set ort_zero.memory.budget to at least "
            f"{_at_least(needed)!r}, or make the batch smaller"
        )


def _kinds(names: Sequence[str]) -> dict[str, int]:
    """Return kinds by name of clusters, from their keys."""
    return {name: int(kind) for name, kind in (key.rsplit(":", 1) for key in names)}


def _at_least(size: int) -> str:
    return f"{-(-size // 2**20)}MiB"
