"""Compare two runs step by step, and name the first record whose error does not come from its inputs.

Runs are streamed: one step of each rank is in memory at a time, and the errors of a dozen steps for the report.
:mod:`.side_by_side` reads a step, and :mod:`.rank_comparison` compares it. The resulting
:class:`~.step_comparison.StepComparison` goes to :mod:`.first_divergence`, to the counts here and to :mod:`.series`.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np

from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.comparison import KINDS, Comparison, Difference, FirstDivergence, Series
from ort_zero.statistics.compare.compatibility import common_steps, notes_on, notes_on_reference
from ort_zero.statistics.compare.differences import difference_of
from ort_zero.statistics.compare.distance import KIND_NAMES, SAME
from ort_zero.statistics.compare.first_divergence import find_divergence, no_divergence
from ort_zero.statistics.compare.optimizer_update import find_update_divergence
from ort_zero.statistics.compare.rank_comparison import RankComparison, compare_ranks
from ort_zero.statistics.compare.series import series_of
from ort_zero.statistics.compare.side_by_side import side_by_side
from ort_zero.statistics.compare.step_comparison import StepComparison
from ort_zero.statistics.compare.structure_notes import note_on_parameters, notes_on_samples, structure_notes
from ort_zero.statistics.reader import Run, open_run

MAX_DIFFERENCES = 1000
MAX_STEPS = 12
"""Maximum number of steps whose errors are kept for the report; three of them are the step of the first divergence and
its neighbours."""


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
    notes = [*a.notes, *b.notes, *notes_on(a, b, steps)]
    runs = [a, b]
    if reference is not None:
        notes += notes_on_reference(a, reference, steps)
        runs.append(reference)
    tolerance = None if rtol == "auto" else float(rtol)
    numbers = sorted(set(a.ranks) & set(b.ranks))
    ranks = [RankComparison(number, a.info.dtype != b.info.dtype, tolerance) for number in numbers]
    result = _Result(tolerance, steps)
    for tables in side_by_side(runs, numbers, steps, progress):
        result.add(compare_ranks(ranks, tables), ranks)
    return result.comparison(a, b, str(rtol), notes)


class _Result:
    """The result of a comparison, gathered step by step.

    Args:
        rtol: relative error from which a record differs; None: errors that rounding does not explain.
        steps: numbers of the compared steps, in ascending order.
    """

    def __init__(self, rtol: float | None, steps: tuple[int, ...]):
        self.rtol, self.steps = rtol, steps
        self.divergence: FirstDivergence | None = None
        self.pair = -1
        """Number of the pair of the first divergence; -1 before."""
        self.parameter_error = 0.0
        """Relative error of the parameters when the runs diverged; a larger error later is a consequence."""
        self.records = 0
        self.counts: Counter[str] = Counter()
        self.differences: list[Difference] = []
        self.notes: dict[str, str] = {}
        """The first note of each kind."""
        self.series: dict[int, list[Series]] = {}
        self._planned = _evenly_spaced(steps)
        self._last: list[StepComparison] = []
        """The comparisons of the previous step, without sketches."""

    def add(self, compared: list[StepComparison], ranks: list[RankComparison]) -> None:
        """Add the comparison of one step on all ranks."""
        diverged_before = self.divergence is not None
        if not diverged_before:
            self._look_for_divergence(compared, ranks)
        for one in compared:
            self._note_structure(one)
            self._count_differences(one, 0 if diverged_before else self.pair)
        slim = [one.without_sketches() for one in compared]
        self._keep_series(slim, diverged_before)
        for rank, one in zip(ranks, compared):
            rank.remember(one)
        self._last = slim

    def _look_for_divergence(self, compared: list[StepComparison], ranks: list[RankComparison]) -> None:
        divergence = None
        if self.rtol is None:
            for rank, one in zip(ranks, compared):
                divergence = divergence or find_update_divergence(rank.previous, one)
        divergence = divergence or find_divergence(compared, self.rtol)
        if divergence:
            self.divergence, self.pair = divergence
            self.parameter_error = compared[0].growth.total if not compared[0].is_first else 0.0

    # -- counts -----------------------------------------------------------------------------------------------------

    def _note_structure(self, step: StepComparison) -> None:
        self.records += len(step.pairs)
        for note in structure_notes(step):
            if note.count:
                self.counts[note.kind] += note.count
                self.notes.setdefault(note.kind, note.text)
        for note in (*notes_on_samples(step), *(note_on_parameters(step) if self.rtol is None else ())):
            self.notes.setdefault(note.kind, note.text)

    def _count_differences(self, step: StepComparison, begin: int) -> None:
        if self.divergence is None:
            return
        over = self._over(step)
        over[:begin] = False
        tolerance = self._tolerance(step)
        slim = step.without_sketches()
        for number in np.flatnonzero(over).tolist():
            self.counts[KIND_NAMES[step.distances.kind[number]]] += 1
            if len(self.differences) < MAX_DIFFERENCES:
                self.differences.append(difference_of(slim, number, float(tolerance[number])))

    def _over(self, step: StepComparison) -> np.ndarray:
        """Return True for the pairs that differ, among them the pair of the first divergence."""
        over = (step.distances.error > self._tolerance(step)) & (step.distances.kind != SAME)
        first = self.divergence.difference if self.divergence is not None else None
        if first is not None and (first.step, first.rank) == (step.step, step.rank):
            over[self.pair] = True
        return over

    def _tolerance(self, step: StepComparison) -> np.ndarray:
        if self.rtol is not None:
            return step.tolerance
        return step.tolerance_of_undiverged(self.parameter_error if self.divergence is not None else step.growth.total)

    # -- series -----------------------------------------------------------------------------------------------------

    def _keep_series(self, compared: list[StepComparison], diverged_before: bool) -> None:
        """Keep the errors of planned steps, of the first divergence's step and of its two neighbours."""
        diverges = self.divergence is not None and not diverged_before
        if diverges:
            self._add_series(self._last)
        first = self._first_step()
        follows = diverged_before and bool(self._last) and self._last[0].step == first
        if compared[0].step in self._planned or diverges or follows:
            self._add_series(compared)

    def _add_series(self, compared: list[StepComparison]) -> None:
        if compared and compared[0].step not in self.series:
            self.series[compared[0].step] = [
                series
                for one in compared
                for series in series_of(one, self._tolerance(one), self._over_from_divergence_on(one))
            ]

    def _over_from_divergence_on(self, step: StepComparison) -> np.ndarray:
        first = self._first_step()
        if first is None or step.step < first:
            return np.zeros(len(step.pairs), bool)
        over = self._over(step)
        if step.step == first:
            over[: self.pair] = False
        return over

    def _first_step(self) -> int | None:
        """Return the step of the first divergence, None if there is none."""
        return self.divergence.difference.step if self.divergence and self.divergence.difference else None

    # -- result -----------------------------------------------------------------------------------------------------

    def comparison(self, a: Run, b: Run, rtol: str, notes: list[str]) -> Comparison:
        """Return the comparison of all added steps."""
        step = self._first_step()
        first = self.steps.index(self.steps[0] if step is None else step)
        around = sorted(self.series, key=lambda step: (abs(self.steps.index(step) - first) > 1, step))
        return Comparison(
            a=a.info,
            b=b.info,
            rtol=rtol,
            verdict=self.divergence or no_divergence(self.steps, self.records),
            steps=self.steps,
            records=self.records,
            counts={kind: self.counts[kind] for kind in KINDS if self.counts[kind]},
            differences=self.differences,
            notes=[*notes, *self.notes.values()],
            series=[series for step in around for series in self.series[step]],
        )


def _evenly_spaced(steps: tuple[int, ...]) -> frozenset[int]:
    """Return the steps for the report: all steps of a short run, else evenly spaced steps with room for three more."""
    if len(steps) <= MAX_STEPS:
        return frozenset(steps)
    indices = np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS - 3)).round().astype(int)
    return frozenset(steps[index] for index in indices)
