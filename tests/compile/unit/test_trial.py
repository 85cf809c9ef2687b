"""The trial of a segment: verification with float64 as the judge, placement by time, decisions of other ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ort_zero.compile import trial as trial_module
from ort_zero.compile.trial import Trial
from ort_zero.runtimes.agreement import Agreement, Decision
from ort_zero.runtimes.differences import explain_difference
from ort_zero.runtimes.runner import Runner


class Calls:
    """The two runtimes of a segment, as functions that count their calls.

    Args:
        ort: result of ONNX Runtime, or the error that it raises.
        exact: result in float64; PyTorch's result is its float32 form.
        seconds: what a call of ONNX Runtime and of PyTorch takes on the calls' own clock.
    """

    def __init__(self, ort: torch.Tensor | Exception, exact: torch.Tensor, seconds: tuple[float, float] = (0, 0)):
        self.ort, self.exact, self.seconds = ort, exact, seconds
        self.counts = {"ort": 0, "torch": 0}
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def by_ort(self) -> list[torch.Tensor]:
        self.counts["ort"] += 1
        self.now += self.seconds[0]
        if isinstance(self.ort, Exception):
            raise self.ort
        return [self.ort]

    def by_torch(self) -> list[torch.Tensor]:
        self.counts["torch"] += 1
        self.now += self.seconds[1]
        return [self.exact.float()]

    def run(self, trial: Trial, agreement: Agreement, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            (result,) = trial.run(self.by_ort, self.by_torch, lambda: ([self.exact], []), agreement)
        return result


def _no_judges():
    raise AssertionError("nothing to judge")


def correct(seconds: tuple[float, float] = (0, 0)) -> Calls:
    exact = torch.linspace(-1, 1, 64, dtype=torch.float64)
    return Calls(exact.float(), exact, seconds)


def test_a_wrong_result_is_replaced_and_named():
    calls = correct()
    calls.ort = calls.exact.float() * 1.001
    trial = Trial("key", "sampled", "ort")
    assert torch.equal(calls.run(trial, Agreement()), calls.exact.float())
    assert trial.failed and trial.runner is Runner.TORCH and "wrong by 1.0e-03 of its size" in trial.reason
    calls.run(trial, Agreement(), 3)
    assert calls.counts["ort"] == 1


def test_an_error_is_replaced_and_named():
    calls = Calls(RuntimeError("no\n kernel"), torch.ones(3, dtype=torch.float64))
    trial = Trial("key", "sampled", "ort")
    assert torch.equal(calls.run(trial, Agreement()), torch.ones(3))
    assert trial.failed and trial.reason == "ONNX Runtime failed: no kernel"


@pytest.mark.parametrize(("place", "runs"), [("measured", 2), ("ort", 5)])
def test_an_error_of_a_later_run_is_replaced_and_named(place: str, runs: int):
    calls = correct((0, 0.002))
    trial, agreement = Trial("key", "sampled", place, clock=calls.clock), Agreement()
    calls.run(trial, agreement, runs)
    calls.ort = RuntimeError("out of memory")
    assert torch.equal(calls.run(trial, agreement, 2), calls.exact.float())
    assert trial.runner is Runner.TORCH and trial.reason == "ONNX Runtime failed: out of memory"
    assert agreement.failure("key") == trial.reason


def test_an_error_of_pytorch_passes():
    calls = correct()
    trial = Trial("key", "off", "ort")
    calls.ort = RuntimeError("no kernel")
    calls.by_torch = lambda: (_ for _ in ()).throw(IndexError("index 5"))
    with pytest.raises(IndexError, match="index 5"):
        calls.run(trial, Agreement())
    assert not trial.failed


@pytest.mark.parametrize("place", ["ort", "measured"])
def test_a_check_that_is_interrupted_is_repeated(place: str):
    calls = correct()
    calls.ort = calls.exact.float() * 1.001
    trial, by_torch = Trial("key", "sampled", place), calls.by_torch
    calls.by_torch = lambda: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        calls.run(trial, Agreement())
    calls.by_torch = by_torch
    assert torch.equal(calls.run(trial, Agreement()), calls.exact.float())
    assert "wrong by 1.0e-03 of its size" in trial.reason


def exact_is(*value: float) -> Callable[[], tuple]:
    """Return judges that know a result in float64, and no other run of PyTorch."""
    return lambda: ([torch.tensor(value, dtype=torch.float64)], [])


def also(result: torch.Tensor) -> Callable[[], tuple]:
    """Return judges for which another run of PyTorch has this result."""
    return lambda: ([torch.zeros(1, dtype=torch.float64)], [[result]])


TRUE = torch.tensor([True, False, True])
NEVER = "nothing to judge"
COMPARED: dict[str, tuple[torch.Tensor, torch.Tensor, Any, str | None]] = {
    "a rounding, where both lose digits": (torch.tensor([0.97e-3]), torch.tensor([1.01e-3]), exact_is(1e-3), None),
    "half of the result": (torch.tensor([0.485e-3]), torch.tensor([1.01e-3]), exact_is(1e-3), "is wrong by"),
    # sums of numbers that cancel: a run that is exact by chance is no measure
    "as far off as another run": (torch.tensor([1e-7]), torch.tensor([1e-9]), also(torch.tensor([5e-8])), None),
    "farther off than all": (torch.tensor([8e-7]), torch.tensor([1e-9]), also(torch.tensor([5e-8])), "is wrong by"),
    "NaN in both": (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), NEVER, None),
    "NaN in PyTorch alone": (torch.ones(2), torch.tensor([1.0, math.nan]), NEVER, "other places"),
    "NaN in ONNX Runtime alone": (torch.tensor([1.0, math.nan]), torch.ones(2), list, "other places"),
    "infinity in PyTorch alone": (torch.ones(1), torch.tensor([math.inf]), NEVER, "other places"),
    "equal integers": (torch.arange(4), torch.arange(4), NEVER, None),
    "another integer": (torch.tensor([0, 1, 2, 4]), torch.arange(4), lambda: ([torch.arange(4)], [[torch.arange(4)]]),
                        "result 0: 1 of 4 elements differ"),
    "a bool that hangs on rounding": (torch.ones(3).bool(), TRUE, lambda: ([TRUE], [[torch.ones(3).bool()]]), None),
    "another bool": (torch.ones(3).bool(), TRUE, lambda: ([TRUE], [[torch.tensor([False, False, True])]]),
                     "1 of 3 elements"),
}  # fmt: skip
"""Results of ONNX Runtime and of PyTorch, what judges them, and what is said."""


@pytest.mark.parametrize("name", COMPARED)
def test_differences_that_count_are_named(name: str):
    ours, theirs, judges, words = COMPARED[name]
    said = explain_difference([ours], [theirs], _no_judges if judges is NEVER else judges)
    assert said is None if words is None else words in (said or "")


@pytest.mark.parametrize("what", ["near", "far", "nan"])
def test_large_results_are_compared_in_parts(what: str):
    theirs = torch.randn((2000, 3, 500), generator=torch.Generator().manual_seed(0))
    ours = theirs * (1 + 1e-6)
    place = 1999, 2, 499  # in the last part
    if what != "near":
        ours[place] = theirs[place] + 1 if what == "far" else math.nan
    found = explain_difference([ours], [theirs], lambda: ([theirs.double()], []))
    words = {"near": None, "far": "is wrong by", "nan": "other places"}[what]
    assert found is None if words is None else words in found


@pytest.mark.parametrize(("ort", "torchs"), [([1.0] * 3, 2.0), ([1.3] * 3 + [1.0] * 5, 1.1)])
def test_two_close_ones_are_timed_more_often(ort: list[float], torchs: float):
    """Noise in the first three runs makes PyTorch look faster in the second case."""
    clock = itertools.accumulate(itertools.chain([0.0], *([0.0, seconds, 0.0, torchs] for seconds in ort)))
    next(clock)
    trial = Trial("key", "off", "measured", is_checked=True, clock=lambda: next(clock))
    for _ in range(2 * len(ort)):
        assert trial.runner is None
        correct().run(trial, Agreement())
    assert trial.runner is Runner.ONNXRUNTIME and trial.gain == pytest.approx(torchs - 1.0)


@pytest.mark.parametrize("seconds, faster", [((0.004, 0.0), Runner.TORCH), ((0.0, 0.004), Runner.ONNXRUNTIME)])
def test_the_faster_one_keeps_the_segment(seconds: tuple[float, float], faster: Runner):
    calls = correct(seconds)
    trial = Trial("key", "sampled", "measured", clock=calls.clock)
    calls.run(trial, Agreement(), 7)
    assert trial.runner is faster and not trial.failed
    before, trial.due = dict(calls.counts), 100
    calls.run(trial, Agreement(), 5)
    name = "torch" if faster is Runner.TORCH else "ort"
    assert calls.counts == {**before, name: before[name] + 5}


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let samples take all of the process's CPU time."""
    monkeypatch.setattr(trial_module, "_SAMPLED_SHARE", 1.0)


def checked_runs(trial: Trial, calls: Calls, runs: int, sizes: Callable[[int], int] = lambda run: 0) -> list[int]:
    """Return the numbers of the runs that PyTorch has checked."""
    numbers = []
    for run in range(1, runs + 1):
        before = trial.checks
        trial.run(calls.by_ort, calls.by_torch, lambda: ([calls.exact], []), Agreement(), sizes(run))
        numbers += [run] * (trial.checks - before)
    return numbers


def test_later_runs_are_sampled(plenty):
    trial = Trial("key", "sampled", "ort")
    assert checked_runs(trial, correct(), 4100) == [1, *(1 << n for n in range(1, 11)), 2048, 3072, 4096]
    assert trial.check_seconds > 0


def test_the_first_run_with_each_combination_of_sizes_is_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial_module, "_SAMPLED_SHARE", -1.0)
    trial = Trial("key", "sampled", "ort")
    assert checked_runs(trial, correct(), 40, lambda run: run // 10) == [1, 10, 20, 30, 40]
    trial = Trial("key", "sampled", "ort")
    assert checked_runs(trial, correct(), 200, lambda run: run) == list(range(1, 65)), "not without an end"


def test_samples_wait_while_they_have_taken_too_much_time(monkeypatch: pytest.MonkeyPatch):
    spent = trial_module._sampled
    monkeypatch.setitem(spent, "seconds", 1e9)
    calls, trial = correct(), Trial("key", "sampled", "ort")
    assert checked_runs(trial, calls, 1000) == [1]
    spent["seconds"] = 0.0
    monkeypatch.setattr(trial_module, "_SAMPLED_SHARE", 1.0)
    assert checked_runs(trial, calls, 1025)[0] < 1000 // 8, "soon after there is time"
    spent["seconds"] = 1e9
    before = calls.counts["torch"]
    checked_runs(Trial("key", "always", "ort"), calls, 10)
    assert calls.counts["torch"] == before + 10


class OtherRank(Agreement):
    """Decisions with what another rank has decided."""

    failed: str | None = None
    placed: Decision | None = None

    def failure(self, key: str) -> str | None:
        return self.failed or super().failure(key)

    def placement(self, key: str) -> Decision | None:
        return self.placed or super().placement(key)


def test_a_failure_of_another_rank_counts_here():
    calls, trial, agreement = correct(), Trial("key", "sampled", "ort"), OtherRank()
    calls.run(trial, agreement, 3)
    assert trial.runner is Runner.ONNXRUNTIME
    agreement.failed = "wrong on rank 1"
    calls.run(trial, agreement, 2000)
    assert trial.runner is Runner.TORCH and trial.reason == "wrong on rank 1"


def test_a_placement_of_another_rank_ends_the_timing():
    calls, trial, agreement = correct((0.0, 0.002)), Trial("key", "sampled", "measured"), OtherRank()
    agreement.placed = Runner.TORCH, None
    calls.run(trial, agreement, 2)
    assert trial.runner is Runner.TORCH and calls.counts["ort"] == 1


def test_placements_are_kept_on_disk(tmp_path, monkeypatch: pytest.MonkeyPatch):
    calls: Callable[[], Calls] = lambda: correct((0.002, 0.0))  # noqa: E731
    first = calls()
    first.run(Trial("key", "sampled", "measured", clock=first.clock), Agreement(tmp_path), 7)
    later = calls()
    trial = Trial("key", "sampled", "measured")
    later.run(trial, Agreement(tmp_path), 2)
    assert trial.runner is Runner.TORCH and later.counts["ort"] == 1
    (tmp_path / "placements.json").write_text("not JSON")
    third = correct((0.0, 0.002))
    trial = Trial("key", "sampled", "measured", clock=third.clock)
    third.run(trial, Agreement(tmp_path), 7)
    assert trial.runner is Runner.ONNXRUNTIME
