"""The stored ratios of steps: lost ones are found, and README shows what is stored."""

from __future__ import annotations

import copy
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


STORED = {"processor": "AVX2", "margin": 0.1, "cases": {
    name: {"benchmark": "step_time.py", "arguments": [name], "ratio": 0.5} for name in ("a", "b", "c")
}}  # fmt: skip


def measured(**ratios):
    return lambda case: {"ratio": ratios[case["arguments"][0]], "processor": "AVX2"}


def test_a_ratio_above_the_margin_is_lost_and_named(bench):
    lines = []
    found, lost = bench.check(STORED, measured(a=0.54, b=0.56, c=0.1), ["a", "b", "c"], lines.append)
    assert found == {"a": 0.54, "b": 0.56, "c": 0.1} and lost == ["b"]
    assert ["LOST" in line for line in lines] == [False, True, False]


def test_ratios_of_another_kind_of_processor_are_not_compared(bench):
    with pytest.raises(ValueError, match=r"another processor \(AVX2\), and this one is AVX512"):
        bench.check(STORED, lambda case: {"ratio": 0.1, "processor": "AVX512"}, ["a"])


def test_the_exit_status_tells(bench, monkeypatch, tmp_path, capsys):
    file = tmp_path / "ratios.json"
    file.write_text(json.dumps(STORED))
    monkeypatch.setattr(bench, "STORED", file)
    for ratios, status in ((dict(a=0.5, b=0.5, c=0.5), 0), (dict(a=0.5, b=0.5, c=0.9), 1)):
        monkeypatch.setattr(bench, "run_case", measured(**ratios))
        monkeypatch.setattr("sys.argv", ["bench_check.py"])
        assert bench.main() == status
    monkeypatch.setattr(bench, "run_case", lambda case: {"ratio": 0.5, "processor": "NEON"})
    assert bench.main() == 2


def test_an_update_is_stored_and_written_into_the_page(bench, monkeypatch, tmp_path, capsys):
    file, page, full = tmp_path / "ratios.json", tmp_path / "README.md", tmp_path / "page.md"
    stored = copy.deepcopy(STORED)
    stored["cases"]["b"]["short"] = "B"
    file.write_text(json.dumps(stored))
    for one in (page, full):
        one.write_text(f"before\n  {bench.BEGIN}\n  old\n  {bench.END}\nafter\n")
    monkeypatch.setattr(bench, "STORED", file)
    monkeypatch.setattr(bench, "README", page)
    monkeypatch.setattr(bench, "PAGE", full)
    found = {"ratio": 0.25, "wall": 0.3, "cpu_memory": 0.8}
    monkeypatch.setattr(bench, "run_case", lambda case: {**found, "processor": "AVX2"})
    monkeypatch.setattr("sys.argv", ["bench_check.py", "--update", "--only", "b"])
    assert bench.main() == 0
    expected = copy.deepcopy(stored)
    expected["cases"]["b"].update(found)
    assert json.loads(file.read_text()) == expected
    line = "  B 0.25 (0.80) (AVX2; below 1 is faster; in brackets eager PyTorch with `cpu_memory`)."
    for text, figure in ((full.read_text(), "  | b | 0.80 | 0.25 | 0.30 |"), (page.read_text(), line)):
        assert f"\n{figure}\n" in text and "old" not in text
        assert text.startswith("before\n  <!--") and text.endswith("-->\nafter\n")


def test_the_pages_show_what_is_stored(bench):
    stored = json.loads(bench.STORED.read_text())
    for page, figures in ((bench.README, bench.sentence(stored)), (bench.PAGE, bench.table(stored))):
        assert page.read_text() == bench.with_figures(page.read_text(), figures)


def test_the_benchmarks_of_make_are_there():
    (names,) = re.findall(r"^BENCHMARKS := (.+)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert [name for name in names.split() if not (ROOT / f"benchmarks/{name}.py").exists()] == []
