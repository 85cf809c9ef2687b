"""Peaks of real processes, each of its own, against budgets and predictions."""

from __future__ import annotations

import memory_workers
import pytest
from launched import once

from ort_zero.testing.ranks import run_on_ranks

BUDGETS = ["80%", "65%", "55%"]
CASES = {"gpt2": BUDGETS, "bert": ["all", "55%"]}


@once
def _measured(kind: str, case: str, folder: str) -> dict:
    env = {"ORT_ZERO_CACHE_DIR": folder}
    (found,) = run_on_ranks(memory_workers.peak, 1, kind, case, timeout=200, fresh=True, env=env)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Plans of this module; the built extensions stay where they are."""
    from ort_zero import env

    path = tmp_path_factory.mktemp("cache")
    for built in env.cache_dir().iterdir():
        if built.name != "plans":
            (path / built.name).symlink_to(built)
    return str(path)


@pytest.mark.parametrize("kind", CASES)
def test_measured_peaks(kind, folder):
    off = _measured(kind, "off", folder)
    before = off["peak"]
    for case in CASES[kind]:
        found = _measured(kind, case, folder)
        decision = found["decision"]
        assert found["losses"] == pytest.approx(off["losses"], abs=1e-5)
        assert decision["predicted_bytes"] == pytest.approx(found["peak"], rel=0.1), f"{kind}, {case}"
        assert decision["measured_bytes"] == pytest.approx(found["peak"], rel=0.05)
        if case in BUDGETS:
            assert found["peak"] <= decision["budget_bytes"], f"{kind}, {case}"
            assert found["peak"] < before, f"{kind}: {case} needs more than a larger budget"
            before = found["peak"]
            assert decision["unconstrained_bytes"] == pytest.approx(off["peak"], rel=0.1)
