"""Check every byte of a checkpoint, and that its files belong together."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import xxhash

from ort_zero.checkpoint import seal
from ort_zero.checkpoint.dcp import reader as dcp
from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.deepspeed.splits import parse_rules
from ort_zero.checkpoint.deepspeed.tensor_parallel import SplitUnknownError
from ort_zero.checkpoint.files import safetensors_header
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.finding import find, format_in, no_checkpoint, open_in, whole_checkpoints_text
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.pieces import PieceRuns
from ort_zero.checkpoint.records import File, Source
from ort_zero.checkpoint.torch_file import read_records
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

_OURS = re.compile(r"rank_.*|.*\.safetensors")
_OF_A_SAVE = re.compile(r"rank_\d{5}_(?:master|optimizer|extra)(\.[0-9a-f]{8})?\.(?:safetensors|json)")
"""Matches the names of a rank's files; group 1 is the same for all files of a save over another save of the tag."""
_RANK = re.compile(r".*/(?:rank_|__)(\d+)_[^/]*")
"""Matches names of files that one rank wrote, in ort_zero's format and in torch's; group 1 is the rank."""
_OF_MACOS = "._"
"""Prefix of the names of files that macOS adds beside others on disks of other systems."""
_MAX_NAMED = 3
"""Maximum number of damaged tensors that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of :func:`verify`: number and size of the files that were read, and their problems."""

    root: str
    """Folder or URL of the checkpoint."""
    tag: str
    format: str
    """Format: "ort_zero", "deepspeed" or "dcp"."""
    files: int
    """Number of files that were read."""
    bytes: int
    """Size of all files that were read, in bytes."""
    tensors: int
    """Number of tensors in the checkpoint; 0 if it could not be opened."""
    problems: tuple[str, ...]
    """Problems, one sentence each, with the name of the file."""
    notes: tuple[str, ...] = ()
    """Remarks that are no problem of the checkpoint, one sentence each."""
    seconds: float

    @property
    def ok(self) -> bool:
        """True if there is no problem; notes do not count."""
        return not self.problems


def verify(
    path: str,
    tag: str | None = None,
    *,
    workers: int = 2,
    tp_split: Sequence[str] = (),
    seal_it: bool = False,
    progress: bool = True,
) -> VerifyReport:
    """Return a report of the problems of the checkpoint at `path`; only `seal_it` writes a file.

    In ort_zero's format the size and the xxh3-128 of every file are compared with the manifest. In DeepSpeed's format
    the CRC-32 of every record and the headers of each file are checked. In both formats missing and surplus files are
    problems, and files of another rank or world size, as far as the files tell. In torch's format the CRC-32 of every
    record is checked, and that the shards cover every tensor once. The checksums of a seal are compared too.

    Args:
        path: folder or fsspec URL: of one checkpoint, or of several with a file ``latest``.
        tag: tag of the checkpoint if `path` holds several.
        workers: number of files that are read at a time.
        tp_split: rules for how tensor-parallel ranks share tensors, as for ``aggregate``.
        seal_it: if there is no problem, write checksums of all files beside the checkpoint, for later reads.
        progress: show a bar, if stderr is a terminal.

    Raises:
        CheckpointError: there is no checkpoint, or it is to be sealed and has checksums of its own.
    """
    if workers < 1:
        raise CheckpointError(f"workers must be at least 1, not {workers}")
    parse_rules(tp_split)  # a wrong rule is the user's fault, not the checkpoint's
    start = time.monotonic()
    located = find(path, tag)
    folder = located.folder
    notes = list(located.notes)
    format_name = format_in(folder)
    if format_name is None:
        raise no_checkpoint(folder)
    if seal_it and format_name == "ort_zero":
        raise CheckpointError(f"{folder.path()} has checksums of every file in its manifest: leave --seal out")
    source, failure = None, None
    try:
        source = open_in(folder, tp_split)
        notes += source.notes
    except SplitUnknownError as error:
        notes.append(f"its tensors cannot be put together yet: {error}")
    except CheckpointError as error:
        failure = str(error)
    problems: list[tuple[str, str]] = []  # file name, empty for a problem of no single file, and text
    names = _names(folder, format_name, source, problems, notes)
    sealed: Mapping[str, File] = {}
    if format_name != "ort_zero":
        with suppress(CheckpointError):  # a damaged seal is a problem already: the checkpoint was not opened
            sealed = seal.read_seal(folder) or {}
    if format_name == "dcp" and not sealed:
        notes.append("torch's files do not name their save: another save's shards of the same sizes are not noticed")
        notes += [f"{folder.path(name)} has no checksum" for name in dcp.metadata_files(folder)]
    check = functools.partial(_problems, folder, format_name, source, sealed)
    sizes, more = _check_files(folder, [*names, *sealed], check, workers, progress)
    problems += more
    # a damaged file that was named already need not be named again
    if failure and not any(folder.path(name) in failure for name, _ in problems):
        problems.append(("", failure))
    if seal_it and not problems:
        with bar(sum(sizes), "seal", shown=progress) as shown:
            notes.append(f"wrote {seal.seal(folder, names, shown.update)}")
    if problems and located.by_latest is not None:
        notes.append(f"{manifest.LATEST} names it; {whole_checkpoints_text(located.by_latest, folder)}")
    return VerifyReport(
        root=folder.path(),
        tag=source.tag if source else folder.name,
        format=format_name,
        files=len(sizes),
        bytes=sum(sizes),
        tensors=len(source.tensors) if source else 0,
        problems=tuple(text for _, text in sorted(problems, key=lambda problem: problem[0])),
        notes=tuple(notes),
        seconds=time.monotonic() - start,
    )


def _names(
    folder: Folder, format_name: str, source: Source | None, problems: list[tuple[str, str]], notes: list[str]
) -> list[str]:
    """Return the files to read; add a problem or a note for each file that the checkpoint should not have."""
    if format_name == "deepspeed":
        return [*file_names.state_file_names(folder), *file_names.universal_file_names(folder)]
    if source is None:
        return [manifest.NAME] if format_name == "ort_zero" else []
    if format_name == "dcp":
        for name in dcp.surplus_files(source, folder):
            problems.append((name, _one_too_many(source, folder.path(name), "the metadata do not name it")))
        return [*source.files, *dcp.metadata_files(folder)]
    own = {match[1] for name in source.files if (match := _OF_A_SAVE.fullmatch(name))}
    for name in folder.names():
        if name in source.files or name == manifest.NAME or name.startswith(_OF_MACOS):
            continue
        if name.endswith(PARTIAL):
            notes.append(f"{folder.path(name)} is left over from an interrupted save and may be removed")
        elif (match := _OF_A_SAVE.fullmatch(name)) and match[1] not in own:
            notes.append(f"{folder.path(name)} is left over from an interrupted save of this tag and may be removed")
        elif _OURS.fullmatch(name):
            problems.append((name, _one_too_many(source, folder.path(name), "the manifest does not list it")))
    return [manifest.NAME, *source.files]


def _one_too_many(source: Source, path: str, reason: str) -> str:
    rank = _RANK.fullmatch(path)
    if rank and int(rank[1]) >= source.world_size:
        reason += f"; a save on more ranks than this one's {source.world_size}, perhaps an interrupted one, left it"
    return f"{path} is one too many: {reason}; remove it"


def _problems(
    folder: Folder,
    format_name: str,
    source: Source | None,
    sealed: Mapping[str, File],
    name: str,
    advance: Callable[[int], Any],
) -> Iterator[str]:
    """Yield the problems of one file: each byte is read once, and compared with the best checksum that there is."""
    if format_name == "ort_zero":
        if source is not None and name != manifest.NAME:
            problem = problem_of_shard(folder, source.files[name], source, advance)
            yield from [problem] if problem else []
        return
    if sealed:
        problem = seal.size_problem(folder, name, sealed)
        if problem:
            yield problem
            return
        checksums = sealed[name].records
    elif source is not None and name in source.files:
        checksums = source.files[name].records
    else:
        checksums = read_records(folder, name) if name.endswith(".pt") else ()
    tensors = source.tensors if source is not None else ()
    for start, length, crc in checksums:
        end = start + length
        if folder.crc32(name, start, end, advance=advance) != crc:
            damaged = [
                f"{tensor.kind} of {tensor.name}"
                for tensor in tensors
                if any(p.file == name and p.offset < end and start < p.offset + p.length for p in tensor.pieces)
            ]
            where = f", in {shortened(damaged, _MAX_NAMED)}" if damaged else ""
            yield f"{folder.path(name)} is damaged: bytes {start} to {end} do not match their CRC-32{where}"


def _check_files(
    folder: Folder, names: Sequence[str], check: Callable[..., Iterator[str]], workers: int, progress: bool
) -> tuple[list[int], list[tuple[str, str]]]:
    """Run `check` on all files in threads, largest files first; return the files' sizes, and their problems."""
    sizes = {}
    for name in dict.fromkeys(names):
        try:
            sizes[name] = folder.size(name) or 0
        except CheckpointError:  # a FIFO, a folder or a device has the name, which `check` reports
            sizes[name] = 0
    with bar(sum(sizes.values()), "verify", shown=progress) as shown, ThreadPoolExecutor(workers) as pool:

        def problems_of(name: str) -> list[tuple[str, str]]:
            try:
                return [(name, text) for text in check(name, shown.update)]
            except (CheckpointError, OSError) as error:
                return [(name, str(error))]

        found = list(pool.map(problems_of, sorted(sizes, key=lambda name: -sizes[name])))
    return list(sizes.values()), [problem for problems in found for problem in problems]


# ---- a file of ort_zero's format ------------------------------------------------------------------------------------


def problem_of_shard(folder: Folder, file: File, source: Source, advance: Callable[[int], Any]) -> str | None:
    """Return the problem of one file, None if it is the file of the manifest. Every byte is read."""
    path = folder.path(file.name)
    wrong = folder.wrong_size(file.name, file.size)
    if wrong:
        return wrong
    wrong = _wrong_extent(folder, file)
    if wrong:
        return f"{path} is damaged: {wrong}"
    digest = xxhash.xxh3_128()
    for block in folder.blocks(file.name, 0, file.size):
        digest.update(block)
        advance(len(block))
    if digest.hexdigest() == file.xxh3_128:
        return None
    damaged = list(_damaged(folder, file, source))
    where = f", in {shortened(damaged, _MAX_NAMED)}" if damaged else ", outside of its tensors"
    return f"{path} is damaged: its content does not match its xxh3-128{where}"


def _wrong_extent(folder: Folder, file: File) -> str | None:
    """Return a message if a file cannot have its size, else None; checked before terabytes of zeros are read."""
    if file.name.endswith(".json"):
        return None if file.size <= manifest.MAX_EXTRA_BYTES else f"{file.size} bytes are too many for it"
    try:
        entries = safetensors_header.read(folder, file.name).entries.values()
    except CorruptCheckpointError:
        return None  # the check of the file's bytes gives a better message
    end = max((entry.offset + entry.nbytes for entry in entries), default=file.size)
    return None if end == file.size else f"its tensors end at byte {end}, it has {file.size}"


def _damaged(folder: Folder, file: File, source: Source) -> Iterator[str]:
    index = list(source.files).index(file.name)
    for tensor in source.tensors:
        assert isinstance(tensor.pieces, PieceRuns), "the manifest's reader makes runs"
        for run in tensor.pieces.runs:
            if index in run.files():
                piece = tensor.pieces.piece(run, run.files().index(index))
                digest = xxhash.xxh3_64()
                for block in folder.blocks(file.name, piece.offset, piece.offset + piece.length):
                    digest.update(block)
                if digest.digest() != piece.check:
                    yield f"{tensor.kind} of {tensor.name}"
