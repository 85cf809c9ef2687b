"""The stored ratios of steps: lost ones are found, and README shows what is stored."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_check", ROOT / "benchmarks/bench_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STORED = {"processor": "AVX2", "margin": 0.1, "cases": {"a": {"benchmark": "step_time.py", "arguments": ["a"]}}}


def test_ratios_of_another_kind_of_processor_are_not_compared(bench):
    with pytest.raises(ValueError, match=r"another processor \(AVX2\), and this one is AVX512"):
        bench.check(STORED, lambda case: {"ratio": 0.1, "processor": "AVX512"}, ["a"])


def test_the_pages_show_what_is_stored(bench):
    stored = json.loads(bench.STORED.read_text())
    for page, figures in ((bench.README, bench.sentence(stored)), (bench.PAGE, bench.table(stored))):
        assert page.read_text() == bench.with_figures(page.read_text(), figures)


def test_the_benchmarks_of_make_are_there():
    (names,) = re.findall(r"^BENCHMARKS := (.+)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert [name for name in names.split() if not (ROOT / f"benchmarks/{name}.py").exists()] == []
