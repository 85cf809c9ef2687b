"""Claim a run's folder for one run; files that ort_zero did not write are never deleted.

The first rank of a run writes the run's id into ``run.json``. Ranks do not communicate here: the other ranks compare
the id in that file with the id of their run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ort_zero.errors import StatisticsError
from ort_zero.statistics.records import FILE, FORMAT, MANIFEST
from ort_zero.statistics.run_folder import CLAIM, LOCK, rank_folders, rank_name, read_manifest, write_json
from ort_zero.utils.atomic_write import PARTIAL

_OUR_NAMES = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(FILE)}|\.{re.escape(MANIFEST)}\..*\{PARTIAL}")
_LOCK_SECONDS = 60


def taken(folder: Path) -> StatisticsError:
    """Return the error for a folder with another run's statistics."""
    return StatisticsError(
        f"{folder} holds the statistics of another run; choose another output_dir, or pass override_output_dir=True "
        "to delete them"
    )


@contextmanager
def taken_over(output: Path, rank: int, world_size: int, *, run_id: str, override: bool = False) -> Iterator[Path]:
    """Claim the folder for this run and create an empty folder for the rank, while other ranks wait for the lock.

    The claim lists the runs that lost the folder to a later run. A rank of such a run raises: else two runs that start
    at the same moment would take the folder from each other, rank by rank.

    Args:
        output: the run's folder, the same for all its ranks; it is created if it does not exist.
        rank: number of this rank.
        world_size: number of ranks.
        run_id: unique id of this run, the same on all its ranks.
        override: delete the statistics of another run in the folder; files of other programs are an error.

    Yields:
        The empty folder of the rank; the caller creates the rank's files in the block.

    Raises:
        StatisticsError: another run has the folder, or the folder has files that ort_zero did not write.
        OSError: the folder cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        claim = _read_claim(output)
        is_ours = claim is not None and claim["run_id"] == run_id
        superseded = [*claim["superseded"], claim["run_id"]] if claim is not None else []
        if run_id in superseded and not is_ours:
            raise StatisticsError(f"another run took {output} over while this one started; choose another output_dir")
        old = [
            folder
            for number, folder in rank_folders(output).items()
            if not is_ours or number == rank or (override and rank == 0 and number >= world_size)
        ]
        if not override and (old or (claim is not None and not is_ours)):
            raise taken(old[0] if is_ours else output)
        for folder in old:
            _refuse_foreign(folder)
        if not is_ours:
            write_json(output / CLAIM, {"format": FORMAT, "run_id": run_id, "superseded": superseded[-100:]})
        for folder in old:
            for path in folder.iterdir():
                path.unlink(missing_ok=True)
            folder.rmdir()
        folder = output / rank_name(rank)
        folder.mkdir()
        yield folder


@contextmanager
def _locked(output: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        try:
            stack.enter_context(FileLock(output / LOCK, timeout=_LOCK_SECONDS))
        except Timeout:
            raise StatisticsError(f"{output / LOCK} has been locked for {_LOCK_SECONDS} s by another process") from None
        except NotImplementedError:
            pass  # no locks here: if runs start within milliseconds, the reader detects mixed files by the run ids
        yield


def _read_claim(output: Path) -> dict[str, Any] | None:
    try:
        claim = json.loads((output / CLAIM).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        claim = None
    if not isinstance(claim, dict) or claim.get("format") != FORMAT:
        raise StatisticsError(f"{output / CLAIM} was not written by ort_zero; choose another output_dir")
    return claim


def _refuse_foreign(folder: Path) -> None:
    """Raise if ort_zero did not write all files in a rank's folder."""
    if folder.is_symlink() or not folder.is_dir():
        raise StatisticsError(f"{folder} is not a folder of ort_zero's statistics, and is not deleted")
    for path in sorted(folder.iterdir()):
        if not _OUR_NAMES.fullmatch(path.name) or path.is_dir():
            raise StatisticsError(f"{path} is not a file of ort_zero's statistics: {folder} is not deleted")
    manifest = folder / MANIFEST
    if manifest.exists() and read_manifest(manifest).get("format") != FORMAT:
        raise StatisticsError(f"{manifest} was not written by ort_zero: {folder} is not deleted")
