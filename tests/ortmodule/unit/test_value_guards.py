"""Guards on values: which one fails, and when exporting again is given up."""

from __future__ import annotations

import torch

from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.guards.value_guards import MOST_FAILURES, GuardFailures, first_failed


def read(where: str) -> ValueReadError:
    return ValueReadError(None, "takes a tensor for a Python bool", where)


def test_the_first_guard_that_does_not_hold_is_named_by_its_index():
    guards = [([1.0], read("a.py:1")), ([2, 3], read("a.py:2")), ([True], read("a.py:3"))]
    holds = [torch.tensor([1.0]), torch.tensor([2, 3]), torch.tensor([True])]
    assert first_failed(guards, holds) == -1
    assert first_failed(guards, [holds[0], torch.tensor([2, 4]), torch.tensor([False])]) == 1
    assert first_failed(guards, [torch.tensor([1.5]), *holds[1:]]) == 0
    assert first_failed([], []) is None


def test_a_value_that_is_not_a_number_never_holds():
    guards = [([float("nan")], read("a.py:1"))]
    assert first_failed(guards, [torch.tensor([float("nan")])]) == 0


def test_each_guard_may_fail_a_few_times_before_exporting_again_is_a_waste():
    failures = GuardFailures()
    assert [failures.changes_often(read("a.py:1")) for _ in range(MOST_FAILURES)] == [False] * MOST_FAILURES
    assert not failures.changes_often(read("b.py:1"))
    assert failures.changes_often(read("a.py:1"))
