"""List the checkpoints in a folder of runs: format, size, age, and whether each checkpoint is whole."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.finding import Candidate, checkpoints_below, condition_of
from ort_zero.checkpoint.format import manifest
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint in a folder of checkpoints."""

    tag: str
    """Path of the checkpoint's folder, relative to the folder that was listed."""
    root: str
    """Folder or URL of the checkpoint."""
    format: str | None
    """Format: "ort_zero", "deepspeed" or "dcp"; None if a save was interrupted."""
    latest: bool
    """True if the file ``latest`` in the folder above names this checkpoint."""
    step: int | None
    """Global steps of the engine; None if the checkpoint cannot be opened or does not tell."""
    zero_stage: int | None
    world_size: int | None
    bytes: int
    """Size of all files in the checkpoint's folder but `partial_bytes`, and of its files in inner folders."""
    partial_bytes: int
    """Size of the files that an interrupted save left incomplete."""
    left_out: tuple[str, ...]
    """Names of the frozen parameters that the save left out."""
    modified: float | None
    """Time at which the newest file was written, in seconds since 1970; None where the store does not tell."""
    age: float | None
    """Seconds since `modified`."""
    whole: bool | None
    """True: all files are there, with their sizes, and belong together (``ort-zero verify`` reads their bytes too);
    None: a kind of checkpoint that ort_zero cannot read."""
    reason: str | None
    """Why `whole` is not True."""


def list_checkpoints(path: str | os.PathLike, tp_split: Sequence[str] = ()) -> tuple[ListedCheckpoint, ...]:
    """Return the checkpoints in `path` and in the folders below; no tensor is read.

    Args:
        path: folder or fsspec URL: of runs, of one run, of checkpoints, or of one checkpoint.
        tp_split: rules for how tensor-parallel ranks share tensors, as for ``aggregate``.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    folder = open_folder(path)
    now = time.time()
    checkpoints = tuple(_listed(candidate, now, tp_split) for candidate in checkpoints_below(folder))
    if not checkpoints:
        missing = "does not exist or is empty" if not folder.names() else "holds no checkpoint, nor do folders in it"
        raise CheckpointError(f"{folder.path()} {missing}")
    return checkpoints


def _listed(candidate: Candidate, now: float, tp_split: Sequence[str]) -> ListedCheckpoint:
    folder = candidate.folder
    condition = condition_of(candidate, tp_split)
    source = condition.source
    names = [name for name in folder.names() if folder.exists(name)]
    names += [name for name in (source.files if source else ()) if "/" in name]
    partial = [name for name in names if name.endswith(PARTIAL)]
    times = [at for name in names if (at := folder.modified(name)) is not None]
    modified = max(times, default=None)
    return ListedCheckpoint(
        tag=candidate.name,
        root=folder.path(),
        format=candidate.format,
        latest=_is_latest(folder),
        step=source.step if source else None,
        zero_stage=source.zero_stage if source else None,
        world_size=source.world_size if source else None,
        bytes=sum(folder.size(name) or 0 for name in names if name not in partial),
        partial_bytes=sum(folder.size(name) or 0 for name in partial),
        left_out=tuple(sorted(source.left_out)) if source else (),
        modified=modified,
        age=None if modified is None else max(0.0, now - modified),
        whole=condition.whole,
        reason=condition.reason,
    )


def _is_latest(folder: Folder) -> bool:
    url = folder.url if "://" in folder.url else os.path.abspath(folder.url)
    above, _, name = url.rpartition("/")
    try:
        return bool(above) and manifest.resolve_tag(open_folder(above), None) == name
    except CheckpointError:
        return False
