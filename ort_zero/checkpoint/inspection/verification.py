"""Check every byte of a checkpoint, and that its files belong together."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint import seal
from ort_zero.checkpoint.dcp import verification as dcp_verification
from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.finding import find, format_in, no_checkpoint, note_on_other, open_in, whole_checkpoints_text
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.reads.shard_checks import is_of_another_save, problem_of_shard, thread_buffer
from ort_zero.checkpoint.records import MAX_NAMED
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

_OURS = re.compile(r"rank_.*|.*\.safetensors")
_OF_MACOS = "._"
"""Prefix of the names of files that macOS adds beside others on disks of other systems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of :func:`verify`: number and size of the files that were read, and their problems."""

    root: str
    """Folder or URL of the checkpoint."""
    tag: str
    format: str
    """Format: "ort_zero" or "deepspeed"."""
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


@dataclass
class _Findings:
    """The findings of the checks of one checkpoint; filled from several threads."""

    files: int = 0
    bytes: int = 0
    tensors: int = 0
    tag: str = ""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """File name and text of each problem; the name is empty for problems of no single file."""
    notes: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Names of the files that were read."""


def verify(
    path: str,
    tag: str | None = None,
    *,
    workers: int = 2,
    trust_pickle: bool = False,
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
        trust_pickle: unpickle any object in DeepSpeed's files, which may run code.
        tp_split: rules for how tensor-parallel ranks share tensors, as for ``aggregate``.
        seal_it: if there is no problem, write checksums of all files beside the checkpoint, for later reads.
        progress: show a bar, if stderr is a terminal.

    Raises:
        CheckpointError: there is no checkpoint, or it is to be sealed and has checksums of its own.
    """
    if workers < 1:
        raise CheckpointError(f"workers must be at least 1, not {workers}")
    start = time.monotonic()
    located = find(path, tag)
    folder = located.folder
    findings = _Findings(tag=folder.name, notes=list(located.notes))
    format_name = format_in(folder)
    if format_name is None:
        raise no_checkpoint(folder)
    if seal_it:
        seal.refuse_own_checksums(format_name, folder.path())
    if format_name == "ort_zero":
        _verify_ours(folder, findings, workers, progress)
    elif format_name == "dcp":
        _verify_dcp(folder, findings, workers, progress)
    else:
        _verify_deepspeed(folder, findings, workers, trust_pickle, tp_split, progress)
    if format_name != "ort_zero" and not findings.problems:
        _compare_or_seal(folder, findings, seal_it, progress)
    if findings.problems and located.by_latest is not None:
        findings.notes.append(f"{manifest.LATEST} names it; {whole_checkpoints_text(located.by_latest, folder)}")
    return VerifyReport(
        root=folder.path(),
        tag=findings.tag,
        format=format_name,
        files=findings.files,
        bytes=findings.bytes,
        tensors=findings.tensors,
        problems=tuple(text for _, text in sorted(findings.problems, key=lambda problem: problem[0])),
        notes=tuple(findings.notes),
        seconds=time.monotonic() - start,
    )


def _verify_ours(folder: Folder, findings: _Findings, workers: int, progress: bool) -> None:
    """Check the manifest, every file in its list, and whether the folder has other files."""
    findings.files, findings.bytes = 1, folder.size(manifest.NAME) or 0
    try:
        source = manifest.read(folder)
        assert source is not None, "the manifest existed a moment ago"
    except CheckpointError as error:
        findings.problems.append((manifest.NAME, str(error)))
        return
    findings.tag, findings.tensors = source.tag, len(source.tensors)
    findings.notes += [*note_on_other(folder), *source.remarks()]
    for name in folder.names():
        if name in source.files or name == manifest.NAME or name.startswith(_OF_MACOS):
            continue
        if name.endswith(PARTIAL):
            findings.notes.append(f"{folder.path(name)} is left over from an interrupted save and may be removed")
        elif is_of_another_save(folder, name, source):
            findings.notes.append(
                f"{folder.path(name)} is left over from a save of this tag that was interrupted and may be removed"
            )
        elif _OURS.fullmatch(name):
            text = f"{folder.path(name)} is one too many: the manifest does not list it; remove it"
            findings.problems.append((name, text))

    def check(name: str, advance: Callable[[int], Any]) -> list[str]:
        problem = problem_of_shard(folder, source.files[name], source, advance)
        return [problem] if problem else []

    _check_files(folder, list(source.files), check, findings, workers, progress)


def _verify_deepspeed(
    folder: Folder, findings: _Findings, workers: int, trust_pickle: bool, tp_split: Sequence[str], progress: bool
) -> None:
    """Check every record of every state file, and whether the files belong together."""
    from ort_zero.checkpoint.deepspeed.split_rules import parse_rules
    from ort_zero.checkpoint.deepspeed.tensor_parallel import SplitUnknownError

    parse_rules(tp_split)  # a wrong rule is the user's fault, not the checkpoint's
    names = [*file_names.state_file_names(folder), *file_names.universal_file_names(folder)]
    _check_files(
        folder, names, lambda name, advance: _problems_of_torch_file(folder, name, advance), findings, workers, progress
    )
    try:
        source = open_in(folder, trust_pickle, tp_split)
    except SplitUnknownError as error:
        findings.notes.append(f"its tensors cannot be put together yet: {error}")
    except CheckpointError as error:
        # a damaged file that was named already need not be named again
        if not any(folder.path(name) in str(error) for name, _ in findings.problems):
            findings.problems.append(("", str(error)))
    else:
        findings.tensors = len(source.tensors)
        findings.notes += source.notes


def _problems_of_torch_file(folder: Folder, name: str, advance: Callable[[int], Any]) -> Iterable[str]:
    """Yield the problems of one ``.pt`` file: of its zip headers, and each record whose CRC-32 differs."""
    from ort_zero.checkpoint import torch_file

    buffer = thread_buffer(folder)
    for record in torch_file.read_records(folder, name):
        if not torch_file.crc_is_right(folder, name, record, buffer):
            yield f"{folder.path(name)} is damaged: the CRC-32 of its record {record.name} is wrong"
        advance(record.length)


def _verify_dcp(folder: Folder, findings: _Findings, workers: int, progress: bool) -> None:
    """Check every record of every shard, and that the shards cover each tensor once."""
    unchecked: list[str] = []
    try:
        source = open_in(folder)
        shards = dcp_verification.shards_of(folder, source)
    except CheckpointError as error:
        findings.problems.append(("", str(error)))
        return

    def check(name: str, advance: Callable[[int], Any]) -> Iterable[str]:
        buffer = thread_buffer(folder)
        return dcp_verification.problems_of_file(folder, name, shards[name], buffer, advance, unchecked)

    _check_files(folder, list(shards), check, findings, workers, progress)
    findings.names += dcp_verification.metadata_files(folder)
    findings.tensors = len(source.tensors)
    findings.notes += source.notes
    for name in dcp_verification.surplus_files(folder, list(shards)):
        findings.problems.append((name, f"{folder.path(name)} is one too many: the metadata do not name it; remove it"))
    if unchecked and not folder.exists(seal.NAME):
        findings.notes.append(
            f"the values of {shortened(sorted(set(unchecked)), MAX_NAMED)} could not be checked: the format has no "
            "checksums of them (ort-zero verify --seal writes some)"
        )


def _compare_or_seal(folder: Folder, findings: _Findings, seal_it: bool, progress: bool) -> None:
    """Write a seal, or compare all files with the seal that is there."""
    if seal_it:
        with bar(findings.bytes, "seal", shown=progress) as shown:
            findings.notes.append(f"wrote {seal.seal(folder, findings.names, shown.update)}")
        return
    try:
        sealed = seal.read_seal(folder) or {}
    except CheckpointError as error:
        findings.problems.append((seal.NAME, str(error)))
        return
    findings.problems += [(name, text) for name in sealed for text in seal.problems_of_file(folder, name, sealed)]


def _check_files(
    folder: Folder,
    names: Sequence[str],
    check: Callable[[str, Callable[[int], Any]], Iterable[str]],
    findings: _Findings,
    workers: int,
    progress: bool,
) -> None:
    """Run `check` on all files in threads, largest files first, and add the problems to `findings`."""
    sizes = {}
    for name in names:
        try:
            sizes[name] = folder.size(name) or 0
        except CheckpointError:  # a FIFO, a folder or a device has the name, which `check` reports
            sizes[name] = 0
    findings.names += sizes
    findings.files += len(sizes)
    findings.bytes += sum(sizes.values())
    with bar(sum(sizes.values()), "verify", shown=progress) as shown, ThreadPoolExecutor(workers) as pool:

        def problems_of(name: str) -> list[tuple[str, str]]:
            try:
                return [(name, text) for text in check(name, shown.update)]
            except (CheckpointError, OSError) as error:
                return [(name, str(error))]

        for problems in pool.map(problems_of, sorted(sizes, key=lambda name: -sizes[name])):
            findings.problems += problems
