"""Append the statistics of one rank to its file, step by step."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from ort_zero import env
from ort_zero.errors import StatisticsError
from ort_zero.log import get_logger
from ort_zero.statistics.files import END, encode_step, file_name, files_in, header_of, local_folder, read_manifest
from ort_zero.utils.atomic_write import partial_name


def taken(place: Path) -> StatisticsError:
    """Return the error for a folder with another run's statistics."""
    return StatisticsError(
        f"{place} holds the statistics of another run; choose another output_dir, or pass override_output_dir=True to "
        "delete them"
    )


class StatisticsWriter:
    """The open statistics file of one rank. After the start, errors of the disk are logged and never raised.

    Attributes:
        path: the file.
        alive: False after :meth:`close`, or once a step could not be written; the file then ends at a full step.
        steps: number of steps in the file.

    Args:
        output_dir: the run's folder, the same for all its ranks; it is created if it does not exist.
        override: delete the statistics of another run in the folder; files of other programs stay.
        manifest: the run's manifest for this rank, see :func:`~.manifest.manifest_of`.

    Raises:
        StatisticsError: another run has the folder, or the folder cannot be written.
    """

    def __init__(self, output_dir: str | os.PathLike, *, override: bool = False, manifest: Mapping[str, Any]):
        folder = local_folder(output_dir)
        self.path = folder / file_name(manifest["rank"], manifest["start_step"])
        self._owner = os.getpid()
        self.steps = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _make_room(folder, manifest, self.path, override)
            # under its name the file has its whole header: another rank may read it at any moment
            partial = folder / partial_name(self.path.name, str(os.getpid()))
            self._file = open(partial, "wb", buffering=0)
            try:
                self._size = _write_all(self._file, header_of(manifest))
                os.replace(partial, self.path)
            except OSError:
                self._file.close()
                partial.unlink()
                raise
        except OSError as error:
            raise StatisticsError(
                f"cannot write statistics into {folder}: {error.strerror or error}; choose another output_dir, or make "
                "room and give this user the right to write there"
            ) from error
        self.alive = True

    def append(self, step: int, described: Mapping[str, Sequence], raw: np.ndarray, facts: str = "") -> None:
        """Write one whole step; after an error of the file system warn once, and ignore all further steps.

        For the arguments see :func:`~ort_zero.statistics.files.encode_step`.
        """
        # a forked child shares the descriptor, but only the parent may write
        if not self.alive or os.getpid() != self._owner:
            return
        data = encode_step(step, described, raw, facts)
        try:
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was deleted, or another run took the folder over")
            self._size += _write_all(self._file, data)
        except OSError as error:
            self._end(error)
            # warnings of ranks other than 0 are not shown, and the disk may be full on this rank alone
            tell = get_logger().warning if env.rank() == 0 else get_logger().error
            tell(
                f"statistics end before step {step}, training goes on: cannot write {self.path}: "
                f"{error.strerror or error}; it holds {self.steps} full steps"
            )
            return
        self.steps += 1

    def _end(self, error: OSError | None = None) -> None:
        """Close the file; after an error remove an incomplete step, which readers would ignore."""
        self.alive = False
        with suppress(OSError):  # a network file system may report write errors only at close
            if error is not None:
                self._file.truncate(self._size)
        with suppress(OSError):
            self._file.close()

    def close(self) -> None:
        """End the file properly; further steps are ignored."""
        if self.alive and os.getpid() == self._owner:
            try:
                _write_all(self._file, END)
            except OSError as error:
                self._end(error)
        self._end()


def _make_room(folder: Path, manifest: Mapping[str, Any], mine: Path, override: bool) -> None:
    """Delete the files that other runs, or earlier ones of this range, have left in a folder, or raise.

    Each rank deletes the files of its own number, and rank 0 those of ranks that this run does not have: between the
    reading and the deleting of another rank's file, that rank could replace the file.
    """
    for path, rank in files_in(folder).items():
        found = read_manifest(path)
        if path != mine and found is not None and found["run_id"] == manifest["run_id"]:
            continue
        if not override:
            raise taken(folder)
        if rank == manifest["rank"] or (manifest["rank"] == 0 and rank >= manifest["world_size"]):
            path.unlink(missing_ok=True)


def _write_all(file: FileIO, data: bytes) -> int:
    """Write all bytes and return their number; a nearly full disk accepts a part first, and then raises."""
    done = file.write(data)
    while done < len(data):
        done += file.write(data[done:])
    return done
