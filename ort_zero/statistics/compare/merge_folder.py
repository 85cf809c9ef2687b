"""The folder into which two runs are merged: made, or emptied of an earlier merge, and of nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ort_zero.errors import StatisticsError

SUMMARY = "summary.csv"
MARKER = "merge.json"
"""Name of the file that says that a folder is ours."""
FORMAT = "ort_zero merged statistics"
_STEP_NAME = re.compile(r"step_\d+")
_TEXT_NAME = re.compile(r"rank_\d+\.txt")


def prepare_folder(output: Path, overwrite: bool) -> None:
    """Leave an empty folder with our marker, or raise and change nothing."""
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
    """Return the files at or in an entry of the folder, all of which an earlier merge wrote.

    Raises:
        StatisticsError: something else is there.
    """
    files = [entry]
    if entry.is_dir() and not entry.is_symlink() and _STEP_NAME.fullmatch(entry.name):
        files = sorted(entry.iterdir())
        known = [file.is_file() and _is_our_name(file.name) for file in files]
    else:
        known = [not entry.is_symlink() and entry.is_file() and entry.name in (SUMMARY, MARKER)]
    for file, is_ours in zip(files, known):
        if not is_ours:
            raise StatisticsError(f"{file} was not written by merge: nothing is deleted; choose another output_dir")
    return files


def _is_our_name(name: str) -> bool:
    return name in (SUMMARY, MARKER) or _TEXT_NAME.fullmatch(name) is not None
