"""No secret of a URL is printed, logged or stored, whatever a command does with it and however it fails."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_files
import fsspec
import pytest

from ort_zero.checkpoint import aggregate, diff, list_checkpoints, verify
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.cli import main as cli
from ort_zero.errors import CheckpointError, CorruptCheckpointError, RankError
from ort_zero.masking import masked, without_folders

SECRET = "hunter2"
URL = f"memory://user:{SECRET}@host/run"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://key:hunter2@bucket/a", "s3://***@bucket/a"),
        ("https://host/a?sv=1&sig=hunter2", "https://host/a?***"),
        ("'https://hunter2@host:80/a/b@c' and gs://b", "'https://***@host:80/a/b@c' and gs://b"),
        ("simplecache::abfs://c@acc/x?hunter2: gone", "simplecache::abfs://***@acc/x?***"),
        ('{"a": "ftp://u:hunter2@h/x"}', '{"a": "ftp://***@h/x"}'),
        ("/local/path@x?y=1", "/local/path@x?y=1"),
    ],
)
def test_masked(text, expected):
    assert masked(text).startswith(expected) and SECRET not in masked(text)
    for error in (CheckpointError(text), CorruptCheckpointError(text), RankError(text, {0: text})):
        assert SECRET not in str(error) + repr(error) + str(getattr(error, "failures", ""))


def test_a_web_address_keeps_its_query_at_its_end():
    folder = open_folder("https://user:hunter2@host/a?token=hunter2")
    assert folder.child("b").url == "https://user:hunter2@host/a/b?token=hunter2"
    assert folder.path("c") == "https://***@host/a?***/c"


@pytest.fixture
def there():
    checkpoint_files.write(f"{URL}/checkpoint-3/global_step3", tag="global_step3", step=3)
    open_folder(f"{URL}/checkpoint-3").write("latest", b"global_step3", "t")
    yield URL
    fsspec.filesystem("memory").rm("/", recursive=True)


def contents(folder: Path) -> str:
    return "".join(
        path.read_bytes().decode(errors="replace") + path.name for path in folder.rglob("*") if path.is_file()
    )


def test_nothing_that_commands_print_or_write_holds_a_secret(there, tmp_path, capfd):
    out, remote = str(tmp_path / "out"), f"memory://user:{SECRET}@host/model"
    commands = [
        (["ls", there], 0),
        (["verify", there], 0),
        (["aggregate", there, out], 0),
        (["aggregate", there, remote], 0),
        (["diff", there, out], 0),
        (["diff", there, remote], 0),
        (["aggregate", there, remote], 2),
        (["aggregate", f"{there}/nothing", out], 2),
        (["aggregate", there, out, "--tag", "nothing"], 2),
        (["verify", f"{there}/nothing"], 2),
        (["ls", f"{there}/nothing"], 2),
        (["diff", there, f"{there}/nothing"], 2),
        (["verify", f"nosuch://user:{SECRET}@host/x?token={SECRET}"], 2),
    ]
    for command, status in commands:
        for more in ([], ["--json"], ["--debug"]):
            again = command[0] == "aggregate" and status == 0 and more
            assert cli.main([*command, *(["--overwrite"] if again else []), *more]) == status, command
    text = "".join(capfd.readouterr())
    assert "://***@host/run" in text and "global_step3" in text
    assert SECRET not in text, text[max(0, text.index(SECRET) - 300) : text.index(SECRET) + 50]
    memory = fsspec.filesystem("memory")
    stored = b"".join(memory.cat_file(path) for path in memory.find("/"))
    assert SECRET not in contents(tmp_path) and SECRET.encode() not in stored
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_damaged_files_and_reports(there, tmp_path, capfd):
    fsspec.filesystem("memory").pipe_file(
        f"/user:{SECRET}@host/run/checkpoint-3/global_step3/rank_00001_master.safetensors", b""
    )
    report = verify(there, progress=False)
    assert not report.ok and list_checkpoints(there)[0].whole is False
    with pytest.raises(CheckpointError) as caught:
        aggregate(there, tmp_path / "out", progress=False)
    with pytest.raises(CheckpointError) as other:
        diff(there, there, progress=False)
    said = f"{report}{list_checkpoints(there)}{caught.value!r}{other.value!r}"
    assert "rank_00001_master" in said and SECRET not in said
    assert cli.main(["ls", there, "--json"]) == 0
    assert SECRET not in json.dumps(json.loads(capfd.readouterr().out))


def test_a_bug_report_names_no_folder_and_no_secret(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "of alice"
    folder.mkdir()
    section = {"save_onnx": str(folder / "onnx"), "statistics": {"output_dir": URL}, "exclude": ["*.router"]}
    config = folder / "ds.json"
    config.write_text(json.dumps({"optimizer": {"type": "Lion7"}, "ort_zero": section}))
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", f"{tmp_path}/of_alice/cache")
    cli.main(["doctor", "--report", str(config)])
    said = capsys.readouterr().out
    assert said.startswith("```\n") and said.endswith("```\n")
    assert '"save_onnx": ".../onnx"' in said and "*.router" in said and "ORT_ZERO_CACHE_DIR=.../cache" in said
    assert not [word for word in ("alice", str(tmp_path), SECRET, "Lion7", "/home") if word in said], said


@pytest.mark.parametrize(
    "text, shown",
    [
        ("python /opt/a/b/python3 (x)", "python .../python3 (x)"),
        ("a=~/x/y,b=../c/d", "a=.../y,b=.../d"),
        ("no a/b path, 2 /s, https://host/a/b", "no a/b path, 2 .../s, https://host/a/b"),
    ],
)
def test_folders_are_masked(text, shown):
    assert without_folders(text) == shown
