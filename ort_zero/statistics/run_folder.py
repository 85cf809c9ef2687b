"""Name the files in a run's folder, and read the manifests of its ranks.

A run's folder holds ``run.json`` with the run's id, and one folder per rank, ``rank_00000`` and so on. Each rank's
folder has a manifest and the statistics.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ort_zero.errors import StatisticsError
from ort_zero.statistics.records import MANIFEST
from ort_zero.utils import atomic_write

CLAIM = "run.json"
"""Name of the file in a run's folder with the id of the run that owns the folder."""
LOCK = ".run.lock"
_RANK_NAME = re.compile(r"rank_(\d{5,})")


def local_folder(path: str | os.PathLike) -> Path:
    """Return the path of a statistics folder from a path or a ``file://`` URL.

    Raises:
        StatisticsError: the folder is not on a local file system.
    """
    text = os.fspath(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" in text:
        raise StatisticsError(f"{text} is not a local folder: statistics grow by appending, which object stores cannot")
    return Path(text)


def rank_name(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank_{rank:05d}"


def rank_folders(output: Path) -> dict[int, Path]:
    """Return the folders of the ranks in a run's folder, by rank, in ascending order."""
    matches = ((_RANK_NAME.fullmatch(name), name) for name in os.listdir(output))
    return dict(sorted((int(match[1]), output / name) for match, name in matches if match))


def run_folder(path: str | os.PathLike) -> Path:
    """Return the path of a run's folder, also from the path of a rank's folder in it.

    Raises:
        StatisticsError: the folder is not on a local file system.
    """
    folder = local_folder(path)
    if _RANK_NAME.fullmatch(folder.absolute().name) and (folder / MANIFEST).exists():
        return folder.absolute().parent
    return folder


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a rank.

    Raises:
        StatisticsError: the manifest cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StatisticsError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise StatisticsError(f"cannot read {path}: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise StatisticsError(f"{path} is damaged: it holds no JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file at once: other processes see the whole file or none."""
    atomic_write.write_json(path, content, indent=1, default=str)
