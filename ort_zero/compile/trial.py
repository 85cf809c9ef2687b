"""Decide whether ONNX Runtime or PyTorch runs a segment: PyTorch checks the first run and later ones, both are timed.

Equal segments of a process share one trial. Ranks share the result through the store of ``torch.distributed``: the
first rank that decides writes its decision, and the others read it. No rank waits for another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ort_zero.runtimes.agreement import Agreement, Decision
from ort_zero.runtimes.differences import Judges, Outputs, explain_difference
from ort_zero.runtimes.runner import Runner

_TIMED_RUNS = 3
"""Number of timed runs of a segment in each runtime, by turns; the fastest counts, which noise disturbs least."""
_CLOSE_RUNS = 8
"""Number of timed runs of a segment in each runtime where the times are close, or where the winner lost
one of the turns. That happens when another program takes the processor for a while."""
_CLOSE = 0.8
"""The times of two runtimes are close where the shorter one is more than this share of the longer one."""
_SPACING = 1024
"""Runs from one sample to the next one, once that many have passed; up to there each sample doubles the number.
At each a rank also asks whether another rank has found the segment wrong."""
_SAMPLED_SHARE = 0.004
"""Share of the process's CPU time that samples may take; while they have taken more, a sample that is due waits."""
_sampled = {"seconds": 0.0}
"""CPU seconds of all samples of this process; first runs are no samples."""
_SIZES = 64
"""Number of combinations of sizes whose first run is checked."""


@dataclass(slots=True)
class Trial:
    """The state of one unique segment."""

    key: str
    verify: str
    place: str
    candidate: Runner = Runner.ONNXRUNTIME
    """What runs the segment, unless PyTorch does."""
    clock: Callable[[], float] = time.perf_counter
    """Returns the time in seconds that a run is measured by."""
    runner: Runner | None = None
    """The runtime that runs the segment from now on; None until that is decided."""
    reason: str = ""
    """Why PyTorch runs the segment; empty while the candidate does."""
    failed: bool = False
    """Whether the candidate failed or computed something else."""
    runs: int = 0
    """Number of runs on this rank."""
    due: int = 2
    """Number of the next run that is looked at: checked, if checks are sampled."""
    is_checked: bool = False
    """Whether PyTorch has checked a run; an error of PyTorch or Ctrl-C may end the first check early."""
    checks: int = 0
    """Number of runs that PyTorch has checked on this rank."""
    check_seconds: float = 0.0
    """CPU seconds of PyTorch's runs and of comparisons in these checks."""
    sizes: set[Any] = field(default_factory=set)
    """The combinations of sizes of checked runs."""
    gain: float | None = None
    """Seconds that a run in ONNX Runtime saves, negative if it takes longer; None if nobody has measured it."""
    _times: list[float] = field(default_factory=list)
    """Seconds of the timed runs: of ONNX Runtime and PyTorch by turns."""

    @property
    def is_settled(self) -> bool:
        """Whether the compiled form runs the segment, and only samples of its runs are checked."""
        return self.runner is self.candidate and self.verify != "always"

    def starts_in_torch(self, agreement: Agreement) -> bool:
        """Return True if PyTorch runs the segment from its first run on, since a rank or an earlier start has decided.

        Nothing is checked then, and ONNX Runtime need not load the model.
        """
        if self.runner is None and self.place == "measured" and (decided := agreement.placement(self.key)):
            if decided[0] is Runner.TORCH:
                self._place(decided)
        return self.runner is Runner.TORCH

    def run(
        self,
        by_ort: Callable[[], Outputs],
        by_torch: Callable[[], Outputs],
        judges: Judges,
        agreement: Agreement,
        sizes: Any = None,
    ) -> Outputs:
        """Return the results of one run, and decide on what follows.

        Args:
            judges: returns what the two are compared with where they differ.
            sizes: the sizes of inputs and results, hashable.
        """
        self.runs += 1
        if self.runner is Runner.TORCH:
            return by_torch()
        needs_check = self.verify == "always" or not self.is_checked
        if self.verify == "sampled" and sizes not in self.sizes and len(self.sizes) < _SIZES:
            needs_check = True
        if (self.is_settled or needs_check) and (failure := agreement.failure(self.key)):
            self._fail(failure, agreement)
            return by_torch()
        is_sample = self.is_settled and not needs_check and self._takes_sample()
        try:
            if needs_check or is_sample:
                before = self.check_seconds
                results = self._checked(by_ort, by_torch, judges, agreement)
                _sampled["seconds"] += is_sample * (self.check_seconds - before)
                if self.verify == "sampled":
                    self.sizes.add(sizes)
                return results
            if self.is_settled:
                return _in_ort(by_ort)
            return self._timed(by_ort, by_torch, agreement)
        except _SessionError as error:
            results = by_torch()  # raises where the inputs are wrong
            self.fail(error, agreement)
        return results

    def _takes_sample(self) -> bool:
        """Return True if a settled run is a sample, and set which run is looked at next.

        Samples are the runs 2, 4, 8 ... 1024, 2048, 3072 ...; one that the CPU time does not allow waits.
        """
        if self.runs < self.due:
            return False
        if self.verify == "sampled" and _sampled["seconds"] > _SAMPLED_SHARE * time.process_time():
            self.due = self.runs + 1 + self.runs // 8
            return False
        self.due = 1 << self.runs.bit_length() if self.runs < _SPACING else (self.runs // _SPACING + 1) * _SPACING
        return self.verify == "sampled"

    def fail(self, error: Exception, agreement: Agreement) -> None:
        """Have PyTorch run the segment from now on, on all ranks, since its session failed in a run."""
        self._fail(f"{self.candidate.title} failed: {' '.join(str(error).split())[:300]}", agreement)

    def _checked(
        self, by_ort: Callable[[], Outputs], by_torch: Callable[[], Outputs], judges: Judges, agreement: Agreement
    ) -> Outputs:
        results = _in_ort(by_ort)
        if self.verify != "off":
            begin = time.process_time()
            wanted = by_torch()
            difference = explain_difference(results, wanted, judges)
            self.checks += 1
            self.check_seconds += time.process_time() - begin
            if difference is not None:
                self._fail(difference, agreement)
                return wanted
        self.is_checked = True
        if self.place == "ort" and self.runner is None:
            self.runner = self.candidate
        return results

    def _timed(self, by_ort: Callable[[], Outputs], by_torch: Callable[[], Outputs], agreement: Agreement) -> Outputs:
        decided = agreement.placement(self.key)
        if decided is not None:
            self._place(decided)
            return _in_ort(by_ort) if self.runner is Runner.ONNXRUNTIME else by_torch()
        in_ort = len(self._times) % 2 == 0
        begin = self.clock()
        results = _in_ort(by_ort) if in_ort else by_torch()
        self._times.append(self.clock() - begin)  # not of a run that an error or Ctrl-C has ended
        if len(self._times) == 2 * _CLOSE_RUNS or (not in_ort and self._is_clear()):
            times = {Runner.ONNXRUNTIME: self._times[::2], Runner.TORCH: self._times[1::2]}
            self._place(agreement.place_fastest(self.key, times))
        return results

    def _is_clear(self) -> bool:
        """Return True if one runtime was much faster, and faster each time."""
        ort, in_torch = self._times[::2], self._times[1::2]
        faster, slower = sorted((min(ort), min(in_torch)))
        agree = len({a < b for a, b in zip(ort, in_torch)}) == 1
        return len(ort) >= _TIMED_RUNS and faster < _CLOSE * slower and agree

    def _place(self, decision: Decision) -> None:
        self.runner, self.gain = decision
        if self.runner is Runner.TORCH:
            self.reason = "PyTorch is faster"

    def _fail(self, reason: str, agreement: Agreement) -> None:
        self.runner, self.reason, self.failed = Runner.TORCH, reason, True
        agreement.tell_failure(self.key, reason)


class _SessionError(Exception):
    """The error of ONNX Runtime in a run; errors of PyTorch's form of a segment are the user's, and pass."""


def _in_ort(by_ort: Callable[[], Outputs]) -> Outputs:
    try:
        return by_ort()
    except Exception as error:  # ONNX Runtime's exceptions have no public base class
        raise _SessionError(str(error)) from error
