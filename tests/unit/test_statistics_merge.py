"""Two runs side by side: files for people, a table for programs, and nobody's files deleted."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from statistics_files import Record, Statistics, columns_of, manifest_of, records, statistics_of, write

from ort_zero.cli import main as cli
from ort_zero.errors import StatisticsError
from ort_zero.statistics.collect.tensor_statistics import measure_into
from ort_zero.statistics.collect.writer import StatisticsWriter
from ort_zero.statistics.compare.merge import merge_activation_summary
from ort_zero.statistics.records import Phase
from ort_zero.statistics.rows import WIDTH


def numbers(values: np.ndarray) -> Statistics:
    line = np.empty(WIDTH)
    measure_into(line, torch.from_numpy(values))
    return statistics_of(line)


def row(phase: Phase, order: int, module: str, kind: str, values=None, **changes) -> Record:
    base = Record(
        step=0, phase=phase, order=order, call=order, caller=order - 1, module=module, occurrence=1, kind=kind,
        slot="", source=-1 if values is not None else 0, shape=(4, 5), dtype="float32", partitioned=False,
        statistics=None if values is None else numbers(values),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


X = np.linspace(-1, 1, 20)


def torch_rows() -> list[Record]:
    return [
        row(Phase.PARAMETER, 0, "a", "parameter", X, slot="weight"),
        row(Phase.FORWARD, 0, "", "input", X),
        row(Phase.FORWARD, 1, "a", "input"),
        row(Phase.FORWARD, 2, "a", "output", 2 * X),
        row(Phase.FORWARD, 3, "b", "output", X),
        row(Phase.FORWARD, 4, "b", "output", X, occurrence=2),
        row(Phase.FORWARD, 5, "", "output", X, slot=".logits"),
        row(Phase.BACKWARD, 2, "a", "output", X),
        row(Phase.BACKWARD, 5, "", "output", X, slot=".logits"),
    ]


def ort_rows() -> list[Record]:
    """Another number in ``a``, the second call of ``b`` lacking, a record that only this run has."""
    found = [one for one in torch_rows() if one.occurrence == 1]
    found[3] = row(Phase.FORWARD, 2, "a", "output", 2.5 * X, dtype="float16")
    found.insert(4, row(Phase.FORWARD, 7, "a", "inspect", X, slot="mine"))
    return found


def collect(folder: Path, rows: list[Record], **about) -> Path:
    writer = StatisticsWriter(folder, manifest={**manifest_of(), **about})
    for step in (0, 1):
        writer.append(step, *columns_of(rows))
    writer.close()
    return folder


@pytest.fixture
def runs(tmp_path) -> tuple[Path, Path]:
    return collect(tmp_path / "pt", torch_rows()), collect(tmp_path / "ort", ort_rows(), backend="onnxruntime")


def test_every_record_of_both_runs_is_there_in_execution_order(runs, tmp_path):
    report = merge_activation_summary(*runs, tmp_path / "out")
    assert report.records == 20
    assert report.steps == (0, 1) and report.ranks == (0,) and report.notes == []
    lines = (tmp_path / "out" / "step_1" / "rank_0.txt").read_text().splitlines()
    assert lines[0] == "step 1, rank 0" and str(runs[0]) in lines[1] and lines[2].endswith("(onnxruntime)")
    starts = [lines[4].index(name) for name in ("phase", "module", "tensor", "error")]
    end = lines[4].index(" max ") + 4
    found = [[line[a:b].strip() for a, b in zip(starts, starts[1:])] for line in lines[5::2]]
    assert found == [
        ["parameter", "a", "weight"],
        ["forward", "(root)", "input"],
        ["forward", "a", "input"],
        ["forward", "a", "output"],
        ["forward", "b", "output"],
        ["forward", "b#2", "output"],
        ["forward", "(root)", "output.logits"],
        ["forward", "a", "inspect.mine"],
        ["backward", "(root)", "output.logits"],
        ["backward", "a", "output"],
    ]
    pt, ort = lines[11:13]
    assert "2.00e-01" in pt and "(4, 5)  float32" in pt and "(4, 5)  float16" in ort
    assert [line[:end].split()[-1] for line in (pt, ort)] == ["2", "2.5"]
    assert "0.00e+00" in lines[9] and lines[7].split()[-12:] == lines[9].split()[-12:], "the same tensor as above"
    assert lines[16].split() == ["ort"] and "pt" in lines[19].split()[-1]
    assert lines[20].split()[:4] == ["ort", "(4,", "5)", "float32"]


def test_tensors_of_other_shapes_have_no_error(tmp_path):
    rows = torch_rows()
    collect(tmp_path / "pt", rows)
    rows[3] = dataclasses.replace(rows[3], shape=(5, 4))
    collect(tmp_path / "ort", rows)
    merge_activation_summary(tmp_path / "pt", tmp_path / "ort", tmp_path / "out")
    lines = (tmp_path / "out" / "step_0" / "rank_0.txt").read_text().splitlines()
    assert lines[11].split()[3:6] == ["pt", "(4,", "5)"] and lines[12].split()[:3] == ["ort", "(5,", "4)"]


def test_what_only_one_run_has_is_a_note(tmp_path):
    write(tmp_path / "pt", 0, 2, steps=(0, 1, 2))
    write(tmp_path / "pt", 1, 2, steps=(0, 1, 2))
    write(tmp_path / "ort", steps=(2, 3))
    report = merge_activation_summary(tmp_path / "pt", tmp_path / "ort", tmp_path / "out")
    assert report.steps == (2,) and report.ranks == (0,) and report.records == len(records(0))
    told = "\n".join(report.notes)
    assert "ranks that only" in told and "pt has are left out: 0, 1" in told and "ort has are left out: 3" in told
    assert sorted(os.listdir(tmp_path / "out")) == ["step_2"]


def test_runs_without_a_common_step_are_refused(tmp_path):
    write(tmp_path / "pt", steps=(0, 1))
    write(tmp_path / "ort", steps=(7,))
    with pytest.raises(StatisticsError, match=r"no step in common: .*steps 0, 1 and .*steps 7"):
        merge_activation_summary(tmp_path / "pt", tmp_path / "ort", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the output folder ---------------------------------------------------------------------------------------------


def test_a_folder_with_files_is_refused(runs, tmp_path):
    merge_activation_summary(*runs, tmp_path / "out")
    for out in (runs[0], tmp_path / "out"):
        before = sorted(map(str, out.rglob("*")))
        with pytest.raises(StatisticsError, match="is not empty; choose another output_dir"):
            merge_activation_summary(*runs, out)
        assert sorted(map(str, out.rglob("*"))) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(StatisticsError, match="cannot write .*file"):
        merge_activation_summary(*runs, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert merge_activation_summary(*runs, tmp_path / "empty").records == 20


# --- the command ---------------------------------------------------------------------------------------------------


def arguments(runs, out) -> list[str]:
    return ["--pt_dir", str(runs[0]), "--ort_dir", str(runs[1]), "--output_dir", str(out)]


def test_the_command_writes_and_says_what(runs, tmp_path, capsys):
    assert cli.main(["stats", "merge", *arguments(runs, tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert re.match(r"wrote .*out: steps 0, 1 of 1 ranks, 20 records", captured.out)
    assert captured.err == ""
    assert cli.main(["stats", "merge", *arguments(runs, tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("ort-zero stats merge: ") and captured.err.count("\n") == 1
    assert cli.main(["stats", "merge", *arguments(runs, tmp_path / "json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 20


def test_the_guides_names_work(runs, tmp_path):
    argv = [sys.executable, "-m", "ort_zero.hooks.merge_activation_summary", *arguments(runs, tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("wrote ") and done.stderr == ""
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    from ort_zero.hooks.merge_activation_summary import merge_activation_summary as by_the_guides_name

    assert by_the_guides_name is merge_activation_summary
