"""Statistics that an earlier ort_zero wrote are read, to the last number, and compared."""

from __future__ import annotations

import json

import numpy as np
import pytest
from statistics_golden import GOLDEN, STEPS, make
from statistics_records import records_of

from ort_zero.cli import main as cli
from ort_zero.statistics.compare.compare_runs import compare
from ort_zero.statistics.reader import open_run
from ort_zero.statistics.records import FORMAT_VERSION, Phase

VERSIONS = range(1, FORMAT_VERSION + 1)


def records(folder):
    found = {}
    for table in open_run(folder).tables(0):
        for record in records_of(table):
            found[record.step, record.phase, record.module, record.kind, record.slot] = record
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stored_run_is_read(version):
    folder = GOLDEN / f"statistics_v{version}" / "right"
    assert json.loads((folder / "rank_00000" / "manifest.json").read_text())["format_version"] == version
    run = open_run(folder)
    assert not run.notes and run.info.steps == tuple(range(STEPS))
    assert (run.info.model, run.info.backend, run.info.dtype, run.info.world_size) == ("Net", "torch", "float32", 1)
    assert run.parameters["first.weight"] == (3, 2)
    found = records(folder)
    given = found[1, Phase.FORWARD, "", "input", "[0]"]
    values = np.array([2.0, -1.0, 1.5, 4.0])
    assert (given.shape, given.dtype, given.call, given.caller) == ((2, 2), "float32", 0, -1)
    assert given.statistics.first == tuple(values) and given.statistics.elements == 4
    assert given.statistics.mean == values.mean() and given.statistics.l2 == pytest.approx(np.linalg.norm(values))
    assert (given.statistics.negative, given.statistics.positive, given.statistics.zero) == (1, 3, 0)
    assert sorted(map(abs, given.statistics.sketch))[-4:] == [1.0, 1.5, 2.0, 4.0]
    again = found[1, Phase.FORWARD, "first", "input", "[0]"]
    assert again.source == given.order and again.statistics is None
    named = found[0, Phase.FORWARD, "", "inspect", "hidden"]
    assert named.source == found[0, Phase.FORWARD, "first", "output", ""].order
    weight = found[0, Phase.PARAMETER, "last", "parameter", "weight"]
    assert weight.statistics.first == (-0.25, 0.375, 1.0)
    assert {phase for _, phase, *_ in found} == set(Phase)


@pytest.mark.parametrize("version", VERSIONS)
def test_stored_runs_are_compared(version, capsys):
    folder = GOLDEN / f"statistics_v{version}"
    right, wrong = str(folder / "right"), str(folder / "wrong")
    same = compare(right, right)
    assert same.verdict.same and same.records == len(records(right)) and not same.counts
    verdict = compare(right, wrong).verdict
    assert (verdict.module, verdict.direction, verdict.difference.step) == ("act", "forward", 0)
    assert verdict.difference.tensor == "output" and verdict.difference.error == pytest.approx(0.01 / 1.01, rel=0.05)
    assert verdict.text.startswith("step 0, rank 0, forward: act adds the error: act's output differs by ")
    assert cli.main(["stats", "compare", right, wrong, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"]["module"] == "act"


def test_what_is_stored_is_what_is_written_today(tmp_path):
    make(tmp_path)
    stored, written = (records(folder / "right") for folder in (GOLDEN / f"statistics_v{FORMAT_VERSION}", tmp_path))
    assert stored.keys() == written.keys()
    for key, record in stored.items():
        other = written[key]
        assert (record.order, record.call, record.caller, record.source, record.shape, record.dtype) == (
            other.order, other.call, other.caller, other.source, other.shape, other.dtype
        ), key  # fmt: skip
        if record.statistics is not None:
            assert record.statistics.first == pytest.approx(other.statistics.first, rel=1e-5), key
            assert record.statistics.sketch == pytest.approx(other.statistics.sketch, rel=1e-5, abs=1e-6), key
