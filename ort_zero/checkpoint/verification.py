"""Checks every byte of a checkpoint and that its files belong together."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import xxhash

from ort_zero.checkpoint import manifest, safetensors_header
from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.manifest import Manifest
from ort_zero.checkpoint.records import File, Source
from ort_zero.checkpoint.storage import CHUNK, Folder
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

_OURS = re.compile(r"rank_.*|.*\.safetensors")
_RANK = re.compile(r"rank_(\d+)_")
_NAMED = 3  # damaged tensors that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What :func:`verify` found."""

    root: str
    """Folder of the checkpoint."""
    tag: str
    format: str
    """"ort_zero" or "deepspeed"."""
    files: int
    """Files that were read."""
    bytes: int
    """Bytes that were read."""
    tensors: int
    """0 if the checkpoint could not be opened."""
    problems: tuple[str, ...]
    """One sentence each, with the name of the file."""
    notes: tuple[str, ...] = ()
    """What is no fault of the checkpoint but should be known."""
    seconds: float

    @property
    def ok(self) -> bool:
        """True if there is no problem."""
        return not self.problems


@dataclass
class _Findings:
    """What the checks of one checkpoint report; filled from several threads."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    """By file; "" for what concerns no single file."""
    notes: list[str] = field(default_factory=list)
    files: int = 0
    tensors: int = 0
    tag: str = ""

    def add(self, name: str, text: str) -> None:
        self.problems.setdefault(name, []).append(text)

    def listed(self) -> tuple[str, ...]:
        return tuple(text for name in sorted(self.problems) for text in self.problems[name])


def verify(
    path: str,
    tag: str | None = None,
    *,
    workers: int = 2,
    trust_pickle: bool = False,
    progress: bool = True,
) -> VerifyReport:
    """Return what is wrong with the checkpoint at `path`; nothing is written.

    Of our format the size and the xxh3-128 of every file are compared with the manifest, of DeepSpeed's the CRC-32 of
    every record and the headers of each file. Both are checked for files that are missing, too many, or of another
    step, run, rank or world size, as far as the files tell.

    Args:
        path: folder or fsspec URL: of one checkpoint, or of several with a file ``latest``.
        tag: which of several.
        workers: files that are read at a time.
        trust_pickle: unpickle whatever DeepSpeed's files hold.
        progress: show a bar, if stderr is a terminal.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if workers < 1:
        raise CheckpointError(f"workers must be at least 1, not {workers}")
    start = time.monotonic()
    folder = manifest.locate(path, tag)
    findings = _Findings(tag=folder.url.rsplit("/", 1)[-1])
    if folder.exists(manifest.NAME):
        name = "ort_zero"
        _verify_ours(folder, findings, workers, progress)
    else:
        if not file_names.recognises(folder):
            raise CheckpointError(
                f"{folder.path()} is no checkpoint: neither {manifest.NAME} nor *_model_states.pt is there "
                "(a save that was interrupted leaves no manifest)"
            )
        name = "deepspeed"
        _verify_deepspeed(folder, findings, workers, trust_pickle, progress)
    return VerifyReport(
        root=folder.url,
        tag=findings.tag,
        format=name,
        files=findings.files,
        bytes=folder.bytes_read,
        tensors=findings.tensors,
        problems=findings.listed(),
        notes=tuple(findings.notes),
        seconds=time.monotonic() - start,
    )


# ---- our format -----------------------------------------------------------------------------------------------------


def _verify_ours(folder: Folder, findings: _Findings, workers: int, progress: bool) -> None:
    findings.files = 1
    try:
        found = manifest.read(folder)
        assert found is not None, "it was there a moment ago"
        source = manifest.source_of(found, folder.url)
    except CheckpointError as error:
        findings.add(manifest.NAME, str(error))
        return
    findings.tag, findings.tensors = source.tag, len(source.tensors)
    files = list(source.files.values())
    for name in folder.names():
        if name in source.files or name == manifest.NAME:
            continue
        if name.endswith(PARTIAL):
            findings.notes.append(f"{folder.path(name)} is left over from an interrupted save and may be removed")
        elif _OURS.fullmatch(name):
            findings.add(name, f"{folder.path(name)} is one too many: the manifest does not list it; remove it")

    def check(file: File, step: Callable[[int], Any]) -> Iterable[str]:
        return _check_ours(folder, file, found, source, step)

    _each(files, check, findings, workers, progress)


def _check_ours(
    folder: Folder, file: File, found: Manifest, source: Source, step: Callable[[int], Any]
) -> Iterable[str]:
    path, size = folder.path(file.name), folder.size(file.name)
    if size is None:
        yield f"{path} is missing"
        return
    if not size and file.size:
        yield f"{path} is empty, the manifest says {file.size} bytes"
        return
    digest = xxhash.xxh3_128()
    if size == file.size:
        for part in _chunks(folder, file.name, size, step):
            digest.update(part)
        if digest.hexdigest() == file.xxh3_128:
            return
    stranger = _stranger(_metadata(folder, file.name, size), file.name, found)
    if stranger:
        yield f"{path} {stranger}"
    elif size != file.size:
        kind = "is truncated: it" if size < file.size else "is too long: it"
        yield f"{path} {kind} has {size} bytes, the manifest says {file.size}"
    else:
        yield f"{path} is damaged: its content does not match its xxh3-128{_damaged_tensors(folder, file, source)}"


def _metadata(folder: Folder, name: str, size: int) -> dict[str, Any]:
    """Return what a shard says of itself; empty if it says nothing that can be read."""
    try:
        if name.endswith(".json"):
            value = json.loads(folder.read(name))
        else:
            value = safetensors_header.read_metadata(folder, name, size)
        return value if isinstance(value, dict) else {}
    except (ValueError, CorruptCheckpointError):
        return {}


def _stranger(metadata: dict[str, Any], name: str, found: Manifest) -> str | None:
    """Return to what else a shard belongs, None if to this very checkpoint and place."""
    run, save, rank = (metadata.get(key) for key in ("run_id", "save_id", "rank"))
    if run is not None and run != found.run_id:
        return "belongs to another run"
    if save is not None and save != found.save_id:
        told = [f"{key} {metadata[key]}" for key in ("step", "tag") if key in metadata]
        return "belongs to another save" + (f" ({', '.join(told)})" if told else "")
    mine = _RANK.match(name)
    if rank is not None and mine and str(rank).isdigit() and int(rank) != int(mine.group(1)):
        return f"is rank {int(rank)}'s file"
    return None


def _damaged_tensors(folder: Folder, file: File, source: Source) -> str:
    """Return ", in ..." with the tensors of `file` whose own checksums are wrong, "" if none is."""
    names = []
    for tensor in source.tensors:
        for piece in tensor.pieces:
            if piece.file != file.name or piece.check is None:
                continue
            digest = xxhash.xxh3_64()
            for part in _chunks(folder, file.name, piece.length, lambda _: None, piece.offset):
                digest.update(part)
            if digest.hexdigest() != piece.check:
                names.append(f"{tensor.kind} of {tensor.name}")
    if not names:
        return ", outside of its tensors"
    return f", in {shortened(names, _NAMED)}"


# ---- DeepSpeed's format ---------------------------------------------------------------------------------------------


def _verify_deepspeed(folder: Folder, findings: _Findings, workers: int, trust_pickle: bool, progress: bool) -> None:
    from ort_zero.checkpoint.deepspeed.reader import open_deepspeed

    names = file_names.state_file_names(folder)
    files = [File(name=name, size=folder.size(name) or 0) for name in names]

    def check(file: File, step: Callable[[int], Any]) -> Iterable[str]:
        return _check_deepspeed(folder, file, step)

    _each(files, check, findings, workers, progress)
    try:
        source = open_deepspeed(folder, trust_pickle)
    except CheckpointError as error:
        # a damaged file that was named already need not be named again
        if not any(folder.path(name) in str(error) for name in findings.problems):
            findings.add("", str(error))
        return
    findings.tensors = len(source.tensors)
    findings.notes += source.notes


def _check_deepspeed(folder: Folder, file: File, step: Callable[[int], Any]) -> Iterable[str]:
    from ort_zero.checkpoint import torch_file

    try:
        records = torch_file.read_records(folder, file.name)
    except CheckpointError as error:
        yield str(error)
        return
    buffer = _buffer()
    for record in records:
        if not torch_file.crc_is_right(folder, file.name, record, buffer):
            yield f"{folder.path(file.name)} is damaged: the CRC-32 of its record {record.name} is wrong"
        step(record.length)


# ---- both -----------------------------------------------------------------------------------------------------------


def _each(
    files: list[File],
    check: Callable[[File, Callable[[int], Any]], Iterable[str]],
    findings: _Findings,
    workers: int,
    progress: bool,
) -> None:
    """Run `check` on all files in threads, largest files first, and collect what it yields."""
    findings.files += len(files)
    total = sum(file.size for file in files)
    with bar(total, "verify", shown=progress) as shown, ThreadPoolExecutor(workers) as pool:

        def one(file: File) -> tuple[str, list[str]]:
            try:
                return file.name, list(check(file, shown.update))
            except (CheckpointError, OSError) as error:
                return file.name, [f"{error}"]

        for name, texts in pool.map(one, sorted(files, key=lambda f: -f.size)):
            for text in texts:
                findings.add(name, text)


_local = threading.local()


def _buffer() -> memoryview:
    """Return this thread's buffer of one chunk."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(CHUNK))
    return _local.buffer


def _chunks(
    folder: Folder, name: str, length: int, step: Callable[[int], Any], offset: int = 0
) -> Iterable[memoryview]:
    """Yield the bytes of a file in a buffer that is used again."""
    done = 0
    while done < length:
        part = _buffer()[: min(CHUNK, length - done)]
        folder.read_into(name, offset + done, part)
        yield part
        done += len(part)
        step(len(part))
