"""What one rank decides alone about its graphs leaves the gradients of all ranks as in PyTorch."""

from __future__ import annotations

import pytest
from launch_once import once
from lone_decisions import DECISIONS, SETTINGS, assert_alike, both

from ort_zero.testing.ranks import run_on_ranks

SECTION = {"enabled": True, "backend": "ortmodule"}


@once
def _launch() -> list[dict]:
    return run_on_ranks(both, 2, list(DECISIONS), list(SETTINGS), SECTION, timeout=1200)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_gradients_are_those_of_pytorch(decision, setting):
    for reports in _launch():
        assert_alike(*reports[f"{decision} {setting}"])
