"""Read the statistics of a run: what the run is at once, the steps one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ort_zero.errors import StatisticsError
from ort_zero.statistics import files
from ort_zero.statistics.naming import number_list
from ort_zero.statistics.records import RunInfo, Table
from ort_zero.utils.text import shortened


class Run:
    """The collected statistics of one run. Steps are read one at a time.

    Attributes:
        info: backend, model and dtype of the run, and the full steps that every rank has.
        model_digest: equal for models with the same structure.
        parameters: shapes of the parameters by name.
        manifest: the manifest of rank 0.
        ranks: numbers of the ranks.
        notes: remarks for the user: files that end early, ranks without steps.
    """

    def __init__(self, path: Path, manifests: dict[int, dict[str, Any]], files_of: dict[int, list[Path]]):
        self.manifest = manifests[0]
        self.ranks = tuple(sorted(manifests))
        self.model_digest = str(self.manifest["model_digest"])
        self.parameters = {name: tuple(shape) for name, shape in self.manifest["parameters"].items()}
        self.notes: list[str] = []
        self._steps: dict[int, list[files.StepLocation]] = {}
        for rank in self.ranks:
            located = [files.locate_steps(file) for file in files_of[rank]]
            self._steps[rank] = sorted(step for steps, _ in located for step in steps)
            for step, later in zip(self._steps[rank], self._steps[rank][1:]):
                if step.number == later.number:
                    raise StatisticsError(
                        f"{step.path} and {later.path} both have step {step.number}: keep one of them"
                    )
            self.notes += [remark for _, remark in located if remark]
            if manifests[rank]["model_digest"] != self.model_digest:
                self.notes.append(f"{path}: rank {rank} has another model than rank 0")
        common = set.intersection(*(set(self.steps_of(rank)) for rank in self.ranks))
        self.info = RunInfo(
            path=str(path),
            run_id=self.manifest["run_id"],
            backend=self.manifest["backend"],
            world_size=len(self.ranks),
            zero_stage=int(self.manifest["zero_stage"]),
            dtype=self.manifest["dtype"],
            model=self.manifest["model"],
            steps=tuple(sorted(common)),
        )

    def steps_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's full steps."""
        return tuple(step.number for step in self._steps[rank])

    def tables(self, rank: int) -> Iterator[Table]:
        """Yield a rank's steps in order; one step is in memory at a time.

        Raises:
            StatisticsError: bytes of the file were changed.
        """
        last: dict[str, tuple[Any, list]] = {}
        for step in self._steps[rank]:
            yield files.decode_step(step, last)


def open_run(path: str | os.PathLike) -> Run:
    """Open the run in a folder; no statistics are read yet.

    Raises:
        StatisticsError: the folder holds no run, or a run that is damaged, incomplete or mixed with another run.
    """
    folder = files.local_folder(path)
    manifests: dict[int, dict[str, Any]] = {}
    files_of: dict[int, list[Path]] = {}
    for file, rank in (files.files_in(folder) if folder.is_dir() else {}).items():
        manifest = files.read_manifest(file)
        if manifest is None:
            continue  # the rank ended while it began to collect
        if manifests.setdefault(rank, manifest)["run_id"] != manifest["run_id"]:
            raise _mixed(folder, [manifests[rank], manifest])
        files_of.setdefault(rank, []).append(file)
    if not manifests:
        raise StatisticsError(_no_run_message(folder))
    _check_ranks(folder, manifests)
    return Run(folder, manifests, files_of)


def _check_ranks(folder: Path, manifests: dict[int, dict[str, Any]]) -> None:
    """Raise unless the manifests belong to one run and every rank of the run has a file."""
    if len({manifest["run_id"] for manifest in manifests.values()}) > 1:
        raise _mixed(folder, manifests.values())
    sizes = {manifest["world_size"] for manifest in manifests.values()}
    world = max(sizes)
    missing = [rank for rank in range(world) if rank not in manifests]
    if missing:
        raise StatisticsError(
            f"{folder} lacks {len(missing)} of {world} ranks ({number_list(missing)}): put the files of all ranks into "
            "one folder (each machine wrote its own ranks), or collect again if a rank never started"
        )
    if len(sizes) > 1 or len(manifests) > world:
        raise StatisticsError(f"{folder} holds ranks of runs with different numbers of ranks: {sorted(sizes)}")


def _mixed(folder: Path, manifests: Any) -> StatisticsError:
    runs = {manifest["run_id"]: manifest["rank"] for manifest in manifests}
    ranks = ", ".join(f"rank {rank} of run {run}" for run, rank in runs.items())
    return StatisticsError(f"{folder} holds ranks of different runs ({ranks}): collect again, each run in a folder")


def _no_run_message(folder: Path) -> str:
    """Return the message for a folder without statistics, with the names of what the folder holds."""
    if not folder.exists():
        return f"{folder} does not exist"
    if not folder.is_dir():
        return f"{folder} is a file; a run's statistics are a folder with one file per rank"
    orders = sorted(folder.glob("step_*/order.txt"))
    if orders:
        return (
            f"{folder} holds the text format of onnxruntime.training.utils.hooks ({len(orders)} steps), which has no "
            "ranks, a wrong std and nothing to compare by: collect the run again with ort_zero's StatisticsSubscriber"
        )
    names = sorted(os.listdir(folder))
    if not names:
        return f"{folder} is empty: no rank has begun to collect"
    for name in names:
        if (folder / name).is_dir() and files.files_in(folder / name):
            return f"{folder} holds no statistics itself; did you mean {folder / name}?"
    return f"{folder} holds no statistics of ort_zero (no {files.file_name(0, 0)}); it contains: {shortened(names, 5)}"
