"""``verify`` and its command: every fault of either format is named with its file."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import checkpoint_files
import deepspeed_states
import pytest
import torch
from damage import flipped
from deepspeed_states import GOLDEN
from older_versions import older

from ort_zero.checkpoint.inspection.verification import VerifyReport, verify
from ort_zero.cli import main as cli

SHARD = "rank_00001_master.safetensors"
OTHER = "rank_00000_master.safetensors"
STATES = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODULE = "mp_rank_00_model_states.pt"


@pytest.fixture
def ours(tmp_path) -> Path:
    checkpoint_files.write(tmp_path / "c")
    return tmp_path / "c"


def check(folder: Path) -> VerifyReport:
    return verify(str(folder), progress=False)


def one_problem(folder: Path, file: str, reason: str) -> None:
    problems = check(folder).problems
    assert len(problems) == 1 and file in problems[0] and re.search(reason, problems[0]), problems


@pytest.mark.parametrize("kind", ["a FIFO", "a folder"])
@pytest.mark.parametrize(
    ("checkpoint", "file"),
    [("deepspeed_zero2", MODULE), ("checkpoint_v5", SHARD)],
)
def test_what_is_no_file_makes_a_checkpoint_bad_and_hides_no_other_problem(tmp_path, capsys, checkpoint, file, kind):
    folder = shutil.copytree(GOLDEN / checkpoint / "saved", tmp_path / "saved")
    (folder / file).unlink()
    os.mkfifo(folder / file) if kind == "a FIFO" else (folder / file).mkdir()
    assert cli.main(["verify", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["problems"]) == 1 and f"{file} is {kind}" in report["problems"][0]
    other = folder / ("zero_pp_rank_0_mp_rank_00_optim_states.pt" if checkpoint == "deepspeed_zero2" else OTHER)
    data = bytearray(other.read_bytes())
    data[len(data) // 2] ^= 1
    other.write_bytes(data)
    assert cli.main(["verify", str(folder), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 2


def test_a_sound_checkpoint_is_read_completely(ours):
    report = check(ours)
    assert report.ok and report.format == "ort_zero" and report.tag == "global_step7" and not report.notes
    assert report.files == 10 and report.tensors == 16
    assert report.bytes == sum(path.stat().st_size for path in ours.iterdir())


def test_files_of_an_interrupted_save_of_the_same_tag_are_notes(ours):
    """Before the new manifest the new files lie beside the old ones, and after it the old ones beside the new."""
    for name in ("rank_00000_master.0123abcd.safetensors", "rank_00000_extra.0123abcd.json"):
        (ours / name).write_text("")
    report = check(ours)
    assert report.ok and len(report.notes) == 2
    assert all("left over from an interrupted save of this tag" in note for note in report.notes)
    (ours / "rank_00009_extra.json").write_text("{}")
    one_problem(
        ours, "rank_00009_extra.json", "one too many.* a save on more ranks than this one's 3, perhaps an interrupted"
    )


def test_extra_shards_are_problems_and_left_overs_are_notes(ours):
    shutil.copy(ours / SHARD, ours / "rank_00003_master.safetensors")
    (ours / f".{SHARD}.1234.partial").write_bytes(b"x")
    (ours / "README.md").write_text("mine")
    one_problem(ours, "rank_00003_master.safetensors", "one too many")
    assert len(check(ours).notes) == 1 and ".partial" in check(ours).notes[0]


@pytest.mark.skipif(older("torch", "2.6"), reason="this torch leaves no checksum out")
def test_files_without_checksums_are_no_problem_and_are_noted(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        deepspeed_states.write(tmp_path / "c", 2, lambda name, content: None)
    finally:
        torch.serialization.set_crc32_options(True)
    report = check(tmp_path / "c")
    assert report.ok and report.tensors == deepspeed_states.TENSORS, report.problems
    assert any("without checksums" in note and STATES in note for note in report.notes)
    data = bytearray((tmp_path / "c" / STATES).read_bytes())
    (tmp_path / "c" / STATES).write_bytes(data[:-30])
    one_problem(tmp_path / "c", STATES, "truncated")


def test_command(ours, tmp_path, capsys):
    assert cli.main(["verify", str(ours), "--workers", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"ok: {ours} (ort_zero, 16 tensors), 10 files")
    (ours / SHARD).unlink()
    flipped(OTHER, -1)(ours)
    assert cli.main(["verify", str(ours)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("problem: ") for line in lines] == [True, True, False] and "2 problem(s)" in lines[2]
    assert cli.main(["verify", str(ours), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and len(report["problems"]) == 2
    assert cli.main(["verify", str(tmp_path / "missing")]) == 2
    assert cli.main(["verify", str(ours), "--tag", "no"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
