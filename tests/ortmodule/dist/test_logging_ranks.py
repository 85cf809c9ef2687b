"""The table of levels on two real ranks: every line of both streams of each, and nothing else."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from launch_once import once
from rank_processes.ranks import run_script_on_ranks

HERE = Path(__file__).parent
GRAPH = r"INFO Net training graph 1: exported in [\d.]+ s \(first call\); \d+ nodes, \d+ PythonOps.*"
TITLE = r"INFO Net runs in ONNX Runtime"
NATIVE = re.compile(r"\d{4}-\d\d-\d\d [\d:.]+ (?:\x1b\[\S*m)?\[([VIWEF]):onnxruntime:")
"""A line of ONNX Runtime's own log, with the letter of its severity."""


def _run(
    model: str, stage: int, level: str, folder: str | Path, fresh: bool = False, **more: str
) -> list[tuple[int, list[str], list[str]]]:
    """Return exit status, lines of stdout and lines of stderr of each rank; `folder` is for temporary files."""
    env = {"TMPDIR": str(folder), **more}
    script = HERE / "logging_script.py"
    ranks = run_script_on_ranks(script, 2, model, stage, level, timeout=400, env=env, fresh=fresh)
    return [(rank.returncode, rank.stdout.splitlines(), rank.stderr.splitlines()) for rank in ranks]


@once
def trained(level: str, stage: int = 1) -> list[tuple[int, list[str], list[str]]]:
    with tempfile.TemporaryDirectory() as folder:
        # what modules say when they are imported, is seen in new interpreters only
        found = _run("Net", stage, level, folder, fresh=level == "INFO")
        left = list(Path(folder).glob("ort_zero-export*"))
    assert not left
    for code, out, err in found:
        assert code == 0 and "root logger as before: True" in out, (out[-20:], err[-20:])
    return found


def ours(rank: int, lines: list[str]) -> list[str]:
    """Return our own records of a rank, without the rank; the table of the summary is one word."""
    found: list[str] = []
    for line in lines:
        if line.startswith("[ort_zero rank"):
            assert line.startswith(f"[ort_zero rank {rank}] "), line
            found.append(line.split("] ", 1)[1])
        elif " | " in line or re.fullmatch(r"-[-+]+", line):
            if found[-1] != "TABLE":
                found.append("TABLE")
        else:
            assert NATIVE.match(line) or line == "traced to stderr", line
    return found


def assert_lines(found: list[str], expected: list[str]) -> None:
    assert len(found) == len(expected), (found, expected)
    for line, pattern in zip(found, expected, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


@pytest.mark.parametrize(
    ("level", "stage", "rank_0", "rank_1"),
    [
        ("ERROR", 1, ["ERROR probe"], ["ERROR probe"]),
        ("WARNING", 1, ["WARNING probe", "ERROR probe"], ["ERROR probe"]),
        ("INFO", 1, [GRAPH, TITLE, "TABLE", "INFO probe", "WARNING probe", "ERROR probe"], ["ERROR probe"]),
        ("INFO", 3, [GRAPH, TITLE, "TABLE", "INFO probe", "WARNING probe", "ERROR probe"], ["ERROR probe"]),
    ],
)
def test_rank_0_alone_speaks_from_info_on_and_nobody_else_writes(level, stage, rank_0, rank_1):
    (_, out_0, err_0), (_, out_1, err_1) = trained(level, stage)
    for rank, (err, expected) in enumerate(((err_0, rank_0), (err_1, rank_1))):
        assert_lines(ours(rank, err), expected)
        assert not any(map(NATIVE.match, err))
    for out in (out_0, out_1):
        # what is traced is the exporter's affair, and its export has succeeded
        assert not any("traced" in line or "graph(" in line for line in [*out, *err_0, *err_1])


@pytest.mark.parametrize("level", ["DEVINFO", "DEBUG"])
def test_every_rank_speaks_below_info_and_nothing_of_the_exporter_is_touched(level):
    upstream = [r"INFO ORTModule: Running model forward.*", r"INFO ORTModule: Exporting the PyTorch model.*"]
    said = ["DEVINFO probe", "INFO probe", "WARNING probe", "ERROR probe"]
    said = ["DEBUG probe", *said] if level == "DEBUG" else said
    for rank, (_, out, err) in enumerate(trained(level)):
        table = [TITLE, "TABLE"] if rank == 0 else []
        found = [line for line in ours(rank, err) if not line.startswith("DEBUG ") or "probe" in line]
        assert_lines(found, [*upstream, GRAPH, *table, *said])
        severities = {match[1] for match in map(NATIVE.match, err) if match}
        assert "I" in severities and ("V" in severities) == (level == "DEBUG"), severities
        # the very object, so that a debugger works
        assert "traced to stdout True" in out and "traced to stderr" in err
        assert any(line.startswith("Exported graph: ") for line in out) == (level == "DEBUG")


def test_the_summary_is_printed_once_and_names_what_is_on():
    for stage in (1, 3):
        (_, _, err), _ = trained("INFO", stage)
        features = [line.split("|")[0].strip() for line in err if " | " in line]
        assert features.count("feature") == features.count("training graph") == features.count("versions") == 1
        states = {line.split("|")[0].strip(): line.split("|")[1].strip() for line in err if " | " in line}
        assert states["ONNX Runtime"] == "on" and states["ZeRO-3 in the graph"] == ("on" if stage == 3 else "off")
        assert all(line.isascii() for line in err)


def test_a_failing_export_shows_what_was_held(tmp_path):
    for code, out, err in _run("Fails", 1, "INFO", tmp_path):
        assert code != 0
        assert out.count("traced to stdout False") >= 1 and err.count("traced to stderr") >= 1
        assert any("ExportError" in line and "cannot be traced" in line for line in err)
    assert not list(tmp_path.glob("ort_zero-export*"))


def test_a_process_that_exits_or_dies_in_an_export_loses_nothing(tmp_path):
    for code, out, err in _run("Exits", 1, "INFO", tmp_path):
        assert code == 7 and "traced to stdout False" in out and "traced to stderr" in err
    assert not list(tmp_path.glob("ort_zero-export*"))
    for code, _, err in _run("Dies", 1, "INFO", tmp_path):
        assert code == -9 and "native words" in err
    held = [file.read_text() for file in tmp_path.glob("ort_zero-export-rank*")]
    assert held == ["traced to stdout False\ntraced to stderr\n"] * 2


def test_an_unknown_level_is_refused_on_all_ranks_before_training(tmp_path):
    names = "must be one of DEBUG, VERBOSE, DEVINFO, INFO, WARNING, ERROR, got 'LOUD'"
    for code, out, err in _run("Net", 1, "INFO", tmp_path, ORT_ZERO_LOG_LEVEL="LOUD"):
        assert code == 1 and not any("traced" in line for line in out)
        assert err[-1].endswith(f" ort_zero.errors.ConfigError: ORT_ZERO_LOG_LEVEL: {names}")
    for code, _, err in _run("Net", 1, "LOUD", tmp_path):
        assert code == 1
        assert err[-1].endswith(f" ort_zero.errors.ConfigError: ort_zero.ortmodule.log_level: {names}")
