"""Compare two runs step by step, and name the first record whose error does not come from its inputs.

Runs are streamed: one step of each rank is in memory at a time, and a few steps without sketches for the report.
:mod:`.side_by_side` reads a step, and :mod:`.rank_comparison` compares it. The resulting
:class:`~.step.StepComparison` goes to :mod:`.first_divergence`. From then on its tolerances tell the records
that differ: in the counts, the text, the JSON and the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.beginnings import beginnings_of, other_batch
from ort_zero.statistics.compare.comparison import KINDS, ComparedRecord, Comparison, FirstDivergence
from ort_zero.statistics.compare.first_divergence import find_divergence, find_update_divergence
from ort_zero.statistics.compare.rank_comparison import RankComparison
from ort_zero.statistics.compare.side_by_side import side_by_side, whole_batches
from ort_zero.statistics.compare.step import KIND_NAMES, StepComparison, StepRecords
from ort_zero.statistics.files import Run, open_run
from ort_zero.statistics.naming import number_list, span, tensor_name
from ort_zero.statistics.records import Phase, Table
from ort_zero.utils.text import shortened

MAX_DIFFERENCES = 1000
FIRST_STEPS = 3
"""Number of first steps that the report shows, besides the step of the first divergence and its neighbours."""

_WITHOUT_PARAMETERS = (
    "parameters were not collected: after step 0, only errors much larger than slightly different parameters cause are "
    "found"
)


def compare(a: str, b: str, *, rtol: float | Literal["auto"] = "auto", progress: bool = False) -> Comparison:
    """Compare two runs: count their differences and find the first divergence.

    Args:
        a: folder of the correct run.
        b: folder of the run to check.
        rtol: relative error from which a record differs; ``"auto"``: errors larger than rounding in the runs' dtype
            can explain at this point of the model.
        progress: show a progress bar.

    Raises:
        StatisticsError: the runs cannot be compared.
    """
    if rtol != "auto" and not 0 <= rtol < float("inf"):
        raise StatisticsError(f'rtol is {rtol}: give a number from 0 on, or "auto"')
    return compare_runs(open_run(a), open_run(b), rtol=rtol, progress=progress)


def compare_runs(a: Run, b: Run, *, rtol: float | Literal["auto"] = "auto", progress: bool = False) -> Comparison:
    """Compare two open runs; for the arguments see :func:`compare`."""
    steps = common_steps(a, b)
    notes = [*a.notes, *b.notes, *notes_on_runs(a, b, steps)]
    together = a.info.world_size != b.info.world_size
    if together:
        notes.append(
            f"the runs have {a.info.world_size} and {b.info.world_size} ranks: parameters, and their gradients "
            "averaged over the ranks, are compared"
        )
    tolerance = None if rtol == "auto" else float(rtol)
    numbers = (0,) if together else a.ranks
    ranks = [RankComparison(number, a.info.dtype != b.info.dtype, tolerance) for number in numbers]
    result = _Result(tolerance, steps)
    first: tuple[Table, Table] | None = None
    other_batches: int | None = None
    for of_runs in side_by_side((a, b), steps, progress):
        tables = whole_batches(of_runs) if together else of_runs
        one, two = tables[0][0], tables[1][0]
        first = first or (one, two)
        if other_batches is None and other_batch(one, two):
            other_batches = one.step
        result.add([rank.compare(*of_rank) for rank, of_rank in zip(ranks, zip(*tables))], ranks)
    assert first is not None, "the runs have a step in common"
    return result.comparison(a, b, str(rtol), notes, beginnings_of(a, b, first, other_batches))


class _Result:
    """The result of a comparison, gathered step by step; an `rtol` of None is auto."""

    def __init__(self, rtol: float | None, steps: tuple[int, ...]):
        self.rtol, self.steps = rtol, steps
        self.divergence: FirstDivergence | None = None
        self.first: ComparedRecord | None = None
        """The record of the first divergence."""
        self.pair = -1
        """Number of the pair of this record in its step; -1 before."""
        self.parameter_error = 0.0
        """Relative error of the parameters when the runs diverged; a larger error later is a consequence."""
        self.records = 0
        self.counts: Counter[str] = Counter()
        self.differences: list[ComparedRecord] = []
        self.notes: dict[str, str] = {}
        """The first note of each kind."""
        self.series: dict[int, list[StepRecords]] = {}
        """The records of a step, by the index of the step."""

    def add(self, compared: list[StepComparison], ranks: list[RankComparison]) -> None:
        """Add the comparison of one step on all ranks."""
        if self.divergence is None:
            self._look_for_divergence(compared, ranks)
        for rank, one in zip(ranks, compared):
            rank.previous = one
        settled = [self._settled(one) for one in compared]
        for one in settled:
            self._count(one)
        self._keep_series(settled)

    def _look_for_divergence(self, compared: list[StepComparison], ranks: list[RankComparison]) -> None:
        divergence = None
        if self.rtol is None:
            for rank, one in zip(ranks, compared):
                divergence = divergence or find_update_divergence(rank.previous, one)
        divergence = divergence or find_divergence(compared, self.rtol)
        if divergence:
            self.divergence, self.pair = divergence
            self.first = self.divergence.difference
            self.parameter_error = compared[0].parameter_error if not compared[0].is_first else 0.0

    def _settled(self, step: StepComparison) -> StepComparison:
        """Return a comparison without sketches whose tolerances alone tell the records that differ.

        Up to the first divergence no record differs: an error that :mod:`.first_divergence` excuses is tolerated. Later
        records inherit the divergence. Their tolerance is that of runs whose parameters differ as before.
        """
        tolerance = np.maximum(step.tolerance, step.error)
        if self.first is not None:
            begin = self.pair if step.step == self.first.step else 0
            later = step.tolerance
            if self.rtol is None:
                later = step.tolerance_for(np.full(len(later), self.parameter_error))
            tolerance[begin:] = later[begin:]
            if (step.step, step.rank) == (self.first.step, self.first.rank):
                tolerance[self.pair] = self.first.tolerance
        return step.without_sketches().with_tolerance(slice(None), tolerance)

    def _count(self, step: StepComparison) -> None:
        self.records += len(step.pairs)
        for kind, words, names in _other_structure(step):
            if names:
                self.counts[kind] += len(names)
                self.notes.setdefault(kind, f"{words} {shortened(names)} (step {step.step}, rank {step.rank})")
        if self.rtol is None and step.step and not (step.pairs.phase == Phase.PARAMETER).any():
            self.notes.setdefault("parameters", _WITHOUT_PARAMETERS)
        for number in np.flatnonzero(step.error > step.tolerance).tolist():
            self.counts[KIND_NAMES[step.difference[number]]] += 1
            if len(self.differences) < MAX_DIFFERENCES:
                self.differences.append(step.record(number))

    def _keep_series(self, settled: list[StepComparison]) -> None:
        """Keep the first steps, and the step of the first divergence with its neighbours; before it, the last two."""
        now = self.steps.index(settled[0].step)
        first = now if self.first is None else self.steps.index(self.first.step)
        self.series[now] = [StepRecords(one) for one in settled]
        self.series = {at: kept for at, kept in self.series.items() if at < FIRST_STEPS or abs(at - first) <= 1}

    def comparison(self, a: Run, b: Run, rtol: str, notes: list[str], beginnings: list[str]) -> Comparison:
        """Return the comparison of all added steps."""
        same = f"same: {self.records:,} records of {span(self.steps)} agree"
        first = self.steps.index(self.first.step) if self.first else 0
        around = sorted(self.series, key=lambda at: (abs(at - first) > 1, at))
        return Comparison(
            a=a.info,
            b=b.info,
            rtol=rtol,
            verdict=self.divergence or FirstDivergence(same=True, text=same),
            steps=self.steps,
            records=self.records,
            counts={kind: self.counts[kind] for kind in KINDS if self.counts[kind]},
            differences=self.differences,
            beginnings=beginnings,
            notes=[*notes, *self.notes.values()],
            series=[records for at in around for records in self.series[at] if len(records)],
        )


# --- what can be compared, and what is left out -----------------------------------------------------------------------


def common_steps(a: Run, b: Run) -> tuple[int, ...]:
    """Return the steps that both runs have, or raise if they have different models or no step in common."""
    one, two = a.info, b.info
    if a.model_digest != b.model_digest:
        raise StatisticsError(
            f"{one.path} and {two.path} are runs of different models: {_model_difference(a, b)}; collect both with one "
            "model"
        )
    for info in (one, two):
        if not info.steps:
            raise StatisticsError(f"{info.path} has no full step that every rank has: collect it again")
    steps = sorted(set(one.steps) & set(two.steps))
    if not steps:
        raise StatisticsError(
            f"{one.path} and {two.path} have no step in common ({number_list(one.steps)} and "
            f"{number_list(two.steps)}): collect the same steps, with equal start_step and end_step"
        )
    return tuple(steps)


def _model_difference(a: Run, b: Run) -> str:
    one, two = a.parameters, b.parameters
    other = [f"{name} is {one[name]} and {two[name]}" for name in one if name in two and one[name] != two[name]]
    lone = [
        f"only the {which} has {shortened(names)}"
        for which, names in (("first", [n for n in one if n not in two]), ("second", [n for n in two if n not in one]))
        if names
    ]
    return "; ".join([*lone, *([shortened(other)] if other else [])]) or "their modules differ"


def notes_on_runs(a: Run, b: Run, steps: Sequence[int]) -> list[str]:
    """Return notes on steps that only one run has, and on different dtypes."""
    notes = []
    for run in (a, b):
        if rest := set(run.info.steps) - set(steps):
            notes.append(f"steps that only {run.info.path} has are left out: {number_list(sorted(rest))}")
    if a.info.dtype != b.info.dtype:
        notes.append(f"the runs have dtypes {a.info.dtype} and {b.info.dtype}: tolerances follow the coarser dtype")
    return notes


def _other_structure(step: StepComparison) -> Iterator[tuple[str, str, list[str]]]:
    """Yield kind, words and names of the records by which the structures of one step of a rank differ."""
    pairs = step.pairs
    for kind, side, table in (("missing", pairs.a, step.a), ("extra", pairs.b, step.b)):
        # a gradient of zeros is equal to no gradient
        rows = side.lone
        numbers = table.l2[rows] + table.nan[rows] + table.inf[rows]
        rows = rows[(table.phase[rows] < Phase.BACKWARD) | (table.source[rows] >= 0) | (numbers != 0)]
        yield kind, f"only the {side.which} run has", [_full_name(table, row) for row in rows.tolist()]
    for kind, words, at in (
        ("reordered", "in another order:", pairs.reordered),
        ("dtype", "in another dtype:", np.flatnonzero(step.other_dtype)),
        ("sampled", "not compared, sampled differently:", np.flatnonzero(step.other_sample)),
    ):
        yield kind, words, [_full_name(step.a, row) for row in pairs.a.rows[at].tolist()]


def _full_name(table: Table, row: int) -> str:
    name = ".".join(filter(None, (table.module[row], tensor_name(table.kind[row], table.slot[row]))))
    return f"the gradient of {name}" if table.phase[row] >= Phase.BACKWARD else name
