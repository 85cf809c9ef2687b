"""Find and open the checkpoint that a user means by a folder: a run of the Trainer, Lightning or Accelerate, a tag.

=============================================  ========================================================================
the folder is                                  :func:`find` returns
=============================================  ========================================================================
a checkpoint                                   this checkpoint.
a folder with a file ``latest``                the checkpoint in ``latest``; an error if it is damaged.
a folder of checkpoints with numbers           the newest whole checkpoint, such as ``checkpoint-N``.
a folder with a single checkpoint              this checkpoint: Lightning's ``*.ckpt``, or Accelerate's.
a folder of several with any other names       nothing: an error lists the checkpoints.
=============================================  ========================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ort_zero.checkpoint.dcp import reader as dcp
from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.records import Source
from ort_zero.checkpoint.seal import with_seal
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.garbage import collection_paused
from ort_zero.utils.text import shortened

MAX_DEPTH = 6
"""Maximum depth, in folders, of the search for checkpoints."""
_MAX_NAMED = 12
"""Maximum number of checkpoints that a message names."""
_NUMBERED = re.compile(r"(?:.*[-_.])?(checkpoint|global_?step|step|iter|epoch)[-_=]?(\d+)(?:\.ckpt)?")
"""Matches the names that frameworks give to the checkpoints of one run; groups: kind of number, number."""
_OF_INTERRUPTED_SAVE = re.compile(r"\.?rank_\d{5}_(master|optimizer|extra)\..*")
_MANIFEST_START = 256
"""Number of bytes at the start of ort_zero's manifest that contain the name of its format."""
_DIGITS = re.compile(r"(\d+)")


class Candidate(NamedTuple):
    """A folder with a checkpoint, or with the files of an interrupted save."""

    folder: Folder
    name: str
    """Path relative to the folder where the search began; for this folder itself, the last part of its path."""
    format: str | None
    """Format, see :func:`format_in`; None for the files of an interrupted save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The condition of a checkpoint, as far as it shows without reading the bytes of the tensors."""

    source: Source | None
    """The opened checkpoint, None if it cannot be opened."""
    whole: bool | None
    """True: all files exist with the right sizes and are of one save. None: this kind of checkpoint cannot be read."""
    reason: str | None
    """Why the checkpoint is not whole, None if it is whole."""


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """The folder of the checkpoint that a path and a tag mean."""

    folder: Folder
    notes: tuple[str, ...] = ()
    """One sentence for each newer checkpoint that was skipped."""
    by_latest: Folder | None = None
    """The folder whose file ``latest`` names the checkpoint; None if no ``latest`` was used."""


def checkpoints_below(
    folder: Folder, depth: int = MAX_DEPTH, name: str = "", above: tuple[str, ...] = ()
) -> Iterator[Candidate]:
    """Yield the checkpoints in `folder` and in its inner folders; numbered folders in the order of the numbers.

    Args:
        folder: where to search; hidden folders and the folders inside a checkpoint are skipped.
        above: real paths of the folders above; a link to one of these folders is not followed.
    """
    place = os.path.realpath(folder.url) if isinstance(folder, LocalFolder) else folder.url
    if place in above:
        return
    try:
        format_name, entries = format_in(folder), folder.names()
    except CheckpointError:  # the user may not read the folder, or it holds special files
        return
    has_shards = any(_OF_INTERRUPTED_SAVE.fullmatch(entry) for entry in entries)
    if format_name == "ort_zero" and not has_shards and not _is_manifest(folder):
        format_name = None  # many programs write a file manifest.json
    if format_name or has_shards:
        yield Candidate(folder, name or folder.name, format_name)
    elif depth:
        for child in sorted(folder.folders(), key=_by_numbers):
            if not child.startswith("."):
                inner = f"{name}/{child}".lstrip("/")
                yield from checkpoints_below(folder.child(child), depth - 1, inner, (*above, place))


def condition_of(candidate: Candidate, tp_split: Sequence[str] = ()) -> Condition:
    """Return the condition of a checkpoint, from its manifest, headers and file sizes."""
    folder = candidate.folder
    if candidate.format is None:
        return Condition(source=None, whole=False, reason=f"no {manifest.NAME}: the save was interrupted")
    try:
        source = open_in(folder, tp_split)
        wrong = _wrong_size(source, folder)
        if wrong:
            return Condition(source=source, whole=False, reason=_relative(wrong, folder))
    except CorruptCheckpointError as error:
        return Condition(source=None, whole=False, reason=_relative(str(error), folder))
    except CheckpointError as error:
        return Condition(source=None, whole=None, reason=_relative(str(error), folder))
    return Condition(source=source, whole=True, reason=None)


def find(path: str, tag: str | None = None) -> LocatedCheckpoint:
    """Return the checkpoint that `path` and `tag` mean, see the table above."""
    folder = open_folder(path)
    if not folder.names():
        raise manifest.nothing_at(folder)
    if tag is None and format_in(folder):
        return LocatedCheckpoint(folder)
    named = folder.exists(manifest.LATEST)
    if tag is None and not named:
        return _only_or_newest(folder)
    if tag is not None and not folder.child(tag).names():
        deeper = [c for c in checkpoints_below(folder) if c.format and c.name.endswith(f"/{tag}")]
        if len(deeper) == 1:
            return LocatedCheckpoint(deeper[0].folder)
    try:
        start = folder.child(manifest.resolve_tag(folder, tag))
        inner = LocatedCheckpoint(start) if format_in(start) else _only_or_newest(start)
    except CheckpointError as error:
        if tag is None:
            raise _with_whole_names(error, folder) from None
        raise
    return LocatedCheckpoint(inner.folder, inner.notes, folder if tag is None else None)


def find_source(path: str, tag: str | None = None, tp_split: Sequence[str] = ()) -> Source:
    """Find and open the checkpoint that `path` and `tag` mean; its notes name newer checkpoints that were skipped."""
    located = find(path, tag)
    try:
        source = open_in(located.folder, tp_split)
        wrong = _wrong_size(source, located.folder) if located.by_latest else None
        if wrong:  # checked now, since a user who gave no tag may want another checkpoint
            raise CorruptCheckpointError(wrong)
    except CheckpointError as error:
        if located.by_latest is None:
            raise
        raise _with_whole_names(error, located.by_latest, located.folder) from None
    return replace(source, notes=(*located.notes, *source.notes)) if located.notes else source


def _only_or_newest(folder: Folder) -> LocatedCheckpoint:
    """Return the only checkpoint in a folder without ``latest``, or the newest whole one of several with numbers."""
    children: dict[str, list[Candidate]] = {}
    for candidate in checkpoints_below(folder):
        children.setdefault(candidate.name.partition("/")[0], []).append(candidate)
    if not any(candidate.format for candidates in children.values() for candidate in candidates):
        raise CheckpointError(f"no checkpoint is there: {no_checkpoint(folder)}")
    if len(children) == 1:
        return find(folder.child(next(iter(children))).url)
    numbers = {name: match for name in children if (match := _NUMBERED.fullmatch(name))}
    if len(numbers) < len(children) or len({match[1] for match in numbers.values()}) > 1:
        tags = shortened([candidate.name for candidates in children.values() for candidate in candidates], _MAX_NAMED)
        raise CheckpointError(f'{folder.path()} has no file "{manifest.LATEST}", give a tag; tags there: {tags}')
    notes: list[str] = []
    for name in sorted(numbers, key=lambda name: int(numbers[name][2]), reverse=True):
        try:
            located = find(folder.child(name).url)
            condition = condition_of(Candidate(located.folder, "", format_in(located.folder)))
            # a checkpoint that cannot be read counts too: opening it raises an error that tells the user more
            if condition.whole is not False:
                return LocatedCheckpoint(located.folder, (*notes, *located.notes))
            reason = condition.reason
        except CheckpointError as error:
            interrupted = not any(candidate.format for candidate in children[name])
            reason = "the save was interrupted" if interrupted else str(error)
        notes.append(f"{folder.path(name)} was skipped, it is not whole: {reason}")
    raise CorruptCheckpointError(f"no checkpoint in {folder.path()} is whole: {notes[0]}")


def whole_checkpoints_text(folder: Folder, apart_from: Folder | None = None) -> str:
    """Return a part of a sentence that lists the whole checkpoints in `folder`."""
    others = (c for c in checkpoints_below(folder) if apart_from is None or c.folder.url != apart_from.url)
    whole = [candidate.name for candidate in others if condition_of(candidate).whole]
    if not whole:
        return "no other checkpoint there is whole"
    return f"whole checkpoints there: {shortened(whole, _MAX_NAMED)} (give one as the tag)"


def _with_whole_names(error: CheckpointError, folder: Folder, apart_from: Folder | None = None) -> CheckpointError:
    """Return the error with the names of the other, whole checkpoints in `folder` appended."""
    text = str(error).partition("; tags there: ")[0]
    return type(error)(f"{text}; {whole_checkpoints_text(folder, apart_from)}")


def _wrong_size(source: Source, folder: Folder) -> str | None:
    """Return a sentence about the first file that is missing or has a wrong size, None if there is no such file."""
    return next(filter(None, (folder.wrong_size(file.name, file.size) for file in source.files.values())), None)


def _is_manifest(folder: Folder) -> bool:
    """Return True if the start of ``manifest.json`` names ort_zero's format; the whole file may have gigabytes."""
    try:
        start = folder.read(manifest.NAME, 0, min(folder.size(manifest.NAME) or 0, _MANIFEST_START))
    except CheckpointError:
        return False
    return manifest.FORMAT.encode() in start


def _relative(text: str, folder: Folder) -> str:
    return text.replace(f"{folder.path()}/", "")


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which ``step_9`` comes before ``step_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]


def format_in(folder: Folder) -> str | None:
    """Return the format in `folder` itself: "ort_zero", "deepspeed", "dcp" (torch's), or None for no checkpoint."""
    if folder.exists(manifest.NAME):
        return "ort_zero"
    if file_names.recognises(folder):
        return "deepspeed"
    return "dcp" if dcp.recognises(folder) else None


def no_checkpoint(folder: Folder) -> CheckpointError:
    """Return the error to raise for a folder in which :func:`format_in` detects no checkpoint."""
    return CheckpointError(
        f"{folder.path()} is neither a checkpoint of ort_zero (no {manifest.NAME}; a save that was interrupted leaves "
        "none) nor one of DeepSpeed's (no *_model_states.pt) or of torch.distributed.checkpoint (no .metadata)"
    )


def note_on_other(folder: Folder) -> tuple[str, ...]:
    """Return one sentence if a checkpoint of ort_zero and one of DeepSpeed lie in the same folder."""
    others = file_names.state_file_names(folder)
    if not others:
        return ()
    note = (
        f"{folder.path(others[0])} is of a checkpoint that DeepSpeed wrote under the same tag, and is not read; if "
        f"DeepSpeed's checkpoint is the newer one, move {manifest.NAME} away"
    )
    return (note,)


def open_in(folder: Folder, tp_split: Sequence[str] = ()) -> Source:
    """Open the checkpoint in `folder` itself, in any format; other arguments as of :func:`find_source`."""
    with collection_paused():
        ours = manifest.read(folder)
        if ours is not None:
            return _with_remarks(replace(ours, notes=(*ours.notes, *note_on_other(folder))))
        if file_names.recognises(folder):
            from ort_zero.checkpoint.deepspeed.reader import open_deepspeed

            try:
                return _with_remarks(with_seal(open_deepspeed(folder, tp_split), folder))
            except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
                # a pickle can hold any values; the readers check the usual ones, and hostile ones cause these errors
                said = f"{type(error).__name__}: {error}"
                raise CorruptCheckpointError(
                    f"{folder.path()} holds files whose content is not what DeepSpeed writes ({said})"
                ) from error
        if dcp.recognises(folder):
            return _with_remarks(with_seal(dcp.open_dcp(folder), folder))
        raise no_checkpoint(folder)


def _with_remarks(source: Source) -> Source:
    """Return a checkpoint with its remarks, without the scratch buffers that DeepSpeed keeps among the states."""
    tensors = tuple(tensor for tensor in source.tensors if not tensor.kind.endswith("_offload_buffer"))
    return replace(source, tensors=tensors, notes=(*source.notes, *source.remarks()))
