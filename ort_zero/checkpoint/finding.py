"""Finds the checkpoint that a user means by a folder: a run of the Trainer, of Lightning or Accelerate, a tag.

=============================================  ========================================================================
the folder is                                  meant is
=============================================  ========================================================================
a checkpoint itself                            that one
a folder with a file ``latest``                the one that it names; if that is damaged, the error names the whole ones
a folder of checkpoints with numbers           the newest whole one: the Trainer's ``checkpoint-N`` and those of others
a folder in which one checkpoint lies          that one: Lightning's ``*.ckpt``, Accelerate's ``save_state``
a folder of several with any other names       none: an error names them
=============================================  ========================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.opening import format_in, no_checkpoint, open_checkpoint
from ort_zero.checkpoint.records import Source
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

MAX_DEPTH = 6
"""How many folders deep a checkpoint is looked for."""
_MOST_NAMED = 12
"""Maximum number of checkpoints that a message names."""
_NUMBERED = re.compile(r"(?:.*[-_.])?(checkpoint|global_?step|step|iter|epoch)[-_=]?(\d+)(?:\.ckpt)?")
"""Matches the names that frameworks give to the checkpoints of one run; the kind of number, and the number."""
_OF_INTERRUPTED_SAVE = re.compile(r"\.?rank_\d{5}_(master|optimizer|extra)\..*")
_MANIFEST_START = 256
"""Number of bytes in which a manifest of ours names its format."""
_DIGITS = re.compile(r"(\d+)")


class Candidate(NamedTuple):
    """A folder that holds a checkpoint, or what an interrupted save left of one."""

    folder: Folder
    name: str
    """Path from the folder where the search began; the last part of its own if it is that one."""
    format: str | None
    """Who wrote it, see :func:`~ort_zero.checkpoint.opening.format_in`; None: a save was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What can be said of a checkpoint without reading the bytes of its tensors."""

    source: Source | None
    """The checkpoint, None if it cannot be opened."""
    whole: bool | None
    """True: all files are there, with their sizes, and belong together. None: of a kind that cannot be read."""
    reason: str | None
    """Why it is not whole."""


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint that is meant."""

    folder: Folder
    notes: tuple[str, ...] = ()
    """One sentence for each newer checkpoint that was passed over."""
    by_latest: Folder | None = None
    """The folder whose file ``latest`` names it; None if it was found otherwise."""


def checkpoints_below(
    folder: Folder, depth: int = MAX_DEPTH, name: str = "", above: tuple[str, ...] = ()
) -> Iterator[Candidate]:
    """Yield the checkpoints in `folder` and in the folders in it, those with numbers in the order of the numbers.

    Args:
        folder: where to look; hidden folders in it, and those in a checkpoint, are left out.
        depth: how many folders deep.
        name: path of `folder` from where the search began.
        above: the folders through which the search came, without links: a link to one of them is not followed.
    """
    place = os.path.realpath(folder.url) if isinstance(folder, LocalFolder) else folder.url
    if place in above:
        return
    try:
        found, entries = format_in(folder), folder.names()
    except CheckpointError:  # of somebody else's folder nobody knows what is in it
        return
    has_shards = any(_OF_INTERRUPTED_SAVE.fullmatch(entry) for entry in entries)
    if found == "ort_zero" and not has_shards and not _is_manifest(folder):
        found = None  # many programs write a file of that name
    if found or has_shards:
        yield Candidate(folder, name or folder.name, found)
    elif depth:
        for child in sorted(folder.folders(), key=_by_numbers):
            if not child.startswith("."):
                inner = f"{name}/{child}".lstrip("/")
                yield from checkpoints_below(folder.child(child), depth - 1, inner, (*above, place))


def condition_of(candidate: Candidate, trust_pickle: bool = False, tp_split: Sequence[str] = ()) -> Condition:
    """Return whether a checkpoint is whole as far as its manifest, headers and sizes tell.

    Args:
        candidate: the checkpoint.
        trust_pickle: unpickle whatever DeepSpeed's files hold.
        tp_split: rules for how DeepSpeed's tensor-parallel ranks share tensors.
    """
    folder = candidate.folder
    if candidate.format is None:
        return Condition(source=None, whole=False, reason=f"no {manifest.NAME}: the save was interrupted")
    try:
        source = open_checkpoint(folder.url, trust_pickle=trust_pickle, tp_split=tp_split)
        wrong = _wrong_size(source, folder)
        if wrong:
            return Condition(source=source, whole=False, reason=wrong)
    except CorruptCheckpointError as error:
        return Condition(source=None, whole=False, reason=_relative(str(error), folder))
    except CheckpointError as error:
        return Condition(source=None, whole=None, reason=_relative(str(error), folder))
    return Condition(source=source, whole=True, reason=None)


def find(path: str, tag: str | None = None) -> Found:
    """Return the checkpoint that is meant by `path` and `tag`, see the table above.

    Args:
        path: folder or fsspec URL.
        tag: name of a folder in it, or a path of several.

    Raises:
        CheckpointError: there is none, or it is not clear which of several.
    """
    folder = open_folder(path)
    if not folder.names():
        raise manifest.nothing_at(folder)
    if tag is None and format_in(folder):
        return Found(folder)
    named = folder.exists(manifest.LATEST)
    if tag is None and not named:
        return _only_or_newest(folder)
    if tag is not None and not folder.child(tag).names():
        deeper = [c for c in checkpoints_below(folder) if c.format and c.name.endswith(f"/{tag}")]
        if len(deeper) == 1:
            return Found(deeper[0].folder)
    try:
        start = folder.child(manifest.resolve_tag(folder, tag))
        inner = Found(start) if format_in(start) else _only_or_newest(start)
    except CheckpointError as error:
        if tag is None:
            raise _with_whole_ones(error, folder) from None
        raise
    return Found(inner.folder, inner.notes, folder if tag is None else None)


def open_found(path: str, tag: str | None = None, trust_pickle: bool = False, tp_split: Sequence[str] = ()) -> Source:
    """Return the checkpoint that is meant by `path` and `tag`, opened; its notes say what was passed over.

    Args:
        path: folder or fsspec URL.
        tag: name of a folder in it, or a path of several.
        trust_pickle: unpickle whatever DeepSpeed's files hold.
        tp_split: rules for how DeepSpeed's tensor-parallel ranks share tensors.

    Raises:
        CheckpointError: there is none, it is not clear which of several, or it cannot be read.
        CorruptCheckpointError: files of it are missing, damaged, or do not belong together.
    """
    found = find(path, tag)
    try:
        source = open_checkpoint(found.folder.url, trust_pickle=trust_pickle, tp_split=tp_split)
        wrong = _wrong_size(source, found.folder) if found.by_latest else None
        if wrong:  # said now, since whoever did not name it may want another one
            raise CorruptCheckpointError(found.folder.path(wrong))
    except CheckpointError as error:
        if found.by_latest is None:
            raise
        raise _with_whole_ones(error, found.by_latest, found.folder) from None
    return replace(source, notes=(*found.notes, *source.notes)) if found.notes else source


def whole_checkpoints(folder: Folder, apart_from: Folder | None = None) -> list[str]:
    """Return the names of the whole checkpoints in `folder`, the oldest number first.

    Args:
        folder: folder of checkpoints.
        apart_from: one that is not to be named.
    """
    others = (c for c in checkpoints_below(folder) if apart_from is None or c.folder.url != apart_from.url)
    return [candidate.name for candidate in others if condition_of(candidate).whole]


def _only_or_newest(folder: Folder) -> Found:
    """Return the only checkpoint in a folder without ``latest``, or the newest whole one of several with numbers.

    Raises:
        CheckpointError: there is none, it is not clear which, or none of those with numbers is whole.
    """
    children: dict[str, list[Candidate]] = {}
    for candidate in checkpoints_below(folder):
        children.setdefault(candidate.name.partition("/")[0], []).append(candidate)
    if not any(candidate.format for some in children.values() for candidate in some):
        raise CheckpointError(f"no checkpoint is there: {no_checkpoint(folder)}")
    if len(children) == 1:
        return find(folder.child(next(iter(children))).url)
    numbers = {name: match for name in children if (match := _NUMBERED.fullmatch(name))}
    if len(numbers) < len(children) or len({match[1] for match in numbers.values()}) > 1:
        there = shortened([candidate.name for some in children.values() for candidate in some], _MOST_NAMED)
        raise CheckpointError(f'{folder.path()} has no file "{manifest.LATEST}", give a tag; tags there: {there}')
    notes: list[str] = []
    for name in sorted(numbers, key=lambda name: int(numbers[name][2]), reverse=True):
        found, reason = _if_whole(folder.child(name), children[name])
        if found is not None:
            return Found(found.folder, (*notes, *found.notes))
        notes.append(f"{folder.path(name)} was passed over, it is not whole: {reason}")
    raise CorruptCheckpointError(f"no checkpoint in {folder.path()} is whole: {notes[0]}")


def _if_whole(folder: Folder, candidates: list[Candidate]) -> tuple[Found | None, str | None]:
    """Return the checkpoint that is meant by a folder if it is whole, else why not."""
    try:
        found = find(folder.url)
    except CheckpointError as error:
        interrupted = not any(candidate.format for candidate in candidates)
        return None, "the save was interrupted" if interrupted else str(error)
    condition = condition_of(Candidate(found.folder, "", format_in(found.folder)))
    # what cannot be read is the user's to decide about, and its own error says more
    return (None, condition.reason) if condition.whole is False else (found, None)


def whole_ones_text(folder: Folder, apart_from: Folder | None = None) -> str:
    """Return which checkpoints in `folder` are whole, as a part of a sentence.

    Args:
        folder: folder of checkpoints.
        apart_from: one that is not to be named.
    """
    whole = whole_checkpoints(folder, apart_from)
    if not whole:
        return "no other checkpoint there is whole"
    return f"whole checkpoints there: {shortened(whole, _MOST_NAMED)} (give one as the tag)"


def _with_whole_ones(error: CheckpointError, folder: Folder, apart_from: Folder | None = None) -> CheckpointError:
    """Return the error with the names of the whole checkpoints beside the one that it is about."""
    return type(error)(f"{error}; {whole_ones_text(folder, apart_from)}")


def _wrong_size(source: Source, folder: Folder) -> str | None:
    """Return the name of the first file that is not there with its size, and why not."""
    for file in source.files.values():
        size = folder.size(file.name)
        if size is None:
            return f"{file.name} is missing"
        if size != file.size:
            kind = "is empty" if not size else "is truncated" if size < file.size else "is too long"
            return f"{file.name} {kind}: it has {size} bytes, the manifest says {file.size}"
    return None


def _is_manifest(folder: Folder) -> bool:
    """Return True if ``manifest.json`` begins as ours does; the whole may take gigabytes."""
    try:
        start = folder.read(manifest.NAME, 0, min(folder.size(manifest.NAME) or 0, _MANIFEST_START))
    except CheckpointError:
        return False
    return manifest.FORMAT.encode() in start


def _relative(text: str, folder: Folder) -> str:
    return text.replace(f"{folder.path()}/", "")


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a key by which ``step_9`` comes before ``step_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]
