"""What every package writes with: sizes, tables, phrases, files that appear complete."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ort_zero import env
from ort_zero.utils import atomic_write
from ort_zero.utils.sizes import binary_size, decimal_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("2GiB", 2 << 30), ("1.5 kib", 1536), ("77", 77), (9, 9), ("8B", 8)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-1", "0", "5 GB 3", "1e9", "nan", None, "5G", "0.5B", "7%"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size; write it as 5GB"):
        parse_size(text)


def test_bare_letters_are_powers_of_1024_where_they_are_allowed():
    assert parse_size("6G", bare_letters=True) == 6 << 30 and parse_size("6GB", bare_letters=True) == 6 * 10**9


@pytest.mark.parametrize(
    ("shown", "size", "text"),
    [
        (decimal_size, 999, "999 B"), (decimal_size, 1000, "1.0 kB"), (decimal_size, 1_550_000, "1.6 MB"),
        (decimal_size, 5 * 10**12, "5000.00 GB"), (binary_size, 1023, "1023 B"), (binary_size, 1024, "1 KiB"),
        (binary_size, -(3 << 20), "-3 MiB"), (binary_size, 3 << 29, "1.50 GiB"),
    ],
)  # fmt: skip
def test_readable_sizes(shown, size, text):
    assert shown(size) == text


def test_the_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 7}, raising=False)
    assert env.usable_cores() == 3


def test_files_of_bytes_text_and_json(tmp_path):
    atomic_write.write_bytes(tmp_path / "a", b"\x00\xff")
    atomic_write.write_text(tmp_path / "b", "\u00e9")
    atomic_write.write_json(tmp_path / "c", {"x": Path("y")}, default=str)
    assert (tmp_path / "a").read_bytes() == b"\x00\xff" and (tmp_path / "b").read_bytes() == b"\xc3\xa9"
    assert json.loads((tmp_path / "c").read_text()) == {"x": "y"} and len(os.listdir(tmp_path)) == 3


def test_a_file_is_as_it_was_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path, replace = tmp_path / "a", os.replace
    path.write_text("old")

    def observed(partial, final):
        assert path.read_text() == "old" and partial.read_text() == "new" and final == path
        assert partial.name.startswith(".a.") and partial.name.endswith(atomic_write.PARTIAL)
        replace(partial, final)

    monkeypatch.setattr(os, "replace", observed)
    atomic_write.write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a"]


def test_nothing_is_left_of_a_file_that_failed(tmp_path):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        atomic_write.write_text(tmp_path / "folder", "cannot replace a folder")
    assert os.listdir(tmp_path) == ["folder"]
