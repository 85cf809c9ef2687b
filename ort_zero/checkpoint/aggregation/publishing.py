"""Give the files of an aggregation their final names, so that at every moment the old model, the new one or none loads.

A single file replaces another in one step. With several files the index decides which of them are loaded: the old index
is removed first, and the new index comes last. So no index ever lists files of two models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile, Plan
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.model_files import output_record
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.records import File
from ort_zero.distributed.raise_on_all_ranks import RankGroup

_INDEX = ".index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An aggregation as rank 0 has planned it: what is read, written and published; the same on all ranks."""

    root: str
    """Folder or URL of the checkpoint."""
    files: Mapping[str, File]
    """The files of the checkpoint by name."""
    merges: Mapping[str, Merge]
    """LoRA's matrices to add, by name of the base weight."""
    about: Mapping[str, Any]
    """The fields of the report that describe the source."""
    warnings: tuple[str, ...]
    plan: Plan
    """The files to write."""
    extras: Mapping[str, bytes]
    """Content of the configuration files by name."""
    token: str
    """Part of the partial names of this run."""
    removable: frozenset[str]
    """Names of files in the destination that may be replaced or removed."""

    def small_files(self) -> dict[str, bytes]:
        """Return the content of the files without tensors by name, in the order in which they are written."""
        texts = {name: text.encode() for name, text in self.plan.texts.items()}
        return {**self.extras, **dict(sorted(texts.items(), key=lambda item: item[0].endswith(_INDEX)))}


def publish(job: Job, rank_files: tuple[OutputFile, ...], target: Folder, ranks: RankGroup) -> dict[str, int]:
    """Publish the files that all ranks wrote under partial names; return bytes by name. All ranks must call.

    Args:
        job: the files of all ranks.
        rank_files: the files that this rank wrote.
        target: the destination.
        ranks: all ranks of the aggregation.

    Raises:
        CheckpointError: a file cannot be renamed, written or removed.
        RankError: another rank failed.
    """
    written = {file.name for file in job.plan.files} | job.small_files().keys()
    with ranks.raise_on_all("publishing"):
        if ranks.rank == 0:
            # first, so that the next run recognises the files of a killed run as ort_zero's
            output_record.write(target, dict.fromkeys((written | job.removable) - {output_record.NAME}), job.token)
            for name in job.removable:
                if name.endswith(_INDEX):
                    target.remove(name)
    with ranks.raise_on_all("publishing"):
        for file in rank_files:
            target.publish(file.name, job.token)
    sizes: dict[str, int] = {}
    with ranks.raise_on_all("publishing"):
        if ranks.rank == 0:
            for name, data in job.small_files().items():
                target.write(name, data, job.token)
            for name in sorted(job.removable - written - {output_record.NAME}):
                target.remove(name)
            sizes = {name: target.size(name) or 0 for name in written}
            output_record.write(target, sizes, job.token)
    return ranks.broadcast(sizes)
