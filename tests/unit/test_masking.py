"""No secret of a URL is printed, logged or stored, whatever a command does with it and however it fails."""

from __future__ import annotations

import json

import pytest

from ort_zero.cli import main as cli
from ort_zero.errors import CheckpointError, CorruptCheckpointError, RankError
from ort_zero.utils.masking import masked, without_folders

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
