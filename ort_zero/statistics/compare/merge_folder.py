"""Prepare the output folder of a merge: create it, or delete the files of an earlier merge and no other files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ort_zero.errors import StatisticsError

SUMMARY = "summary.csv"
MARKER = "merge.json"
"""Name of the file that marks a folder as the output of a merge."""
FORMAT = "ort_zero merged statistics"
_STEP_NAME = re.compile(r"step_\d+")
_TEXT_NAME = re.compile(r"rank_\d+\.txt")


def prepare_folder(output: Path, overwrite: bool) -> None:
    """Prepare an empty folder with the marker file, or raise and change nothing."""
    output.mkdir(parents=True, exist_ok=True)
    entries = sorted(output.iterdir())
    if entries:
        if not _is_ours(output):
            raise StatisticsError(f"{output} is not empty and was not written by merge; choose another output_dir")
        if not overwrite:
            raise StatisticsError(f"{output} holds an earlier merge; pass --overwrite (overwrite=True) to replace it")
        old = [path for entry in entries for path in _our_files(entry)]
        for path in old:
            path.unlink()
        for entry in entries:
            if entry.is_dir():
                entry.rmdir()
    (output / MARKER).write_text(json.dumps({"format": FORMAT}), encoding="utf-8")


def _is_ours(output: Path) -> bool:
    try:
        return json.loads((output / MARKER).read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _our_files(entry: Path) -> list[Path]:
    """Return the entry itself if it is a file, or the files in it, after checking that a merge wrote all of them.

    Raises:
        StatisticsError: a file was not written by a merge.
    """
    files = [entry]
    if entry.is_dir() and not entry.is_symlink() and _STEP_NAME.fullmatch(entry.name):
        files = sorted(entry.iterdir())
        ours = [file.is_file() and _is_our_name(file.name) for file in files]
    else:
        ours = [not entry.is_symlink() and entry.is_file() and entry.name in (SUMMARY, MARKER)]
    for file, is_ours in zip(files, ours):
        if not is_ours:
            raise StatisticsError(f"{file} was not written by merge: nothing is deleted; choose another output_dir")
    return files


def _is_our_name(name: str) -> bool:
    return name in (SUMMARY, MARKER) or _TEXT_NAME.fullmatch(name) is not None
