"""Append the statistics of one rank to its file, step by step."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from typing import Any

import numpy as np

from ort_zero import env
from ort_zero.errors import StatisticsError
from ort_zero.log import get_logger
from ort_zero.statistics.collect.folder_claim import taken_over
from ort_zero.statistics.file_format import END, HEADER, encode_step
from ort_zero.statistics.records import FILE, FORMAT, FORMAT_VERSION, MANIFEST
from ort_zero.statistics.run_folder import local_folder, rank_name, write_json


class StatisticsWriter:
    """The open statistics file of one rank. After the start, errors of the disk are logged and never raised.

    Attributes:
        folder: the rank's folder.
        alive: False after :meth:`close`, or once a step could not be written; the file then ends at a full step.
        steps: number of steps in the file.
        size: size of the file in bytes.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike,
        rank: int,
        world_size: int,
        *,
        override: bool = False,
        manifest: Mapping[str, Any],
    ):
        """Create the rank's folder and its files.

        Args:
            output_dir: the run's folder, the same for all its ranks; it is created if it does not exist.
            rank: number of this rank.
            world_size: number of ranks.
            override: delete the statistics of another run in the folder; files of other programs are an error.
            manifest: ``run_id`` (unique, the same on all ranks of the run), ``backend``, ``zero_stage``, ``dtype``,
                ``model``, ``model_digest``, ``parameters``, and other values for the reader.

        Raises:
            StatisticsError: another run has the folder, or the folder cannot be written.
        """
        output = local_folder(output_dir)
        self.folder = output / rank_name(rank)
        self._last = -1
        self._owner = os.getpid()
        self.steps, self.size = 0, len(HEADER)
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **manifest,
            "rank": rank,
            "world_size": world_size,
        }
        try:
            with taken_over(output, rank, world_size, run_id=str(manifest["run_id"]), override=override):
                with ExitStack() as stack:
                    self._file = stack.enter_context(open(self.folder / FILE, "xb", buffering=0))
                    _write_all(self._file, HEADER)
                    # the manifest is written last: a folder with a manifest has a statistics file with a header
                    write_json(self.folder / MANIFEST, content)
                    stack.pop_all()  # the file stays open
        except OSError as error:
            raise StatisticsError(
                f"cannot write statistics into {self.folder}: {error.strerror or error}; choose another output_dir, "
                "or make room and give this user the right to write there"
            ) from error
        self.alive = True

    def append(self, step: int, described: Mapping[str, Sequence], raw: np.ndarray) -> None:
        """Write one whole step; after an error of the file system warn once, and ignore all further steps.

        For the arguments see :func:`~ort_zero.statistics.file_format.encode_step`.

        Raises:
            ValueError: `step` is not larger than the last step, or the columns have different lengths.
        """
        if step <= self._last:
            raise ValueError(f"step {step} comes after step {self._last}")
        # a forked child shares the descriptor, but only the parent may write
        if not self.alive or os.getpid() != self._owner:
            return
        data = encode_step(step, described, raw)
        self._last = step
        try:
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was deleted, or another run took the folder over")
            _write_all(self._file, data)
        except OSError as error:
            self._end(error)
            # warnings of ranks other than 0 are not shown, and the disk may be full on this rank alone
            tell = get_logger().warning if env.rank() == 0 else get_logger().error
            tell(
                f"statistics end before step {step}, training goes on: cannot write {self.folder / FILE}: "
                f"{error.strerror or error}; it holds {self.steps} full steps"
            )
            return
        self.size += len(data)
        self.steps += 1

    def _end(self, error: OSError | None = None) -> None:
        """Close the file; after an error remove an incomplete step, which readers would ignore."""
        self.alive = False
        with suppress(OSError):  # a network file system may report write errors only at close
            if error is not None:
                self._file.truncate(self.size)
        with suppress(OSError):
            self._file.close()

    def close(self) -> None:
        """End the file properly; further steps are ignored."""
        if self.alive and os.getpid() == self._owner:
            try:
                _write_all(self._file, END)
                self.size += len(END)
            except OSError as error:
                self._end(error)
        self._end()

    def __enter__(self) -> StatisticsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _write_all(file: FileIO, data: bytes) -> None:
    """Write all bytes; a nearly full disk accepts a part first, and then raises."""
    done = file.write(data)
    while done < len(data):
        done += file.write(data[done:])
