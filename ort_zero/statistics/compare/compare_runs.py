"""Compare two runs step by step, and name the first record whose error does not come from its inputs.

Runs are streamed: one step of each rank is in memory at a time, and a few steps without sketches for the report.
:mod:`.side_by_side` reads a step, and :mod:`.rank_comparison` compares it. The resulting
:class:`~.rank_comparison.StepComparison` goes to :mod:`.first_divergence`. From then on its tolerances tell the records
that differ: in the counts, the text, the JSON and the report.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.beginnings import Beginnings
from ort_zero.statistics.compare.compared_records import StepRecords, record_of
from ort_zero.statistics.compare.comparison import KINDS, ComparedRecord, Comparison, FirstDivergence
from ort_zero.statistics.compare.distance import KIND_NAMES
from ort_zero.statistics.compare.first_divergence import find_divergence, no_divergence
from ort_zero.statistics.compare.notes import common_steps, notes_on_reference, notes_on_runs, notes_on_structure
from ort_zero.statistics.compare.optimizer_update import find_update_divergence
from ort_zero.statistics.compare.rank_comparison import RankComparison, StepComparison
from ort_zero.statistics.compare.side_by_side import side_by_side
from ort_zero.statistics.compare.whole_batch import whole_batches
from ort_zero.statistics.reader import Run, open_run
from ort_zero.statistics.records import Phase

MAX_DIFFERENCES = 1000
FIRST_STEPS = 3
"""Number of first steps that the report shows, besides the step of the first divergence and its neighbours."""

_WITHOUT_PARAMETERS = (
    "parameters were not collected: after step 0, only errors much larger than slightly different parameters cause are "
    "found"
)


def compare(
    a: str, b: str, *, rtol: float | Literal["auto"] = "auto", reference: str | None = None, progress: bool = False
) -> Comparison:
    """Compare two runs: count their differences and find the first divergence.

    Args:
        a: folder of the correct run.
        b: folder of the run to check.
        rtol: relative error from which a record differs; ``"auto"``: errors larger than rounding in the runs' dtype
            can explain at this point of the model.
        reference: folder of a repetition of run `a`; differences between these two runs are noise.
        progress: show a progress bar.

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
    """Compare two open runs; for the arguments see :func:`compare`."""
    steps = common_steps(a, b)
    notes = [*a.notes, *b.notes, *notes_on_runs(a, b, steps)]
    if a.info.world_size != b.info.world_size:
        notes.append(
            f"the runs have {a.info.world_size} and {b.info.world_size} ranks: parameters, and their gradients "
            "averaged over the ranks, are compared"
        )
    runs = [a, b]
    if reference is not None:
        notes += notes_on_reference(a, reference, steps)
        runs.append(reference)
    tolerance = None if rtol == "auto" else float(rtol)
    together = a.info.world_size != b.info.world_size
    numbers = (0,) if together else a.ranks
    ranks = [RankComparison(number, a.info.dtype != b.info.dtype, tolerance) for number in numbers]
    result, beginnings = _Result(tolerance, steps), Beginnings()
    for of_runs in side_by_side(runs, steps, progress):
        tables = whole_batches(of_runs) if together else of_runs
        beginnings.look(tables[0][0], tables[1][0])
        result.add([rank.compare(*of_rank) for rank, of_rank in zip(ranks, zip(*tables))], ranks)
    return result.comparison(a, b, str(rtol), notes, beginnings.listed(a.manifest, b.manifest))


class _Result:
    """The result of a comparison, gathered step by step.

    Args:
        rtol: relative error from which a record differs; None: errors that rounding does not explain.
        steps: numbers of the compared steps, in ascending order.
    """

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
            rank.remember(one)
        settled = [self._settled(one) for one in compared]
        for one in settled:
            self._note_structure(one)
            self._count_differences(one)
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
            self.parameter_error = compared[0].growth.total if not compared[0].is_first else 0.0

    def _settled(self, step: StepComparison) -> StepComparison:
        """Return a comparison without sketches whose tolerances alone tell the records that differ.

        Up to the first divergence no record differs: an error that :mod:`.local_errors` excuses is tolerated. Later
        records inherit the divergence. Their tolerance is that of runs whose parameters differ as before.
        """
        tolerance = np.maximum(step.tolerance, step.distances.error)
        if self.first is not None:
            begin = self.pair if step.step == self.first.step else 0
            later = step.tolerance if self.rtol is not None else step.tolerance_of_undiverged(self.parameter_error)
            tolerance[begin:] = later[begin:]
            if (step.step, step.rank) == (self.first.step, self.first.rank):
                tolerance[self.pair] = self.first.tolerance
        return step.without_sketches().with_tolerance(slice(None), tolerance)

    def _note_structure(self, step: StepComparison) -> None:
        self.records += len(step.pairs)
        for kind, count, text in notes_on_structure(step):
            self.counts[kind] += count
            self.notes.setdefault(kind, text)
        if self.rtol is None and step.step and not (step.pairs.phase == Phase.PARAMETER).any():
            self.notes.setdefault("parameters", _WITHOUT_PARAMETERS)

    def _count_differences(self, step: StepComparison) -> None:
        for number in np.flatnonzero(step.distances.error > step.tolerance).tolist():
            self.counts[KIND_NAMES[step.distances.kind[number]]] += 1
            if len(self.differences) < MAX_DIFFERENCES:
                self.differences.append(record_of(step, number))

    def _keep_series(self, settled: list[StepComparison]) -> None:
        """Keep the first steps, and the step of the first divergence with its neighbours; before it, the last two."""
        now = self.steps.index(settled[0].step)
        first = now if self.first is None else self.steps.index(self.first.step)
        self.series[now] = [StepRecords(one) for one in settled]
        self.series = {at: kept for at, kept in self.series.items() if at < FIRST_STEPS or abs(at - first) <= 1}

    def comparison(self, a: Run, b: Run, rtol: str, notes: list[str], beginnings: list[str]) -> Comparison:
        """Return the comparison of all added steps."""
        first = self.steps.index(self.first.step) if self.first else 0
        around = sorted(self.series, key=lambda at: (abs(at - first) > 1, at))
        return Comparison(
            a=a.info,
            b=b.info,
            rtol=rtol,
            verdict=self.divergence or no_divergence(self.steps, self.records),
            steps=self.steps,
            records=self.records,
            counts={kind: self.counts[kind] for kind in KINDS if self.counts[kind]},
            differences=self.differences,
            beginnings=beginnings,
            notes=[*notes, *self.notes.values()],
            series=[records for at in around for records in self.series[at] if len(records)],
        )
