"""Read the statistics of a run: all manifests at once, the steps one at a time.

A run's folder holds one folder per rank, ``rank_00000/`` and so on. Each has ``manifest.json`` (the run's model,
backend and versions) and ``statistics.arrow``, see :mod:`.file_format`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ort_zero.errors import StatisticsError
from ort_zero.statistics import extra
from ort_zero.statistics.file_format import END, HEADER, SCHEMA, STAMP_PATTERN, Table, checksum_fits, decode_step
from ort_zero.statistics.records import FILE, FORMAT, FORMAT_VERSION, MANIFEST, RunInfo
from ort_zero.statistics.run_folder import CLAIM, LOCK, rank_folders, rank_name, read_manifest, run_folder
from ort_zero.utils.text import shortened

with extra.required():
    import pyarrow as pa


class StepLocation(NamedTuple):
    """The position of one step in a statistics file."""

    number: int
    """Number of the step."""
    offset: int
    """Offset of the step in the file, in bytes."""
    length: int
    """Size of the step, in bytes."""


def locate_steps(file: pa.NativeFile, path: Path) -> tuple[list[StepLocation], bool, int]:
    """Return the positions of the full steps, whether the file has an end mark, and the bytes after the last step."""
    size = file.size()
    try:
        schema = pa.ipc.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        file.seek(0)
        if size < len(HEADER) and HEADER.startswith(file.read()):
            return [], False, size
        raise StatisticsError(f"{path} is damaged: it does not begin as an Arrow stream: {error}") from error
    if not schema.equals(SCHEMA, check_metadata=True):
        raise StatisticsError(f"{path} has a header that is not of ort_zero's statistics")
    steps: list[StepLocation] = []
    end = file.tell()
    while end < size:
        try:
            message = pa.ipc.read_message(file)
        except (EOFError, pa.ArrowException, OSError):
            break  # the end mark, zeros that a crash of the machine has left, or an incomplete step
        stamp = STAMP_PATTERN.search(memoryview(message.metadata))
        if stamp is None or (steps and int(stamp[1]) <= steps[-1].number):
            raise StatisticsError(f"{path} is damaged at byte {end}, after {len(steps)} steps")
        steps.append(StepLocation(int(stamp[1]), end, file.tell() - end))
        end = file.tell()
    file.seek(end)
    if file.read(len(END) + 1) == END:
        return steps, True, 0
    if end == size and steps:
        file.seek(steps[-1].offset)
        if not checksum_fits(file.read(steps[-1].length)):
            # after a crash of the machine the last step may consist of zeros
            return steps[:-1], False, steps[-1].length
    return steps, False, size - end


class Run:
    """The collected statistics of one run. Steps are read one at a time.

    Attributes:
        info: backend, model and dtype of the run, and the full steps that every rank has.
        model_digest: equal for models with the same structure.
        parameters: shapes of the parameters by name.
        manifest: the content of rank 0's manifest.
        ranks: numbers of the ranks.
        notes: remarks for the user: files that end early, ranks without steps.
    """

    def __init__(self, path: Path, manifests: dict[int, dict[str, Any]]):
        self._folders = rank_folders(path)
        self.manifest = manifests[0]
        self.ranks = tuple(sorted(manifests))
        self.model_digest = str(self.manifest.get("model_digest", ""))
        self.parameters = {name: tuple(shape) for name, shape in (self.manifest.get("parameters") or {}).items()}
        self.notes: list[str] = []
        self._steps = {rank: self._locate(rank) for rank in self.ranks}
        for rank, manifest in sorted(manifests.items()):
            if manifest.get("model_digest") != self.manifest.get("model_digest"):
                self.notes.append(f"{self._file(rank).parent}: rank {rank} has another model than rank 0")
        common = set.intersection(*(set(self.steps_of(rank)) for rank in self.ranks))
        self.info = RunInfo(
            path=str(path),
            run_id=str(self.manifest["run_id"]),
            backend=str(self.manifest.get("backend", "")),
            world_size=len(self.ranks),
            zero_stage=int(self.manifest.get("zero_stage") or 0),
            dtype=str(self.manifest.get("dtype", "")),
            model=str(self.manifest.get("model", "")),
            steps=tuple(sorted(common)),
        )

    def _file(self, rank: int) -> Path:
        return self._folders[rank] / FILE

    def _locate(self, rank: int) -> list[StepLocation]:
        path = self._file(rank)
        try:
            with pa.OSFile(str(path)) as file:
                steps, ended, rest = locate_steps(file, path)
        except FileNotFoundError:
            raise StatisticsError(f"{path} is missing") from None
        except OSError as error:
            raise StatisticsError(f"cannot read {path}: {error.strerror or error}") from error
        if rest:
            self.notes.append(
                f"{path} is cut inside a step or damaged there: the {len(steps)} full steps before it are read"
            )
        elif not ended:
            self.notes.append(f"{path} has no end mark (an interrupted run, or one that goes on): {len(steps)} steps")
        elif not steps:
            self.notes.append(f"{path} has no steps")
        return steps

    def steps_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's full steps."""
        return tuple(step.number for step in self._steps[rank])

    def tables(self, rank: int) -> Iterator[Table]:
        """Yield a rank's steps in order; one step is in memory at a time.

        Raises:
            StatisticsError: bytes of the file were changed.
        """
        path = self._file(rank)
        last: dict[str, tuple[pa.Array, list]] = {}
        with open(path, "rb") as file:
            for step in self._steps[rank]:
                file.seek(step.offset)
                data = file.read(step.length)
                if len(data) < step.length:
                    raise StatisticsError(f"{path} has become shorter while it was read")
                yield decode_step(data, step.number, path, last)


def open_run(path: str | os.PathLike) -> Run:
    """Open the run in a folder; no statistics are read yet.

    Args:
        path: the run's folder, or the folder of one of its ranks.

    Raises:
        StatisticsError: the folder holds no run, or a run that is damaged, incomplete or mixed with another run.
    """
    folder = run_folder(path)
    manifests = {}
    for rank, rank_folder in (rank_folders(folder) if folder.is_dir() else {}).items():
        if (rank_folder / MANIFEST).exists():
            manifests[rank] = _checked_manifest(rank_folder / MANIFEST)
    if not manifests:
        raise StatisticsError(_no_run_message(folder))
    _check_ranks(folder, manifests)
    return Run(folder, manifests)


def _checked_manifest(path: Path) -> dict[str, Any]:
    content = read_manifest(path)
    if content.get("format") != FORMAT:
        raise StatisticsError(f"{path} is not a manifest of ort_zero's statistics")
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise StatisticsError(
            f"{path} has format version {version}, this ort_zero reads up to {FORMAT_VERSION}: install a newer one"
        )
    for key in ("run_id", "world_size"):
        if key not in content:
            raise StatisticsError(f"{path} is damaged: it has no {key}")
    return content


def _check_ranks(folder: Path, manifests: dict[int, dict[str, Any]]) -> None:
    """Raise unless the manifests belong to one run and every rank of the run has a manifest."""
    runs = {str(manifest["run_id"]): rank for rank, manifest in manifests.items()}
    if len(runs) > 1:
        ranks = ", ".join(f"rank {rank} of run {run}" for run, rank in sorted(runs.items(), key=lambda item: item[1]))
        raise StatisticsError(f"{folder} holds ranks of different runs ({ranks}): collect again, each run in a folder")
    sizes = {manifest["world_size"] for manifest in manifests.values()}
    world = max(sizes)
    missing = [rank for rank in range(world) if rank not in manifests]
    if missing:
        names = ", ".join(rank_name(rank) for rank in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise StatisticsError(
            f"{folder} lacks {len(missing)} of {world} ranks ({names}): put the folders of all ranks into one folder "
            "(each machine wrote its own ranks), or collect again if a rank never started"
        )
    if len(sizes) > 1 or len(manifests) > world:
        raise StatisticsError(f"{folder} holds ranks of runs with different numbers of ranks: {sorted(sizes)}")


def _no_run_message(folder: Path) -> str:
    """Return the message for a folder without manifests of ort_zero, with the names of the files in the folder."""
    if not folder.exists():
        return f"{folder} does not exist"
    if not folder.is_dir():
        return f"{folder} is a file; a run's statistics are a folder with one folder per rank"
    orders = sorted(folder.glob("step_*/order.txt"))
    if orders:
        names = orders[0].read_text(encoding="utf-8", errors="replace").split()
        return (
            f"{folder} holds the text format of onnxruntime.training.utils.hooks ({len(orders)} steps, {len(names)} "
            f"tensors in {orders[0].parent.name}), which has no ranks, a wrong std and nothing to compare by: collect "
            "the run again with ort_zero's StatisticsSubscriber"
        )
    names = sorted(name for name in os.listdir(folder) if name not in (CLAIM, LOCK))
    if not names:
        return f"{folder} is empty: no rank has begun to collect"
    for name in names:
        if next(folder.joinpath(name).glob(f"rank_*/{MANIFEST}"), None) is not None:
            return f"{folder} holds no statistics itself; did you mean {folder / name}?"
    entries = shortened(names, 5)
    return f"{folder} holds no statistics of ort_zero (no {rank_name(0)}/{MANIFEST}); it contains: {entries}"
