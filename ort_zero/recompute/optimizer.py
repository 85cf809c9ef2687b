"""Makes a training graph that computes some of its activations again: what, how much, and in which order.

::

    gradient graph -> ORT optimizes it -> ORT's table -> ORT applies all of it -> search -> what is wanted is left
        -> (bridge) -> order of execution -> prediction

The prediction is made of the very graph that will run.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import xxhash

from ort_zero import env
from ort_zero.errors import MemoryPlanError
from ort_zero.log import get_logger
from ort_zero.recompute import graph_edits, peak_memory, schedule
from ort_zero.recompute.candidates import COMPROMISE, Cluster, Entry, choose, clusters_of, copies_of, entries_of
from ort_zero.recompute.graph_model import Flow, evaluate
from ort_zero.recompute.options import ALL, AUTO, PLAN, Request, machine_memory
from ort_zero.recompute.planner import Point, Search, budget_for
from ort_zero.utils.atomic_write import write_json
from ort_zero.utils.sizes import binary_size

if TYPE_CHECKING:
    from ort_zero.compat.ortmodule import GraphInfo, Manager

FORMAT = "ort_zero.plan"
PLANNER = 3
"""Grows when the same request is to be planned anew."""
_SHARE = 0.8
"""Of the memory that is free when a budget is not given."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: one cluster."""

    cluster: str
    kind: int
    frequency: int
    saving: int
    """Bytes of all its stashed values."""
    symbolic: str
    requested: int
    """-1: all; 0: not asked for."""
    actual: int
    seconds: float
    """Estimate for all places."""
    note: str = ""


@dataclass(slots=True)
class Decision:
    """What is computed again in one graph, and what that needs."""

    mode: str
    rows: list[Row]
    plan: list[str]
    """In ORT's form."""
    unconstrained: Point
    chosen: Point
    least: Point | None = None
    budget: int | None = None
    """Bytes."""
    path: list[Point] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the named dimensions, as in the first call."""
    seconds: float = 0.0
    """That the planning took."""
    kept: str = ""
    """File of the plan."""
    found: bool = False
    """Whether it was there already."""
    predicted: peak_memory.Peak | None = None
    """Of the graph that runs."""
    measured: int | None = None
    """Bytes by which the process grew in the first step."""

    def in_words(self) -> list[tuple[str, str]]:
        """Return what is computed again and what it brings, line by line."""
        lines = [
            (f"{row.cluster} {row.actual} of {row.frequency}",
             f"-{binary_size(row.saving * row.actual / row.frequency)} of activations")
            for row in self.rows if row.actual
        ]  # fmt: skip
        needs = self.predicted.resident if self.predicted is not None else self.chosen.resident
        budget = f", budget {binary_size(self.budget)}" if self.budget is not None else ""
        peak = f"{binary_size(needs)} predicted, {binary_size(self.unconstrained.resident)} without{budget}"
        return [*lines, ("peak of a step", peak)]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "mode": self.mode,
            "plan": list(self.plan),
            "table": [dataclasses.asdict(row) for row in self.rows],
            "unconstrained_bytes": self.unconstrained.resident,
            "predicted_bytes": self.predicted.resident if self.predicted else self.chosen.resident,
            "predicted_at": self.predicted.name if self.predicted else self.chosen.at,
            "measured_bytes": self.measured,
            "least_bytes": self.least.resident if self.least else None,
            "budget_bytes": self.budget,
            "recompute_seconds": round(self.chosen.seconds, 6),
            "sizes": dict(self.sizes),
            "seconds": round(self.seconds, 3),
            "kept": self.kept,
            "found": self.found,
            "path": [[point.resident, round(point.seconds, 6), _texts(point.counts)] for point in self.path],
        }


class MemoryOptimizer:
    """Serves the training graphs of one model.

    Args:
        request: what is asked for.
        folder: where plans are kept.
        share: calls what it is given on the first rank, and returns the result on every rank; all ranks call it once
            for each graph.
        walk: let decisions for a budget hold the whole path on the first rank, also where a plan was kept.
    """

    def __init__(
        self,
        request: Request,
        folder: Path,
        share: Callable[[Callable[[], Any]], Any] = lambda make: make(),
        walk: bool = False,
    ):
        self.request = request
        self.folder = folder
        self._share = share
        self._walk = walk and env.rank() == 0
        self.decisions: list[Decision] = []
        """Of the graphs that were made, the newest last."""

    def recompute(
        self,
        manager: Manager,
        model: onnx.ModelProto,
        info: GraphInfo,
        sizes: Mapping[str, int],
        *,
        partitioned: Collection[str] = (),
        released: Collection[str] = (),
    ) -> tuple[onnx.ModelProto, Decision]:
        """Return the graph with the copies that the request asks for, and the decision.

        Args:
            manager: of the training mode.
            model: gradient graph, before the bridge.
            info: what ORT knows of it.
            sizes: of the named dimensions.
            partitioned: weights that no rank holds in whole: what reads them cannot be computed again.
            released: results that leave the graph the moment they exist.

        Raises:
            MemoryPlanError: a cluster of the plan is not in the graph, or nothing fits the budget.
        """
        started = time.perf_counter()
        agent, optimized = graph_edits.optimized(manager, model, info)
        table = manager.recomputable(agent, self.request.probe)
        del agent
        clusters = clusters_of(table | graph_edits.own_table(optimized))
        self._check_names(clusters)

        def with_copies(names: Sequence[str]) -> onnx.ModelProto:
            return graph_edits.with_copies(manager, optimized, info, names, self.request.probe) if names else optimized

        names = self._applied(clusters, lambda names: entries_of(Flow.of(with_copies(names), sizes), _kinds(names)))
        full = with_copies(names)
        flow = Flow.of(full, sizes)
        early = set(released)
        flow = dataclasses.replace(flow, results=frozenset(i for i in flow.results if flow.values[i] not in early))
        entries = entries_of(flow, _kinds(names), partitioned)
        usable = [entry for entry in entries if not entry.weights]
        # only plans that were searched for are kept
        digest = self._digest(optimized, sizes, partitioned) if self.request.mode == AUTO else ""
        decision = self._decide(flow, clusters, entries, usable, digest, sizes)
        decision.sizes = dict(sizes)
        kept = copies_of(choose(usable, dict(decision.chosen.counts)))
        decision.seconds = time.perf_counter() - started
        self.decisions.append(decision)
        return graph_edits.only_copies(full, kept), decision

    def arrange(self, model: onnx.ModelProto, sizes: Mapping[str, int], decision: Decision) -> onnx.ModelProto:
        """Return the graph in the order in which it is to run, and note in `decision` what that needs."""
        flow = Flow.of(model, sizes)
        order = schedule.order(flow)
        decision.predicted = peak_memory.peak(flow.in_order(order))
        return graph_edits.ordered(model, order)

    # -- decide ----------------------------------------------------------------------------------------------------

    def _applied(self, clusters: Mapping[str, Cluster], entries: Callable[[Sequence[str]], list[Entry]]) -> list[str]:
        """Return the clusters that ORT is to apply: where a place has two kinds, ORT would take the full one."""
        compromises = [key for key, cluster in clusters.items() if cluster.kind == COMPROMISE]
        full = [key for key in clusters if key not in compromises]
        if self.request.mode == PLAN:
            asked = [item.key for item in self.request.items]
            return asked if set(asked) & set(compromises) else full
        if self.request.level != COMPROMISE or not compromises:
            return full
        stashed = {value for entry in entries(compromises) for value in entry.values}
        replaced = {entry.cluster for entry in entries(full) if stashed.intersection(entry.values)}
        return compromises + [key for key in full if key not in replaced]

    def _check_names(self, clusters: Mapping[str, Cluster]) -> None:
        for item in self.request.items:
            if item.key in clusters:
                continue
            near = difflib.get_close_matches(item.key, clusters, n=1, cutoff=0.3)
            have = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(clusters) or 'none'}"
            where = f" of {self.request.source}" if self.request.source else ""
            raise MemoryPlanError(
                f"the plan{where} asks for cluster {item.key!r}, which this model does not have; {have} "
                '(ort-zero memory plan prints the table; "recompute": "auto" finds a plan)'
            )

    def _decide(
        self,
        flow: Flow,
        clusters: Mapping[str, Cluster],
        entries: Sequence[Entry],
        usable: Sequence[Entry],
        digest: str,
        sizes: Mapping[str, int],
    ) -> Decision:
        search = Search(flow, usable, shown=env.rank() == 0)
        unconstrained = search.point({})
        budget = self._budget(unconstrained) if self.request.mode == AUTO else None
        frequency = search.frequency
        least, path, found, kept = None, [], False, ""
        if self.request.mode == AUTO:

            def plan() -> tuple[dict[str, int] | None, bool, str]:
                mine = self._load(digest)
                if mine is not None:
                    return mine, True, ""
                fit = search.fit(budget)
                if fit is None:
                    return None, False, self._too_small(budget, unconstrained, search.least())
                return dict(fit.counts), False, ""

            counts, found, why = self._share(plan)
            if counts is None:
                raise MemoryPlanError(why)
            if search.walked or self._walk:
                path, least = search.path(), search.least()
            kept = self._keep(digest, counts, budget, unconstrained, clusters)
            requested = counts
        elif self.request.mode == ALL:
            requested = dict.fromkeys(frequency, -1)
            counts = self._share(lambda: dict(frequency))
        else:
            requested = {item.key: item.count for item in self.request.items}
            possible = {k: frequency[k] if n < 0 else min(n, frequency[k]) for k, n in requested.items()}
            counts = self._share(lambda: possible)
            if not any(counts.values()) and any(requested.values()):
                raise MemoryPlanError(
                    f"nothing of the plan {', '.join(requested)} can be computed again: it reads weights that ZeRO-3 "
                    "partitions; choose clusters without weights, or use ZeRO-1 or 2"
                )
        rows = _rows(clusters, entries, usable, requested, counts, sizes)
        plan = [f"{key}:{count}" for key, count in counts.items() if count]
        point = search.point(counts)
        return Decision(
            self.request.mode, rows, plan, unconstrained, point, least, budget, path, kept=kept, found=found
        )

    def _budget(self, unconstrained: Point) -> int:
        if self.request.budget is not None:
            return self.request.budget.bytes(unconstrained.resident)
        free = _free_memory() or machine_memory()
        return int(_SHARE * free / env.local_world_size()) if free else unconstrained.resident

    def _too_small(self, budget: int, unconstrained: Point, least: Point) -> str:
        needed = budget_for(least.resident)
        return (
            f"a training graph cannot run within the budget of {binary_size(budget)}: it needs "
            f"{binary_size(needed)} at least, with the plan "
            f"{', '.join(_texts(least.counts)) or 'of no recomputation'} "
            f"({binary_size(unconstrained.resident)} without recomputation); set ort_zero.memory.budget to at least "
            f"{_at_least(needed)!r}, or make the batch smaller"
        )

    # -- plans that are kept ---------------------------------------------------------------------------------------

    def _digest(self, model: onnx.ModelProto, sizes: Mapping[str, int], partitioned: Collection[str]) -> str:
        asked = self.request.budget
        budget = [asked.size, asked.relative] if asked is not None else None
        wanted = [str(self.request), budget, self.request.level]
        about = [*wanted, sorted(sizes.items()), sorted(partitioned), FORMAT, PLANNER]
        data = model.SerializeToString(deterministic=True) + json.dumps(about).encode()
        return xxhash.xxh3_128_hexdigest(data)

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.plan.json"

    def _load(self, digest: str) -> dict[str, int] | None:
        try:
            content = json.loads(self._file(digest).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                return None
            return {key: int(count) for key, count in content["counts"].items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None

    def _keep(
        self,
        digest: str,
        counts: Mapping[str, int],
        budget: int | None,
        unconstrained: Point,
        clusters: Mapping[str, Cluster],
    ) -> str:
        file = self._file(digest)
        if env.rank() != 0 or file.exists():
            return str(file) if file.exists() else ""
        content = {
            "format": FORMAT,
            "counts": dict(counts),
            "budget_bytes": budget,
            "unconstrained_bytes": unconstrained.resident,
            "clusters": {key: c.frequency for key, c in clusters.items()},
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(file, content, indent=1)
        except OSError as error:
            get_logger().warning("the memory plan cannot be kept in %s: %s", self.folder, error)
            return ""
        return str(file)


def _kinds(names: Sequence[str]) -> dict[str, int]:
    """Return kinds by name of clusters, from their keys."""
    return {name: int(kind) for name, kind in (key.rsplit(":", 1) for key in names)}


def _rows(
    clusters: Mapping[str, Cluster],
    entries: Sequence[Entry],
    usable: Sequence[Entry],
    requested: Mapping[str, int],
    counts: Mapping[str, int],
    sizes: Mapping[str, int],
) -> list[Row]:
    free = Counter(entry.cluster for entry in usable)
    rows = []
    for key, cluster in clusters.items():
        mine = [entry for entry in entries if entry.cluster == key]
        note = ""
        if free[key] < len(mine):
            note = f"{len(mine) - free[key]} read weights that ZeRO-3 partitions"
        rows.append(
            Row(
                cluster.name,
                cluster.kind,
                len(mine) or cluster.frequency,
                # of what was not applied ORT's word has to do
                sum(entry.saving for entry in mine) if mine else evaluate(cluster.symbolic, sizes) or 0,
                shortened_symbolic(cluster.symbolic),
                requested.get(key, 0),
                counts.get(key, 0),
                sum(entry.seconds for entry in mine),
                note,
            )
        )
    return sorted(rows, key=lambda row: (-row.saving, row.cluster))


def shortened_symbolic(text: str) -> str:
    """Return ORT's sum of savings with equal terms counted: ``"8 x (batch*seq*2048) * 4"``."""
    count = Counter(_plain(term) for term in _terms(text))
    return " + ".join(f"{n} x {term}" if n > 1 else term for term, n in count.items() if term != "0")


def _terms(text: str) -> list[str]:
    """Return the terms of a sum, however many brackets are around it and around its parts."""
    text = text.strip()
    while text.startswith("(") and _encloses(text):
        text = text[1:-1].strip()
    found, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            found.append(text[start:i])
            start = i + 1
    if not found:
        return [text]
    return [term for part in (*found, text[start:]) for term in _terms(part)]


def _plain(term: str) -> str:
    """Return a product without ORT's inner brackets and its factor of 1."""
    flat = term.replace("* 1.000000", "").strip()
    return flat.replace(")*(", "*").replace("((", "(").replace("))", ")").strip()


def _encloses(text: str) -> bool:
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth and i < len(text) - 1:
            return False
    return True


def _texts(counts: Sequence[tuple[str, int]]) -> list[str]:
    return [f"{key}:{count}" for key, count in counts]


def _at_least(size: int) -> str:
    return f"{-(-size // 2**20)}MiB"


def _free_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # not on Linux
        pass
    return 0
