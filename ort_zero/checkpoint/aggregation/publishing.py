"""Gives the files of an aggregation their final names, so that at every moment the old model or the new one loads.

A single file replaces another in one step. Of several files the index decides which ones are loaded, so the files come
first and the index after them. Where new files have the names of old ones that the old index still leads to, they are
published under interim names with an index of their own; the final names follow as further links, then the final index.
What is not needed any more goes last, an index before the files that it names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile, Plan
from ort_zero.checkpoint.aggregation.destination import is_left_over
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.model_files import output_record
from ort_zero.distributed.process_group import RankGroup

_SHARD = re.compile(r"(?P<stem>.+-\d{5}-of-\d{5})(?P<end>\.[a-z]+)")
_INDEX = re.compile(r".+\.index\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What is to appear in a folder, and what may disappear there. The same on all ranks."""

    plan: Plan
    extras: Mapping[str, bytes]
    """Config files by name."""
    token: str
    """Part of the partial and interim names of this run."""
    there: frozenset[str]
    """Names in the destination before this run."""
    removable: frozenset[str]
    """Those of `there` that may be replaced or removed."""

    def small_files(self) -> dict[str, bytes]:
        """Return the content of the files besides those with tensors, in the order in which they are written."""
        texts = {name: text.encode() for name, text in self.plan.texts.items()}
        return {**self.extras, **dict(sorted(texts.items(), key=lambda item: _is_index(item[0])))}

    def interim_names(self) -> dict[str, str]:
        """Return the interim name of each file of tensors whose final name an old index may still lead to."""
        found = {}
        for file in self.plan.files:
            match = _SHARD.fullmatch(file.name)
            if match and file.name in self.there:
                found[file.name] = f"{match['stem']}.{self.token}{match['end']}"
        return found


def publish(job: Publication, mine: tuple[OutputFile, ...], target: Folder, ranks: RankGroup) -> dict[str, int]:
    """Publish what all ranks have written under partial names; return bytes by name. All ranks must call.

    Args:
        job: what is to be published.
        mine: the files that this rank wrote.
        target: the destination.
        ranks: all ranks that wrote.

    Raises:
        CheckpointError: a file cannot be renamed, written or removed.
        RankError: it failed on another rank.
    """
    interim = job.interim_names()
    written = {file.name for file in job.plan.files} | job.small_files().keys()
    with ranks.raise_on_all("publishing"):
        if ranks.rank == 0:
            # before anything appears: what a run that is killed leaves is then known to be ours
            known = written | set(interim.values()) | job.removable
            output_record.write(target, dict.fromkeys(known - {output_record.NAME}), job.token)
    with ranks.raise_on_all("publishing"):
        for file in mine:
            target.publish(file.name, job.token, to=interim.get(file.name))
    if interim:
        with ranks.raise_on_all("publishing"):
            if ranks.rank == 0:
                for name, text in job.plan.texts.items():
                    if _is_index(name):
                        target.write(name, _with_names(text, name, interim), job.token)
        with ranks.raise_on_all("publishing"):
            for file in mine:
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
            _end_left_over_uploads(target, written)
            sizes = {name: target.size(name) or 0 for name in written}
            output_record.write(target, sizes, job.token)
    return ranks.broadcast(sizes)


def _end_left_over_uploads(target: Folder, written: Collection[str]) -> None:
    """End the uploads that a run which was killed has left, those of copies to the names that were written included."""
    for inner in dict.fromkeys(name.rpartition("/")[0] for name in written):
        own = {name.removeprefix(f"{inner}/") for name in written}
        folder = target.child(inner) if inner else target
        folder.end_left_over_uploads(lambda name, own=own: is_left_over(name) or name in own)  # type: ignore[misc]


def _is_index(name: str) -> bool:
    return _INDEX.fullmatch(name) is not None


def _with_names(text: str, index: str, interim: Mapping[str, str]) -> bytes:
    """Return the text of an index that leads to the interim names, which are relative to its folder."""
    table = json.loads(text)
    folder = index[: index.rfind("/") + 1]
    table["weight_map"] = {
        key: interim.get(folder + name, folder + name).removeprefix(folder) for key, name in table["weight_map"].items()
    }
    return (json.dumps(table, indent=2) + "\n").encode()
