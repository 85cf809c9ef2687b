"""Give the files of an aggregation their final names, so that at every moment the old or the new model loads.

A single file replaces another in one step. With several files the index decides which of them are loaded, so the files
come first and the index after them. A new file may have the name of an old file that the old index still lists. Then
the new files first get interim names and an index with these names; further links and the final index follow. Old
files are removed last, an index before the files that it lists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile, Plan
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.model_files import output_record
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.records import File
from ort_zero.distributed.raise_on_all_ranks import RankGroup

_SHARD = re.compile(r"(?P<stem>.+-\d{5}-of-\d{5})(?P<end>\.[a-z]+)")
_INDEX = re.compile(r".+\.index\.json")


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
    """Part of the partial and interim names of this run."""
    existing: frozenset[str]
    """Names in the destination before this run."""
    removable: frozenset[str]
    """Names out of `existing` that may be replaced or removed."""

    def small_files(self) -> dict[str, bytes]:
        """Return the content of the files without tensors by name, in the order in which they are written."""
        texts = {name: text.encode() for name, text in self.plan.texts.items()}
        return {**self.extras, **dict(sorted(texts.items(), key=lambda item: _is_index(item[0])))}

    def interim_names(self) -> dict[str, str]:
        """Return the interim name of each tensor file whose final name an old index may still list."""
        interim = {}
        for file in self.plan.files:
            match = _SHARD.fullmatch(file.name)
            if match and file.name in self.existing:
                interim[file.name] = f"{match['stem']}.{self.token}{match['end']}"
        return interim


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
    interim = job.interim_names()
    written = {file.name for file in job.plan.files} | job.small_files().keys()
    with ranks.raise_on_all("publishing"):
        if ranks.rank == 0:
            # first, so that the next run recognises the files of a killed run as ort_zero's
            claimed = written | set(interim.values()) | job.removable
            output_record.write(target, dict.fromkeys(claimed - {output_record.NAME}), job.token)
    with ranks.raise_on_all("publishing"):
        for file in rank_files:
            target.publish(file.name, job.token, to=interim.get(file.name))
    if interim:
        with ranks.raise_on_all("publishing"):
            if ranks.rank == 0:
                for name, text in job.plan.texts.items():
                    if _is_index(name):
                        target.write(name, _with_names(text, name, interim), job.token)
        with ranks.raise_on_all("publishing"):
            for file in rank_files:
                if file.name in interim:
                    target.duplicate(interim[file.name], file.name, job.token)
    sizes: dict[str, int] = {}
    with ranks.raise_on_all("publishing"):
        if ranks.rank == 0:
            for name, data in job.small_files().items():
                target.write(name, data, job.token)
            old = (job.removable | set(interim.values())) - written - {output_record.NAME}
            for name in sorted(old, key=lambda name: not _is_index(name)):
                target.remove(name)
            sizes = {name: target.size(name) or 0 for name in written}
            output_record.write(target, sizes, job.token)
    return ranks.broadcast(sizes)


def _is_index(name: str) -> bool:
    return _INDEX.fullmatch(name) is not None


def _with_names(text: str, index: str, interim: Mapping[str, str]) -> bytes:
    """Return the text of the index named `index`, with interim names relative to its folder."""
    table = json.loads(text)
    folder = index[: index.rfind("/") + 1]
    table["weight_map"] = {
        key: interim.get(folder + name, folder + name).removeprefix(folder) for key, name in table["weight_map"].items()
    }
    return (json.dumps(table, indent=2) + "\n").encode()
