"""The checkpoint that is meant by a folder is found, whoever laid it out; ``ort-zero ls`` lists what is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checkpoint_files
import pytest

from ort_zero.checkpoint import aggregate, verify
from ort_zero.checkpoint.finding import find
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.inspection.listing import list_checkpoints
from ort_zero.cli import main as cli
from ort_zero.errors import CheckpointError, CorruptCheckpointError

SHARD = "rank_00001_master.safetensors"


@pytest.fixture
def run(tmp_path) -> Path:
    """A folder as the Trainer leaves it: ``checkpoint-N`` with a tag and ``latest`` in each, other things beside."""
    for step in (8, 9, 10):
        inside = tmp_path / "run" / f"checkpoint-{step}"
        checkpoint_files.write(inside / f"global_step{step}", step=step, tag=f"global_step{step}")
        (inside / "latest").write_text(f"global_step{step}")
    (tmp_path / "run" / "runs" / "tensorboard").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    return tmp_path / "run"


def found(path: Path, tag: str | None = None) -> str:
    return str(Path(find(str(path), tag).folder.url).relative_to(path))


def test_the_newest_of_several_numbers_is_meant(run):
    assert found(run) == "checkpoint-10/global_step10"
    assert found(run, "checkpoint-9") == "checkpoint-9/global_step9"
    assert found(run, "global_step8") == "checkpoint-8/global_step8"
    assert found(run / "checkpoint-8") == "global_step8"
    assert found(run / "checkpoint-8" / "global_step8") == "."


def test_a_newer_one_that_is_not_whole_is_passed_over_and_named(run, tmp_path, capsys):
    (run / "checkpoint-10" / "global_step10" / SHARD).unlink()
    (run / "checkpoint-9" / "global_step9" / manifest.NAME).unlink()
    assert found(run) == "checkpoint-8/global_step8"
    report = verify(run, progress=False)
    assert report.ok and report.tag == "global_step8"
    assert [note.partition("skipped")[2] for note in report.notes] == [
        f", it is not whole: {SHARD} is missing",
        ", it is not whole: the save was interrupted",
    ]
    assert cli.main(["aggregate", str(run), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "checkpoint-8/global_step8" in out and "checkpoint-10 was skipped" in out
    (run / "checkpoint-8" / "global_step8" / SHARD).write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="no checkpoint in .* is whole: .*checkpoint-10 was skipped"):
        find(str(run))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("state/pytorch_model",), "state/pytorch_model"),
        (("version_0/checkpoints/last.ckpt/checkpoint",), "version_0/checkpoints/last.ckpt/checkpoint"),
        (("epoch=0-step=3.ckpt/checkpoint", "epoch=1-step=12.ckpt/checkpoint"), "epoch=1-step=12.ckpt/checkpoint"),
        (("checkpoint_0/pytorch_model", "checkpoint_1/pytorch_model"), "checkpoint_1/pytorch_model"),
        (("global_step5", "global_step20"), "global_step20"),
        (("run-a/good", "run-b/good"), None),
        (("good", "step_3"), None),
        (("epoch_1", "step_3"), None),
        (("run_1/x", "run_2/x"), None),
    ],
)  # fmt: skip
def test_folders_of_other_frameworks(tmp_path, names, expected):
    for name in names:
        checkpoint_files.write(tmp_path / name)
    if expected:
        assert found(tmp_path) == expected
        return
    with pytest.raises(CheckpointError, match="give a tag; tags there: " + ", ".join(sorted(names))):
        find(str(tmp_path))
    assert found(tmp_path, names[0]) == names[0]


def test_a_broken_latest_names_the_whole_ones(tmp_path):
    run = tmp_path / "run"
    for name in ("best", "last", "newest", "../outside"):
        checkpoint_files.write(run / name)
    (run / "latest").write_text("newest")
    (run / "newest" / SHARD).write_bytes(b"")
    report = verify(run, progress=False)
    assert not report.ok and any("whole checkpoints there: best, last" in note for note in report.notes)
    (run / "newest" / manifest.NAME).write_text("{")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="whole checkpoints there: best, last"):
            aggregate(run, tmp_path / "out", progress=False)
        (run / "newest" / manifest.NAME).write_bytes((run / "best" / manifest.NAME).read_bytes())
    for text, reason in (("gone", "names the tag 'gone'"), ("../outside", "leads out of"), ("", "empty")):
        (run / "latest").write_text(text)
        with pytest.raises(CheckpointError, match=f"{reason}.*whole checkpoints there: best, last") as caught:
            find(str(run))
        assert "tags there" not in str(caught.value)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist or is empty"):
        find(str(tmp_path / "missing"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / manifest.NAME).write_text('{"manifest_version": 3}')  # an extension of a browser
    with pytest.raises(CheckpointError, match="neither a checkpoint of ort_zero"):
        find(str(tmp_path))
    with pytest.raises(CheckpointError, match="holds no checkpoint, nor do folders in it"):
        list_checkpoints(tmp_path)


def test_ls(run, capsys):
    (run / "checkpoint-10" / "global_step10" / SHARD).unlink()
    (run / "checkpoint-9" / "latest").unlink()
    (run / "checkpoint-8" / "global_step8" / manifest.NAME).unlink()
    assert cli.main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tag", "format", "step", "ZeRO", "ranks", "size", "age", "whole"]
    assert [line.split()[0] for line in lines[1:]] == [f"checkpoint-{n}/global_step{n}" for n in (8, 9, 10)]
    assert lines[1].endswith("no: no manifest.json: the save was interrupted") and lines[2].endswith("yes")
    assert lines[3].split()[1] == "*" and lines[3].endswith(f"no: {SHARD} is missing")
    assert cli.main(["ls", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    row = rows[1]
    files = [path for path in (run / "checkpoint-9" / "global_step9").iterdir()]
    assert row["bytes"] == sum(path.stat().st_size for path in files) and 0 <= row["age"] < 600
    assert (row["step"], row["world_size"], row["zero_stage"], row["format"]) == (9, 3, 1, "ort_zero")
    assert [(r["whole"], r["latest"]) for r in rows] == [(False, True), (True, False), (False, True)]
    (run / "checkpoint-9" / "global_step9" / f".{SHARD}.0123456789abcdef.partial").write_bytes(bytes(3000))
    assert cli.main(["ls", str(run / "checkpoint-9")]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.endswith("yes; beside it 3.0 kB of an interrupted save")
    assert list_checkpoints(run / "checkpoint-9")[0].bytes == row["bytes"]
    assert cli.main(["ls", str(run / "nothing")]) == 2


def test_ls_of_a_remote_folder_and_of_deepspeed(tmp_path):
    golden = Path(__file__).parents[1] / "golden"
    shutil.copytree(golden / "deepspeed_zero3", tmp_path / "theirs")
    (row,) = list_checkpoints(tmp_path)
    assert (row.tag, row.format, row.step, row.zero_stage, row.world_size) == ("theirs/saved", "deepspeed", 3, 3, 2)
    assert row.whole and row.latest
    next((tmp_path / "theirs" / "saved").glob("*rank_1*optim*")).unlink()
    (row,) = list_checkpoints(tmp_path)
    assert row.whole is False and "is missing: 2 ranks wrote this checkpoint" in row.reason
    checkpoint_files.write("memory://ls/run/checkpoint-3/global_step3", step=3)
    (row,) = list_checkpoints("memory://ls")
    assert row.tag == "run/checkpoint-3/global_step3" and row.whole and row.age < 600
    assert find("memory://ls/run").folder.url == "memory://ls/run/checkpoint-3/global_step3"


@pytest.mark.parametrize("content", [
    b"global_step10\r\n", b"\xef\xbb\xbfglobal_step10\n", "global_step10\r\n".encode("utf-16"), b" ./global_step10/ \n",
], ids=["line end of Windows", "byte order mark", "UTF-16 of PowerShell", "path"])  # fmt: skip
def test_latest_as_editors_and_shells_write_it(run, content):
    (run / "checkpoint-10" / "latest").write_bytes(content)
    assert Path(found(run)) == Path("checkpoint-10/global_step10")


def test_links_that_lead_back_are_not_followed(run):
    (run / "again").symlink_to(run)
    (run / "checkpoint-9" / "up").symlink_to(run)
    (run / "gone").symlink_to(run / "nowhere")
    assert len(list_checkpoints(run)) == 3
    assert found(run) == "checkpoint-10/global_step10"


def test_a_tag_that_is_a_link_is_one_like_the_others(run):
    shutil.move(run / "checkpoint-10" / "global_step10", run.parent / "elsewhere")
    (run / "checkpoint-10" / "global_step10").symlink_to(run.parent / "elsewhere")
    assert found(run) == "checkpoint-10/global_step10" and verify(run, progress=False).ok
    assert [row.whole for row in list_checkpoints(run)] == [True] * 3


@pytest.mark.parametrize("name", ["latest", f"global_step10/{SHARD}"])
def test_a_file_in_the_place_of_a_folder_is_called_one(run, name):
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        aggregate(run / "checkpoint-10" / name, run.parent / "out", progress=False)
    with pytest.raises(CheckpointError, match="does not exist or is empty"):
        verify(run / "gone", progress=False)


def test_files_that_macos_makes_are_no_part_of_a_checkpoint(run):
    tag = run / "checkpoint-10" / "global_step10"
    for path in list(tag.iterdir()):
        (tag / f"._{path.name}").write_bytes(b"\0\5\x16\7")
    (tag / ".DS_Store").write_bytes(b"x")
    report = verify(run, progress=False)
    assert report.ok and report.tag == "global_step10", report.problems


@pytest.mark.parametrize("tag", ["\u0448\u0430\u0433 5", "a b#c", "100%", "q?x=1", "-rf", "[1]*", "x" * 200])
def test_tags_of_any_names(tmp_path, tag):
    checkpoint_files.write(tmp_path / "run" / tag, tag=tag)
    (tmp_path / "run" / "latest").write_text(tag)
    report = aggregate(tmp_path / "run", tmp_path / "out", progress=False)
    assert report.tag == tag and verify(tmp_path / "run", tag, progress=False).ok


def test_a_checkpoint_of_deepspeeds_under_the_same_tag_is_named(run):
    tag = run / "checkpoint-10" / "global_step10"
    (tag / "mp_rank_00_model_states.pt").write_bytes(b"x")
    report = aggregate(run, run.parent / "out", progress=False)
    (warning,) = report.warnings
    assert "mp_rank_00_model_states.pt is of a checkpoint that DeepSpeed" in warning
    assert any("DeepSpeed wrote under the same tag" in note for note in verify(run, progress=False).notes)
