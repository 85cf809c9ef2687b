"""Decide whether ONNX Runtime or PyTorch runs a segment: PyTorch checks the first run and later ones, both are timed.

Equal segments of a process share one trial. Ranks share the result through the store of ``torch.distributed``: the
first rank that decides writes its decision, and the others read it. No rank waits for another.
"""

from __future__ import annotations

import enum
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_zero.compile.agreement import Agreement

Outputs = Sequence[torch.Tensor]
Judges = Callable[[], tuple[Outputs, Iterable[Outputs]]]
"""Returns a segment's results in float64, and the results of PyTorch's runs with inputs changed by a few roundings.
These runs may be made as their results are read."""
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
_PART = 1 << 20
"""Number of elements of a large result that are compared at a time."""
_FACTOR = 8
"""Error of ONNX Runtime that is accepted, as a multiple of PyTorch's own error against float64."""
_SCALE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5, torch.float64: 1e-12}
"""Difference that rounding explains, relative to the largest element, before float64 is asked."""


class Runner(enum.Enum):
    """The runtime that runs a segment."""

    ONNXRUNTIME = "onnxruntime"
    TORCH = "torch"


def propose_faster(agreement: Agreement, key: str, in_ort: Sequence[float], in_torch: Sequence[float]) -> str:
    """Propose the runtime with the shortest run to all ranks, and return their decision.

    Args:
        agreement: the decisions of all ranks.
        key: what is decided.
        in_ort: seconds of the runs in ONNX Runtime.
        in_torch: seconds of the runs in PyTorch.
    """
    gain = min(in_torch) - min(in_ort)
    faster = Runner.ONNXRUNTIME if gain >= 0 else Runner.TORCH
    return agreement.propose(key, f"{faster.value} {gain:.3g}")


def read_decision(decision: str) -> tuple[Runner, float | None]:
    """Parse a placement decision such as ``"onnxruntime 0.0012"`` into the faster runtime and the seconds of gain.

    The gain is of one run in ONNX Runtime over one in PyTorch: negative where PyTorch is faster, None where the text
    has none.
    """
    runner, _, gain = decision.partition(" ")
    return Runner(runner), float(gain) if gain else None


@dataclass(slots=True)
class Trial:
    """The state of one unique segment."""

    key: str
    verify: str
    place: str
    clock: Callable[[], float] = time.perf_counter
    """Returns the time in seconds that a run is measured by."""
    runner: Runner | None = None
    """The runtime that runs the segment from now on; None until that is decided."""
    reason: str = ""
    """Why PyTorch runs the segment; empty while ONNX Runtime does."""
    failed: bool = False
    """Whether ONNX Runtime failed or computed something else."""
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
        """Whether ONNX Runtime runs the segment without further checks."""
        return self.runner is Runner.ONNXRUNTIME and self.verify != "always"

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
            by_ort: runs the segment in ONNX Runtime.
            by_torch: runs the segment in PyTorch.
            judges: returns what the two are compared with where they differ.
            agreement: the decisions of all ranks.
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
        self._fail(f"ONNX Runtime failed: {' '.join(str(error).split())[:300]}", agreement)

    def _checked(
        self,
        by_ort: Callable[[], Outputs],
        by_torch: Callable[[], Outputs],
        judges: Judges,
        agreement: Agreement,
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
            self.runner = Runner.ONNXRUNTIME
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
            self._place(propose_faster(agreement, self.key, self._times[::2], self._times[1::2]))
        return results

    def _is_clear(self) -> bool:
        """Return True if one runtime was much faster, and faster each time."""
        ort, in_torch = self._times[::2], self._times[1::2]
        faster, slower = sorted((min(ort), min(in_torch)))
        agree = len({a < b for a, b in zip(ort, in_torch)}) == 1
        return len(ort) >= _TIMED_RUNS and faster < _CLOSE * slower and agree

    def _place(self, decision: str) -> None:
        self.runner, self.gain = read_decision(decision)
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


def explain_difference(results: Outputs, wanted: Outputs, judges: Judges) -> str | None:
    """Return how the results of ONNX Runtime differ from PyTorch's, in words; None if rounding explains all.

    Where they are further apart than rounding usually puts them, float64 is the judge: ONNX Runtime may be further
    from it than PyTorch by a small factor. PyTorch's distance is the largest of a few runs with slightly moved inputs.
    An integer or a bool that differs counts where it is the same in all these runs.
    """
    judged = _Judged(judges, wanted)
    for index, (ours, theirs) in enumerate(zip(results, wanted, strict=True)):
        if ours.shape != theirs.shape:
            return f"result {index} has the sizes {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        if not theirs.dtype.is_floating_point:
            differ = ours != theirs
            runs = iter(judged)
            while differ.any():  # which side of a comparison a number is on can hang on its last bit
                run = next(runs, None)
                if run is None:
                    return f"result {index}: {int(differ.sum())} of {theirs.numel()} elements differ"
                differ &= run[index] == theirs
            continue
        if _is_near(ours, theirs):
            continue
        if not _same_special(ours, theirs):
            return f"result {index} has NaN or infinity at other places than in PyTorch"
        error, scale = _distance(ours, theirs), _size_of(theirs)
        if error <= _SCALE[theirs.dtype] * scale:
            continue
        runs, torchs = iter(judged), 0.0
        exact = next(runs)[index]
        ort = _distance(ours, exact)
        while ort > _FACTOR * (torchs + torch.finfo(theirs.dtype).eps * scale):
            run = next(runs, None)
            if run is None:
                parts = ort / max(scale, 1e-300), torchs / max(scale, 1e-300)
                return f"result {index} is wrong by {parts[0]:.1e} of its size (PyTorch: {parts[1]:.1e})"
            torchs = max(torchs, _distance(run[index], exact))
    return None


class _Judged:
    """Runs that tell rounding from an error: in float64, in PyTorch, and in PyTorch with slightly moved inputs.

    Each run is made once, when it is read. All results together would not fit into memory for a layer of a large model,
    whose gradients take a gigabyte a run.
    """

    def __init__(self, judges: Judges, wanted: Outputs):
        self._judges, self._wanted = judges, wanted
        self._runs: list[Outputs] = []
        self._more: Iterator[Outputs] = iter(())

    def __iter__(self) -> Iterator[Outputs]:
        if not self._runs:
            exact, more = self._judges()
            self._runs, self._more = [exact, self._wanted], iter(more)
        yield from self._runs
        for run in self._more:
            self._runs.append(run)
            yield run


def _is_near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return True if two float32 or float64 results without NaN and infinity differ by rounding at most.

    This takes no memory of the results' size, and a fourth of the time of the comparison in float64: a layer of a large
    model has gradients of a gigabyte.
    """
    if theirs.dtype not in (torch.float32, torch.float64) or theirs.dim() == 0 or theirs.numel() == 0:
        return False
    rows = max(1, _PART * len(theirs) // theirs.numel())
    norm = functools.partial(torch.linalg.vector_norm, ord=float("inf"))  # NaN if an element is
    parts = zip(ours.split(rows), theirs.split(rows), strict=True)
    error, scale = torch.stack([torch.stack((norm(a - b), norm(b))) for a, b in parts]).amax(0).tolist()
    return math.isfinite(error) and math.isfinite(scale) and error <= _SCALE[theirs.dtype] * scale


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((_finite(a) - _finite(b)).abs().max()) if a.numel() else 0.0


def _size_of(tensor: torch.Tensor) -> float:
    return float(_finite(tensor).abs().max()) if tensor.numel() else 0.0


def _same_special(a: torch.Tensor, b: torch.Tensor) -> bool:
    if bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all()):
        return True
    plain: Any = torch.isfinite(a)
    return bool(torch.equal(plain, torch.isfinite(b))) and bool(torch.equal(torch.isnan(a), torch.isnan(b)))
