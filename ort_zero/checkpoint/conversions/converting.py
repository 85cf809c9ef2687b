"""Writes a checkpoint again in another format, for another world size or ZeRO stage.

The new checkpoint is written into a hidden folder beside its place and gets its name when it is complete, so that a run
that is killed leaves the destination as it was. Every byte that is read is checked as in loading.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_zero.checkpoint.conversions import convert_deepspeed, convert_ours, convert_universal
from ort_zero.checkpoint.conversions.conversion import Conversion, Wanted
from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.files.allowed_names import check_tag
from ort_zero.checkpoint.files.dtypes import CHOICES, wanted
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.finding import open_found
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.opening import format_in
from ort_zero.checkpoint.reads.checked_reads import check_records_of
from ort_zero.checkpoint.records import MOST_NAMED, Source
from ort_zero.distributed.process_group import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

FORMATS = ("ort_zero", "deepspeed", "universal")
"""The values of ``to``."""
SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default of the option of that name."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """The report of :func:`convert`: what was written."""

    source: str
    """Folder or URL of the checkpoint that was read."""
    source_format: str
    """Who wrote it: "ort_zero" or "deepspeed"."""
    source_world_size: int
    source_stage: int
    destination: str
    """Folder or URL of the new checkpoint."""
    to: str
    """Its format."""
    tag: str
    step: int | None
    world_size: int
    zero_stage: int
    dtype: str
    """Code of the dtype of the module's weights."""
    files: Mapping[str, int]
    """Size in bytes of each file by name."""
    bytes: int
    seconds: float
    warnings: tuple[str, ...]


def convert(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    to: str = "ort_zero",
    tag: str | None = None,
    world_size: int | None = None,
    stage: int | None = None,
    dtype: str = "keep",
    sub_group_size: int = SUB_GROUP_SIZE,
    overwrite: bool = False,
    trust_pickle: bool = False,
    tp_split: Sequence[str] = (),
    ranks: RankGroup | None = None,
    progress: bool = True,
) -> ConvertReport:
    """Write the checkpoint `src` into ``dst/TAG`` in the format `to`; what is read is never changed.

    Masters, moments and everything else keep every bit; weights in 16 bits follow from the masters by a cast. Memory is
    bounded by what the operating system keeps of files; one rank's part lies in a temporary file meanwhile, with what
    the next ranks need of the pieces that were read for it.

    Args:
        src: folder or fsspec URL of a checkpoint of ours or DeepSpeed's, or of several.
        dst: folder or fsspec URL for checkpoints; made if missing.
        to: "ort_zero", "deepspeed" (as ``save_checkpoint`` of ZeRO writes), or "universal" (DeepSpeed's).
        tag: which checkpoint of several; the new one has the same tag.
        world_size: number of ranks that the new checkpoint is cut for; default that of the source.
        stage: ZeRO stage of the new checkpoint, 1 to 3, for our format also 0; default that of the source.
        dtype: of the module's weights: "keep", "fp32", "fp16" or "bf16".
        sub_group_size: DeepSpeed's option of that name, of the run that is to load a checkpoint of ZeRO-3.
        overwrite: replace a checkpoint of that tag.
        trust_pickle: unpickle whatever DeepSpeed's files hold.
        tp_split: rules for how tensor-parallel ranks share tensors, as for ``aggregate``.
        ranks: ranks that share the files; all must call.
        progress: show a bar on a terminal.

    Raises:
        CorruptCheckpointError: the source is damaged.
        CheckpointError: bad choices, a source that cannot be read or written so, a destination that is not empty.
        RankError: another rank failed.
    """
    started = time.perf_counter()
    ranks = ranks or RankGroup()
    prepared: Any = None
    with ranks.raise_on_all("preparing the conversion"):
        if ranks.rank == 0:
            source = open_found(os.fspath(src), tag, trust_pickle, tp_split)
            if not source.weights():
                raise CheckpointError(f"{source.root} holds no weights, so there is nothing to convert")
            choices = _choices(source, to, world_size, stage, dtype, sub_group_size)
            place = open_folder(dst).child(choices.tag)
            _refuse_place(place, source, overwrite)
            target = _make_target(open_folder(dst), place, choices)
            prepared = source, choices, target
    source, choices, target = ranks.broadcast(prepared)
    work = Conversion(source=source, target=open_folder(target), wanted=choices, trust_pickle=trust_pickle)
    written = False
    try:
        _write(work, ranks, progress)
        written = True
        files: dict[str, int] = {}
        for own in ranks.gather(work.files):
            files.update(own)
        with ranks.raise_on_all("publishing"):
            warnings: tuple[str, ...] = source.notes
            if ranks.rank == 0:
                warnings += _publish(open_folder(dst), work.target, choices)
    except BaseException:
        _discard(work, ranks, written)
        raise
    finally:
        work.close()
    return ConvertReport(
        source=source.root,
        source_format=source.format,
        source_world_size=source.world_size,
        source_stage=source.zero_stage,
        destination=open_folder(dst).child(choices.tag).path(),
        to=to,
        tag=choices.tag,
        step=source.step,
        world_size=choices.world_size,
        zero_stage=choices.stage,
        dtype=choices.dtype,
        files=dict(sorted(files.items())),
        bytes=sum(files.values()),
        seconds=time.perf_counter() - started,
        warnings=warnings,
    )


def _choices(
    source: Source, to: str, world_size: int | None, stage: int | None, dtype: str, sub_group_size: int
) -> Wanted:
    """Return the form of the new checkpoint.

    Raises:
        CheckpointError: a choice that is none, or that does not go with another.
    """
    if to not in FORMATS:
        raise CheckpointError(f"the format {to!r} is not known; choose {', '.join(FORMATS)}")
    if dtype not in CHOICES:
        raise CheckpointError(f"the dtype {dtype!r} is not known; choose {', '.join(CHOICES)}")
    size = source.world_size if world_size is None else world_size
    if not 1 <= size <= 1 << 20:
        raise CheckpointError(f"the world size is {size}, must be at least 1")
    if sub_group_size < 1:
        raise CheckpointError(f"the sub-group size is {sub_group_size}, must be at least 1")
    number = source.zero_stage if stage is None else stage
    least = 0 if to == "ort_zero" else 1
    if not least <= number <= 3:
        raise CheckpointError(f"ZeRO-{number} cannot be written in the format {to}; give a stage from {least} to 3")
    tag = source.tag.rstrip("/").rpartition("/")[2]
    check_tag(tag)
    code = wanted(dtype, source.dtype or "F32")
    token = uuid.uuid4().hex[:16]
    return Wanted(to=to, world_size=size, stage=number, dtype=code, sub_group_size=sub_group_size, tag=tag, token=token)


def _refuse_place(place: Folder, source: Source, overwrite: bool) -> None:
    """Raise CheckpointError unless `place` is free, or holds a checkpoint and nothing else that may be replaced."""
    if os.path.realpath(place.url) == os.path.realpath(source.root):
        raise CheckpointError(f"the destination {place.path()} is the source itself; choose another folder")
    names = place.names()
    if not names or (not isinstance(place, LocalFolder) and all(map(_is_left_over, names))):
        return
    if not overwrite:
        raise CheckpointError(f"{place.path()} exists already; choose another folder, or pass --overwrite")
    if not isinstance(place, LocalFolder):
        raise CheckpointError(f"{place.path()} exists already, and only local folders are replaced; remove it")
    foreign = [name for name in names if not _is_of_a_checkpoint(name)]
    if format_in(place) is None or foreign:
        listed = f": {shortened(foreign, MOST_NAMED)}" if foreign else ""
        raise CheckpointError(f"{place.path()} holds what belongs to no checkpoint{listed}; move it away")


def _is_of_a_checkpoint(name: str) -> bool:
    own = re.fullmatch(r"manifest\.json|rank_\d{5}_(master|optimizer|extra)(\.[0-9a-f]{8})?\.(safetensors|json)", name)
    patterns = (file_names.OPTIMIZER_FILE, file_names.RANK_MODULE_FILE, file_names.MODULE_FILE)
    return bool(own) or _is_left_over(name) or name == "zero" or any(pattern.fullmatch(name) for pattern in patterns)


def _is_left_over(name: str) -> bool:
    """Return whether a name is that of a file that is not complete."""
    return name.startswith(".") and name.endswith(PARTIAL)


def _make_target(parent: Folder, place: Folder, choices: Wanted) -> str:
    """Return the folder to write into, which is made: hidden beside `place`, or `place` itself if it is remote."""
    if not isinstance(place, LocalFolder):
        place.make()
        return place.url
    parent.make()
    left = rf"\.({re.escape(choices.tag)}|latest|latest_universal)\.[0-9a-f]{{16}}{re.escape(PARTIAL)}"
    for name in parent.names():  # of runs that were killed
        if re.fullmatch(left, name):
            path = parent.path(name)
            shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else parent.remove(name)
    hidden = parent.child(f".{choices.tag}.{choices.token}{PARTIAL}")
    hidden.make()
    return hidden.url


def _write(work: Conversion, ranks: RankGroup, progress: bool) -> None:
    """Write all files into the target. All ranks must call."""
    choices = work.wanted
    # neighbours, which share pieces of the source
    shares = range(*(choices.world_size * number // ranks.size for number in (ranks.rank, ranks.rank + 1)))
    parts: dict[int, bytes] = {}
    with (
        ranks.raise_on_all("converting"),
        bar(len(shares), "convert", "files", shown=progress and not ranks.rank) as shown,
    ):
        if choices.to != "ort_zero":
            work.groups()  # refuses a source without optimizer before anything is written
        if choices.to == "universal":
            convert_universal.check(work)
            convert_universal.write_share(work, ranks.rank, ranks.size)
            if ranks.rank == 0:
                convert_universal.write_rest(work)
        else:
            for rank in shares:
                work.new_rank(last=rank == shares[-1])
                if choices.to == "ort_zero":
                    parts[rank] = convert_ours.write_rank(work, rank)
                else:
                    convert_deepspeed.write_rank(work, rank)
                shown.update(1)
    check_records_of(work.folder, work.source.files, work.reader.parts, ranks)
    everyone: dict[int, bytes] = {}
    for own in ranks.gather(parts):
        everyone.update(own)
    with ranks.raise_on_all("converting"):
        if choices.to == "ort_zero" and ranks.rank == 0:
            convert_ours.write_manifest(work, [everyone[rank] for rank in range(choices.world_size)])


def _publish(parent: Folder, target: Folder, choices: Wanted) -> tuple[str, ...]:
    """Give the new checkpoint its name, and let ``latest`` name it; return remarks."""
    place = parent.child(choices.tag)
    if target.url != place.url:
        if place.names():
            _exchange(target.url, place.url)
            shutil.rmtree(target.url)
        else:
            os.rename(target.url, place.url)
    else:
        _remove_left_overs(place)
    latest = convert_universal.LATEST if choices.to == "universal" else manifest.LATEST
    if parent.exists(latest) and parent.read(latest).decode(errors="replace").strip() != choices.tag:
        return (f"{parent.path(latest)} names another checkpoint and stays as it is",)
    parent.write(latest, choices.tag.encode(), choices.token)
    return ()


def _exchange(new: str, old: str) -> None:
    """Let two folders change their names in one step, or in two where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(new), os.fsencode(old)
    if hasattr(libc, "renameat2") and not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return
    aside = f"{new}.old"
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def _remove_left_overs(place: Folder) -> None:
    """Remove what a run that was killed has left of the files of a remote checkpoint, and end its uploads."""
    names = set(place.names())
    for name in filter(_is_left_over, names):
        place.remove_if_possible(name)
    place.end_left_over_uploads(lambda name: _is_left_over(name) or name in names, below=True)


def _discard(work: Conversion, ranks: RankGroup, written: bool) -> None:
    """Remove what this rank has written, but for a remote checkpoint that is whole; rank 0 the hidden folder of all."""
    if not isinstance(work.target, LocalFolder):
        for name in () if written else work.begun:
            work.target.discard(name, work.wanted.token)
            work.target.remove_if_possible(name)
    elif ranks.rank == 0 and work.target.url.endswith(f"{work.wanted.token}{PARTIAL}"):
        shutil.rmtree(work.target.url, ignore_errors=True)
