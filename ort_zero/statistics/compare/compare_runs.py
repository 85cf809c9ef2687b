"""Compares two runs step by step and names the first record that differs for a reason of its own.

Runs are streamed: of each rank one step is in memory at a time, besides the numbers of a dozen steps for the report.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.align import Layout, Pairs, check_references, layout_of, pair, same_layout
from ort_zero.statistics.compare.comparison import KINDS, Comparison, Difference, Series, Verdict
from ort_zero.statistics.compare.dataflow import Lineage, inherit, lineage_of
from ort_zero.statistics.compare.distance import KIND_NAMES, SAME, distances
from ort_zero.statistics.compare.error_growth import Before, Drift, drift_of, remember
from ort_zero.statistics.compare.first_divergence import (
    Findings,
    Row,
    decide,
    decide_update,
    difference_of,
    same_verdict,
)
from ort_zero.statistics.compare.tolerance import (
    EPSILON,
    REFERENCE,
    Conditions,
    Limits,
    conditions_of,
    epsilons,
    floor_of,
    limits_of,
)
from ort_zero.statistics.file_format import Table
from ort_zero.statistics.naming import call_name, listed, tensor_name
from ort_zero.statistics.reader import Run, open_run
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import COLUMNS, SKETCH_COLUMNS, WIDTH, merge
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

MOST_DIFFERENCES = 1000
MOST_STEPS = 12
"""Steps whose errors are kept for the report; three places are for the verdict's step and its neighbours."""
APART = 4 * EPSILON["float32"]
"""Relative difference of parameters from which they count as trained apart: parts of ranks are added with rounding."""
VANISHING = 1e3
"""Condition of gradients that are nothing but rounding errors, such as of the bias of attention's keys: even a
tolerance given as a number is relative to what they are sums of."""


def compare(
    a: str, b: str, *, rtol: float | Literal["auto"] = "auto", reference: str | None = None, progress: bool = False
) -> Comparison:
    """Return how two runs differ, and the first divergence.

    Args:
        a: folder of the run that is right.
        b: folder of the other one.
        rtol: relative error that counts as a difference; ``"auto"``: what rounding, in the runs' dtype and magnified by
            what was computed, does not explain.
        reference: folder of a second run of `a`: what differs between these two is noise.
        progress: show a bar.

    Raises:
        StatisticsError: the runs cannot be compared.
    """
    if rtol != "auto" and not 0 <= rtol < float("inf"):
        raise StatisticsError(f'rtol is {rtol}: give a number from 0 on, or "auto"')
    runs = [open_run(path) for path in (a, b, *([reference] if reference is not None else []))]
    return compare_runs(*runs, rtol=rtol, progress=progress)


def compare_runs(
    a: Run, b: Run, reference: Run | None = None, *, rtol: float | Literal["auto"] = "auto", progress: bool = False
) -> Comparison:
    """Return how two open runs differ; the arguments are those of :func:`compare`."""
    steps = _check(a, b)
    notes = [*a.notes, *b.notes, *_notes_on(a, b, steps)]
    if reference is not None:
        notes += _check_reference(a, reference, steps)
    ranks = sorted(set(a.ranks) & set(b.ranks))
    work = _Work(
        rtol=None if rtol == "auto" else float(rtol),
        steps=steps,
        pairings=[_Pairing(rank, a.info.dtype != b.info.dtype) for rank in ranks],
    )
    for step, tables in _side_by_side([a, b, *([reference] if reference is not None else [])], ranks, steps, progress):
        work.add(step, tables)
    return work.result(a, b, str(rtol), notes)


# --- are they comparable -------------------------------------------------------------------------------------------


def _check(a: Run, b: Run) -> tuple[int, ...]:
    """Return the steps that both runs have.

    Raises:
        StatisticsError: there is nothing to compare.
    """
    one, two = a.info, b.info
    if a.model_digest != b.model_digest:
        raise StatisticsError(
            f"{one.path} and {two.path} are runs of different models: {_model_difference(a, b)}; collect both with one "
            "model"
        )
    if one.world_size != two.world_size:
        raise StatisticsError(
            f"{one.path} is a run of {one.world_size} ranks, {two.path} one of {two.world_size}: each rank sees data "
            "of its own, collect both with the same number of ranks"
        )
    if not set(a.ranks) & set(b.ranks):
        raise StatisticsError(
            f"{one.path} has ranks {listed(a.ranks)}, {two.path} {listed(b.ranks)}: put the same ranks into both"
        )
    for info in (one, two):
        if not info.steps:
            raise StatisticsError(f"{info.path} has no full step that every rank has: collect it again")
    steps = sorted(set(one.steps) & set(two.steps))
    if not steps:
        raise StatisticsError(
            f"{one.path} and {two.path} have no step in common ({listed(one.steps)} and {listed(two.steps)}): "
            "collect the same steps, start_step and end_step say which"
        )
    return tuple(steps)


def _model_difference(a: Run, b: Run) -> str:
    shapes_a, shapes_b = getattr(a, "parameters", None) or {}, getattr(b, "parameters", None) or {}
    only_a = [name for name in shapes_a if name not in shapes_b]
    only_b = [name for name in shapes_b if name not in shapes_a]
    other = [name for name in shapes_a if name in shapes_b and tuple(shapes_a[name]) != tuple(shapes_b[name])]
    parts = []
    for names, text in ((only_a, "only the first has"), (only_b, "only the second has")):
        if names:
            parts.append(f"{text} {shortened(names)}")
    if other:
        parts.append(shortened([f"{name} is {tuple(shapes_a[name])} and {tuple(shapes_b[name])}" for name in other]))
    if not parts:
        return f"{a.info.model} and {b.info.model}" if a.info.model != b.info.model else "their modules differ"
    return "; ".join(parts)


def _notes_on(a: Run, b: Run, steps: Sequence[int]) -> list[str]:
    notes = []
    for run, other in ((a, b), (b, a)):
        rest = sorted(set(run.info.steps) - set(steps))
        if rest:
            notes.append(f"steps that only {run.info.path} has are left out: {listed(rest)}")
        ranks = sorted(set(run.ranks) - set(other.ranks))
        if ranks:
            notes.append(f"ranks that only {run.info.path} has are left out: {listed(ranks)}")
    if a.info.dtype != b.info.dtype:
        notes.append(f"the runs have different dtypes, {a.info.dtype} and {b.info.dtype}: the coarser one counts")
    return notes


def _check_reference(a: Run, reference: Run, steps: Sequence[int]) -> list[str]:
    _check(a, reference)
    rest = sorted(set(steps) - set(reference.info.steps))
    if rest:
        return [f"the reference {reference.info.path} lacks steps {listed(rest)}: there the widest spread counts"]
    return []


# --- reading -------------------------------------------------------------------------------------------------------


def _side_by_side(
    runs: Sequence[Run], ranks: Sequence[int], steps: Sequence[int], progress: bool
) -> Iterator[tuple[int, list[list[Table | None]]]]:
    """Yield each step with the tables of each rank, those of the runs side by side; None where a reference lacks it."""
    readers = [[_Reader(run, rank) for run in runs] for rank in ranks]
    with bar(len(steps), "comparing", "step", shown=progress) as shown:
        for step in steps:
            tables = [[reader.take(step) for reader in of_rank] for of_rank in readers]
            yield step, _gathered(tables)
            shown.update()


class _Reader:
    """Reads one rank of one run, forward only."""

    def __init__(self, run: Run, rank: int):
        self._tables = iter(run.tables(rank))
        self._name = f"{run.info.path}, rank {rank}"
        self._next: Table | None = None
        self._checked: Table | None = None

    def take(self, step: int) -> Table | None:
        """Return the table of a step, None if there is none."""
        while self._next is None or self._next.step < step:
            self._next = next(self._tables, None)
            if self._next is None:
                return None
        if self._next.step > step:
            return None
        table = self._next
        if self._checked is None or not same_layout(self._checked, table):
            check_references(table, self._name)
            self._checked = table
        return table


def _gathered(tables: list[list[Table | None]]) -> list[list[Table | None]]:
    """Return the tables with the parts of partitioned tensors added up over the ranks."""
    by_run = list(zip(*tables))
    gathered = [_gather(list(of_run)) for of_run in by_run]
    return [list(of_rank) for of_rank in zip(*gathered)]


def _gather(of_ranks: list[Table | None]) -> list[Table | None]:
    tables = [table for table in of_ranks if table is not None]
    if len(tables) != len(of_ranks) or not any(table.partitioned.any() for table in tables):
        return of_ranks
    rows = [np.flatnonzero(table.partitioned) for table in tables]
    keys = [[_part_key(table, row) for row in at.tolist()] for table, at in zip(tables, rows)]
    number = {key: i for i, key in enumerate(dict.fromkeys(key for of_table in keys for key in of_table))}
    parts = np.zeros((len(tables), len(number), WIDTH))
    places = [np.array([number[key] for key in of_table], np.int64) for of_table in keys]
    for part, table, at, place in zip(parts, tables, rows, places):
        part[place] = table.raw(at)
    whole = merge(parts)
    return [_replaced(table, at, whole[place]) for table, at, place in zip(tables, rows, places)]


def _part_key(table: Table, row: int) -> tuple:
    return int(table.phase[row]), table.module[row], int(table.occurrence[row]), table.kind[row], table.slot[row]


def _replaced(table: Table, at: np.ndarray, raw: np.ndarray) -> Table:
    """Return a table with other statistics in some rows; the first values stay those that this rank has."""
    numbers = {**dict(zip(COLUMNS, raw.T)), "sketch": raw[:, SKETCH_COLUMNS]}
    columns = {name: getattr(table, name).copy() for name in numbers}
    for name, values in numbers.items():
        columns[name][at] = values
    return dataclasses.replace(table, **columns)


# --- the work ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Structure:
    """What is the same in steps that differ in numbers alone."""

    pairs: Pairs
    lineage: Lineage
    limits: Limits
    floor: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    """A step of a rank, with what it takes to tell later on which records differ."""

    findings: Findings
    structure: _Structure
    conditions: Conditions
    floor: np.ndarray
    drift: Drift

    def plain_tolerance(self, drift: float) -> np.ndarray:
        """Return the tolerance of a record of two runs that have not diverged, parameters apart by `drift`."""
        return self.conditions.tolerance(self.floor, np.full(len(self.floor), drift))


class _Pairing:
    """Pairs the tables of one rank; the structure is made anew when it changes."""

    def __init__(self, rank: int, other_dtype: bool):
        self.rank = rank
        self._other_dtype = other_dtype
        self._layouts: list[Layout | None] = [None, None, None]
        self._structure: _Structure | None = None
        self._spread_pairs: Pairs | None = None
        self._widest: np.ndarray | None = None
        self.before: Before | None = None

    def judge(self, tables: Sequence[Table | None], rtol: float | None) -> _Judged:
        """Return the findings on one step."""
        a, b = tables[0], tables[1]
        assert a is not None and b is not None
        structure = self._structure_of(a, b)
        pairs, lineage = structure.pairs, structure.lineage
        found = distances(pairs, a, b)
        spread = self._spread(tables[2] if len(tables) > 2 else None, a, pairs)
        first = a.step == 0
        drift = drift_of(lineage, found, a, b, self.before)
        errors = np.maximum(found.error, spread)
        inherited = inherit(lineage, errors, found.kind != SAME, drift.frame)
        floor = np.maximum(structure.floor, REFERENCE * spread)
        conditions = conditions_of(lineage, structure.limits, a, b, drift.total > APART)
        limit = np.maximum(conditions.tolerance(floor, inherited), REFERENCE * spread)
        norm_limit = np.maximum(conditions.norm_tolerance(inherited), REFERENCE * spread)
        if rtol is not None:
            nothing = (pairs.phase == Phase.PARAMETER_GRADIENT) & (conditions.condition > VANISHING)
            limit = rtol * np.where(nothing, conditions.condition, 1.0)
        findings = Findings(
            step=a.step, rank=self.rank, pairs=pairs, a=a, b=b, found=found, inherited=inherited, limit=limit,
            norm_limit=norm_limit, first=first,
        )  # fmt: skip
        return _Judged(findings, structure, conditions, floor, drift)

    def remember(self, judged: _Judged) -> None:
        """Keep what the next step needs of this one."""
        found = judged.findings
        self.before = remember(found.step, found.pairs, found.found, found.a, found.b, judged.drift.unseen)

    def _structure_of(self, a: Table, b: Table) -> _Structure:
        if self._refresh(0, a) | self._refresh(1, b) or self._structure is None:
            one, two = self._layouts[0], self._layouts[1]
            assert one is not None and two is not None
            pairs = pair(one, two)
            lineage = lineage_of(pairs)
            limits = limits_of(lineage, self._other_dtype)
            self._structure = _Structure(pairs, lineage, limits, floor_of(limits))
            self._spread_pairs = self._widest = None
        return self._structure

    def _refresh(self, place: int, table: Table) -> bool:
        layout = self._layouts[place]
        if layout is not None and same_layout(layout.table, table):
            return False
        self._layouts[place] = layout_of(table)
        return True

    def _spread(self, reference: Table | None, a: Table, pairs: Pairs) -> np.ndarray:
        """Return how far two runs of the reference are apart, for each pair."""
        widest = self._widest if self._widest is not None else np.zeros(len(pairs))
        if reference is None:
            return widest
        if self._refresh(2, reference) or self._spread_pairs is None:
            one, two = self._layouts[0], self._layouts[2]
            assert one is not None and two is not None
            self._spread_pairs = pair(one, two)
        found = distances(self._spread_pairs, a, reference)
        of_row = np.zeros(len(a.phase))
        of_row[self._spread_pairs.row_a] = found.error
        spread = of_row[pairs.row_a]
        self._widest = np.maximum(widest, spread)
        return spread


@dataclass(slots=True)
class _Work:
    """What is gathered while the steps go by."""

    rtol: float | None
    steps: tuple[int, ...]
    pairings: list[_Pairing]
    verdict: Verdict | None = None
    place: int = -1
    drift: float = 0.0
    """Of the parameters as the runs diverged: what comes later is their consequence."""
    records: int = 0
    counts: Counter = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    noted: dict[str, str] = field(default_factory=dict)
    series: dict[int, list[Series]] = field(default_factory=dict)
    planned: frozenset[int] = frozenset()
    last: tuple[int, list[_Judged]] | None = None

    def __post_init__(self) -> None:
        room = MOST_STEPS - 3
        places = np.linspace(0, len(self.steps) - 1, min(len(self.steps), room)).round().astype(int)
        self.planned = frozenset(self.steps if len(self.steps) <= MOST_STEPS else [self.steps[i] for i in places])

    def add(self, step: int, tables: list[list[Table | None]]) -> None:
        """Take in one step of all ranks."""
        judged = [pairing.judge(of_rank, self.rtol) for pairing, of_rank in zip(self.pairings, tables)]
        had_verdict = self.verdict is not None
        if not had_verdict:
            self._decide(judged)
        for one in judged:
            self._count(one, 0 if had_verdict else self.place)
        self._keep_series(step, judged, had_verdict)
        for pairing, one in zip(self.pairings, judged):
            pairing.remember(one)
        self.last = (step, [_slim(one) for one in judged])

    def _decide(self, judged: list[_Judged]) -> None:
        decision = None
        if self.rtol is None:
            for pairing, one in zip(self.pairings, judged):
                decision = decision or decide_update(
                    pairing.before, one.findings, _epsilon_of_pairs(one.findings.pairs)
                )
        decision = decision or decide([one.findings for one in judged], self.rtol)
        if decision:
            self.verdict, self.place = decision
            self.drift = judged[0].drift.total if not judged[0].findings.first else 0.0

    def _count(self, judged: _Judged, begin: int) -> None:
        findings = judged.findings
        pairs, found = findings.pairs, findings.found
        self.records += len(pairs)
        self._count_structure(judged)
        if self.verdict is None:
            return
        over = self._over(judged)
        over[:begin] = False
        tolerance = self._tolerance(judged)
        findings = _slim(judged).findings
        for place in np.flatnonzero(over).tolist():
            self.counts[KIND_NAMES[found.kind[place]]] += 1
            if len(self.differences) < MOST_DIFFERENCES:
                self.differences.append(difference_of(findings, place, float(tolerance[place])))

    def _over(self, judged: _Judged) -> np.ndarray:
        findings = judged.findings
        over = (findings.found.error > self._tolerance(judged)) & (findings.found.kind != SAME)
        if self.verdict is not None and self.verdict.difference is not None:
            accused = self.verdict.difference
            if (accused.step, accused.rank) == (findings.step, findings.rank):
                over[self.place] = True
        return over

    def _tolerance(self, judged: _Judged) -> np.ndarray:
        if self.rtol is not None:
            return judged.findings.limit
        return judged.plain_tolerance(self.drift if self.verdict is not None else judged.drift.total)

    def _count_structure(self, judged: _Judged) -> None:
        findings, pairs = judged.findings, judged.findings.pairs
        where = f"step {findings.step}, rank {findings.rank}"
        for kind, layout, lone, text in (
            ("missing", pairs.a, pairs.missing, "only the first run has"),
            ("extra", pairs.b, pairs.extra, "only the second run has"),
        ):
            rows = [row for row in lone.tolist() if not _is_nothing(layout.table, row)]
            self._note(kind, len(rows), f"{text} {{}} ({where})", [_named(layout.table, row) for row in rows])
        rows_a = pairs.row_a[pairs.reordered].tolist()
        names = [_named(pairs.a.table, row) for row in rows_a]
        self._note("reordered", len(rows_a), f"in another order: {{}} ({where})", names)
        dtypes = np.flatnonzero(findings.found.dtype)
        names = [
            f"{_named(pairs.a.table, int(pairs.row_a[i]))} ({findings.a.dtype[pairs.row_a[i]]} and "
            f"{findings.b.dtype[pairs.row_b[i]]})"
            for i in dtypes[:3].tolist()
        ]
        self._note("dtype", len(dtypes), f"in another dtype: {{}} ({where})", names)
        sampled = np.flatnonzero(findings.found.sampled)
        if len(sampled):
            names = [_named(pairs.a.table, int(pairs.row_a[i])) for i in sampled[:3].tolist()]
            self.noted.setdefault("sampled", f"not compared, sampled differently: {', '.join(names)} ({where})")
        if not (pairs.phase == Phase.PARAMETER).any() and findings.step and self.rtol is None:
            self.noted.setdefault(
                "parameters",
                "parameters were not collected: after step 0 only what differs by far more than drifting parameters "
                "could is noticed",
            )

    def _note(self, kind: str, count: int, text: str, names: list[str]) -> None:
        if not count:
            return
        self.counts[kind] += count
        self.noted.setdefault(kind, text.format(shortened(names, count=count)))

    # --- series ----------------------------------------------------------------------------------------------------

    def _keep_series(self, step: int, judged: list[_Judged], had_verdict: bool) -> None:
        fresh = self.verdict is not None and not had_verdict
        if fresh and self.last is not None:
            self._make_series(*self.last)
        follows = (
            had_verdict
            and self.verdict is not None
            and self.verdict.difference is not None
            and self.last is not None
            and self.last[0] == self.verdict.difference.step
        )
        if step in self.planned or fresh or follows:
            self._make_series(step, judged)

    def _make_series(self, step: int, judged: list[_Judged]) -> None:
        if step in self.series:
            return
        self.series[step] = [series for one in judged for series in self._series_of(_slim(one))]

    def _series_of(self, judged: _Judged) -> Iterator[Series]:
        findings, pairs = judged.findings, judged.findings.pairs
        over = self._over(judged) if self.verdict is not None else np.zeros(len(pairs), bool)
        if self.verdict is not None and findings.step == self.verdict.difference.step:
            over[: self.place] = False
        elif self.verdict is not None and findings.step < self.verdict.difference.step:
            over[:] = False
        tolerance = self._tolerance(judged)
        names = _module_names(pairs)
        for phase in Phase:
            places = np.flatnonzero((pairs.phase == phase) & pairs.comparable)
            if len(places):
                yield _one_series(findings, phase, places, tolerance, over, names)

    # --- the end ---------------------------------------------------------------------------------------------------

    def result(self, a: Run, b: Run, rtol: str, notes: list[str]) -> Comparison:
        """Return the comparison."""
        verdict = self.verdict or same_verdict(self.steps, self.records)
        first = verdict.difference.step if verdict.difference else self.steps[0]
        around = sorted(self.series, key=lambda step: (abs(self.steps.index(step) - self.steps.index(first)) > 1, step))
        return Comparison(
            a=a.info,
            b=b.info,
            rtol=rtol,
            verdict=verdict,
            steps=self.steps,
            records=self.records,
            counts={kind: self.counts[kind] for kind in KINDS if self.counts[kind]},
            differences=self.differences,
            notes=[*notes, *self.noted.values()],
            series=[series for step in around for series in self.series[step]],
        )


def _one_series(
    findings: Findings, phase: Phase, places: np.ndarray, tolerance: np.ndarray, over: np.ndarray, names: list[str]
) -> Series:
    pairs, found = findings.pairs, findings.found
    table = pairs.a.table
    rows = pairs.row_a[places].tolist()
    return Series(
        step=findings.step,
        rank=findings.rank,
        phase=phase,
        modules=[names[place] for place in places.tolist()],
        tensors=[tensor_name(table.kind[row], table.slot[row]) for row in rows],
        errors=found.error[places].tolist(),
        tolerances=tolerance[places].tolist(),
        kinds=[KIND_NAMES[kind] if is_over else "" for kind, is_over in zip(found.kind[places], over[places])],
        a=[Row(findings.a, row, m) for row, m in zip(rows, pairs.measured_a[places].tolist())],
        b=[Row(findings.b, r, m) for r, m in zip(pairs.row_b[places].tolist(), pairs.measured_b[places].tolist())],
    )


def _module_names(pairs: Pairs) -> list[str]:
    table = pairs.a.table
    rows = pairs.row_a.tolist()
    several = {table.module[row] for row in rows if table.occurrence[row] > 1}
    return [
        call_name(table.module[row], table.occurrence[row]) if table.module[row] in several else table.module[row]
        for row in rows
    ]


def _epsilon_of_pairs(pairs: Pairs) -> np.ndarray:
    both = [epsilons(pairs.a.table.dtype)[pairs.row_a], epsilons(pairs.b.table.dtype)[pairs.row_b]]
    return np.maximum(*both)


def _slim(judged: _Judged) -> _Judged:
    """Return the same without sketches, which are most of the memory."""
    findings = judged.findings
    empty = np.zeros((0, 0))
    slim = [dataclasses.replace(table, sketch=empty) for table in (findings.a, findings.b)]
    return dataclasses.replace(judged, findings=dataclasses.replace(findings, a=slim[0], b=slim[1]))


def _named(table: Table, row: int) -> str:
    name = ".".join(filter(None, (table.module[row], tensor_name(table.kind[row], table.slot[row]))))
    return f"the gradient of {name}" if table.phase[row] >= Phase.BACKWARD else name


def _is_nothing(table: Table, row: int) -> bool:
    """Return True for a gradient of zeros: no gradient is the same."""
    gradient = table.phase[row] >= Phase.BACKWARD and table.source[row] < 0
    return bool(gradient and table.l2[row] == 0 and table.nan[row] == 0 and table.inf[row] == 0)
