"""Write a checkpoint again in another format, for another world size or for another ZeRO stage.

The new checkpoint is written into a hidden folder beside the destination, and renamed when it is complete. So a killed
run leaves the destination unchanged. Every byte that is read is compared with its checksum, as in loading.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ort_zero.checkpoint import seal
from ort_zero.checkpoint.conversions import convert_dcp, convert_deepspeed
from ort_zero.checkpoint.conversions.conversion import Conversion
from ort_zero.checkpoint.dcp.reader import METADATA, SUFFIX
from ort_zero.checkpoint.deepspeed import file_names
from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.checkpoint.files.dtypes import CHOICES, output_code, torch_dtype
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder, refuse_within
from ort_zero.checkpoint.finding import find_source, format_in
from ort_zero.checkpoint.format import manifest, values
from ort_zero.checkpoint.reads.checked_reads import ReadRequest, check_records_of
from ort_zero.checkpoint.reads.training_state import OPTIONAL_KEYS
from ort_zero.checkpoint.records import BUFFER, MAX_NAMED, Source, Tensor, buffer_kind, is_extra_state
from ort_zero.checkpoint.saves.checkpoint_writer import Shard, ShardEntry, joined, manifest_bytes, write_rank_files
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

FORMATS = ("ort_zero", "deepspeed", "universal", "dcp")
SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's default of the option ``sub_group_size``, in elements."""
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """The report of :func:`convert` about the source and the new checkpoint."""

    source: str
    """Folder or URL of the checkpoint that was read."""
    source_format: str
    """Format of the source: "ort_zero", "deepspeed" or "dcp"."""
    source_world_size: int
    source_stage: int
    destination: str
    """Folder or URL of the new checkpoint."""
    to: str
    """Format of the new checkpoint."""
    tag: str
    step: int | None
    world_size: int
    zero_stage: int
    dtype: str
    """Dtype of the module's weights, as a safetensors code such as "BF16"; "keep" if each keeps its own ("dcp")."""
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
    tp_split: Sequence[str] = (),
    ranks: RankGroup | None = None,
    progress: bool = True,
) -> ConvertReport:
    """Write the checkpoint `src` into ``dst/TAG`` in the format `to`; `src` is never changed.

    Master weights and optimizer states keep every bit; 16-bit weights are the master weights, cast. The tensors of one
    rank lie in a memory-mapped temporary file, so the operating system decides how much memory they take.

    Args:
        src: folder or fsspec URL: of one checkpoint of any format, or of several with a file ``latest``.
        dst: folder or fsspec URL for checkpoints; made if missing.
        to: "ort_zero", "deepspeed" (the files of ``save_checkpoint`` under ZeRO), "universal" (DeepSpeed's), or "dcp"
            (``torch.distributed.checkpoint``, for FSDP).
        tag: name of the checkpoint, if `src` holds several; the new checkpoint has the same tag.
        world_size: number of ranks of the new checkpoint; by default as in `src`. "dcp" has the files of one rank.
        stage: ZeRO stage of the new checkpoint, 1 to 3, for "ort_zero" also 0; by default as in `src`. "dcp" has none.
        dtype: dtype of the module's weights: "keep", "fp32", "fp16" or "bf16".
        sub_group_size: DeepSpeed's option ``sub_group_size`` of the run that will load a checkpoint of ZeRO-3.
        overwrite: replace an existing checkpoint with the same tag.
        tp_split: rules for how tensor-parallel ranks share tensors, as for ``aggregate``.
        ranks: ranks that share the files; all must call.
        progress: show a progress bar on a terminal.

    Raises:
        CorruptCheckpointError: the source is damaged.
        CheckpointError: an argument is wrong, `src` cannot be read or converted, or the destination is not empty.
        RankError: another rank failed.
    """
    started = time.perf_counter()
    ranks = ranks or RankGroup()
    prepared: Any = None
    with ranks.raise_on_all("preparing the conversion"):
        if ranks.rank == 0:
            source = find_source(os.fspath(src), tag, tp_split)
            if not source.weights():
                raise CheckpointError(f"{source.root} holds no weights, so there is nothing to convert")
            new = _described(source, to, world_size, stage, dtype, sub_group_size)
            place = open_folder(dst).child(new.tag)
            _refuse_place(place, source, overwrite)
            target = _make_target(open_folder(dst), place, new)
            prepared = source, new, target
    source, new, target = ranks.broadcast(prepared)
    work = Conversion(source=source, target=open_folder(target), new=new, sub_group_size=sub_group_size)
    written = False
    try:
        _write(work, ranks, progress)
        written = True
        files: dict[str, int] = {}
        for rank_files in ranks.gather(work.files):
            files.update(rank_files)
        with ranks.raise_on_all("publishing"):
            warnings: tuple[str, ...] = (*source.notes, *work.notes)
            if ranks.rank == 0:
                warnings += _publish(open_folder(dst), work.target, new)
    except BaseException:
        _discard(work, ranks, written)
        raise
    finally:
        work.scratch.close()
    return ConvertReport(
        source=source.root,
        source_format=source.format,
        source_world_size=source.world_size,
        source_stage=source.zero_stage,
        destination=open_folder(dst).child(new.tag).path(),
        to=to,
        tag=new.tag,
        step=source.step,
        world_size=new.world_size,
        zero_stage=new.zero_stage,
        dtype=new.dtype or "keep",
        files=dict(sorted(files.items())),
        bytes=sum(files.values()),
        seconds=time.perf_counter() - started,
        warnings=warnings,
    )


def _described(
    source: Source, to: str, world_size: int | None, stage: int | None, dtype: str, sub_group_size: int
) -> Source:
    if to not in FORMATS:
        raise CheckpointError(f"the format {to!r} is not known; choose {', '.join(FORMATS)}")
    if dtype not in CHOICES:
        raise CheckpointError(f"the dtype {dtype!r} is not known; choose {', '.join(CHOICES)}")
    size = 1 if to == "dcp" else source.world_size if world_size is None else world_size  # torch divides when it loads
    if not 1 <= size <= 1 << 20:
        raise CheckpointError(f"the world size is {size}, must be at least 1")
    if sub_group_size < 1:
        raise CheckpointError(f"the sub-group size is {sub_group_size}, must be at least 1")
    number = source.zero_stage if stage is None else stage
    min_stage = 0 if to in ("ort_zero", "dcp") else 1
    if not min_stage <= number <= 3:
        raise CheckpointError(f"ZeRO-{number} cannot be written in the format {to}; give a stage from {min_stage} to 3")
    tag = source.tag.rstrip("/").rpartition("/")[2]
    if tag in (".", "..") and "://" not in source.root:
        tag = os.path.basename(os.path.abspath(source.root))
    if not is_plain_name(tag) or tag in (manifest.LATEST, file_names.LATEST_UNIVERSAL):
        raise CheckpointError(f"{source.root}: {tag!r} cannot be the name of the new checkpoint; rename the source")
    token = uuid.uuid4().hex[:16]
    optimizer = source.optimizer
    return replace(
        source,
        format=to,
        tag=tag,
        step=source.step or 0,
        world_size=size,
        zero_stage=0 if to == "dcp" else number,
        tensors=(),
        files={},
        optimizer=optimizer and replace(optimizer, class_name=optimizer.class_name or "unknown", scalars={}),
        dtype=None if to == "dcp" and dtype == "keep" else output_code(dtype, source.dtype or "F32"),
        run_id=uuid.uuid5(uuid.NAMESPACE_OID, token).hex,
        save_id=token,
    )


def _refuse_place(place: Folder, source: Source, overwrite: bool) -> None:
    """Raise CheckpointError unless `place` is free, or holds nothing but a checkpoint that may be replaced."""
    refuse_within(place, source.root)
    names = place.names()
    if not names or (not isinstance(place, LocalFolder) and all(map(_is_left_over, names))):
        return
    if not overwrite:
        raise CheckpointError(f"{place.path()} exists already; choose another folder, or pass --overwrite")
    if not isinstance(place, LocalFolder):
        raise CheckpointError(f"{place.path()} exists already, and only local folders are replaced; remove it")
    foreign = [name for name in names if not _is_of_a_checkpoint(name)]
    if format_in(place) is None or foreign:
        listed = f": {shortened(foreign, MAX_NAMED)}" if foreign else ""
        raise CheckpointError(f"{place.path()} holds files that belong to no checkpoint{listed}; move them away")


def _is_of_a_checkpoint(name: str) -> bool:
    ours = re.fullmatch(r"manifest\.json|rank_\d{5}_(master|optimizer|extra)(\.[0-9a-f]{8})?\.(safetensors|json)", name)
    patterns = (file_names.OPTIMIZER_FILE, file_names.RANK_MODULE_FILE, file_names.MODULE_FILE)
    others = (METADATA, seal.NAME, "zero")
    if ours or _is_left_over(name) or name in others or name.endswith(SUFFIX):
        return True
    return any(pattern.fullmatch(name) for pattern in patterns)


def _is_left_over(name: str) -> bool:
    return name.startswith(".") and name.endswith(PARTIAL)


def _make_target(parent: Folder, place: Folder, new: Source) -> str:
    """Make and return the folder to write into: hidden beside `place`, or `place` itself if it is remote."""
    if not isinstance(place, LocalFolder):
        place.make()
        return place.url
    parent.make()
    left_over = rf"\.({re.escape(new.tag)}|latest|latest_universal)\.[0-9a-f]{{16}}{re.escape(PARTIAL)}"
    for name in parent.names():  # files of killed runs
        if re.fullmatch(left_over, name):
            path = parent.path(name)
            shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else parent.remove(name)
    hidden = parent.child(f".{new.tag}.{new.save_id}{PARTIAL}")
    hidden.make()
    return hidden.url


def _write(work: Conversion, ranks: RankGroup, progress: bool) -> None:
    """Write all files into the target. All ranks must call."""
    new = work.new
    # neighbouring ranks, since they need the same pieces of the source
    target_ranks = range(*(new.world_size * number // ranks.size for number in (ranks.rank, ranks.rank + 1)))
    parts: dict[int, bytes] = {}
    with (
        ranks.raise_on_all("converting"),
        bar(len(target_ranks), "convert", "files", shown=progress and not ranks.rank) as shown,
    ):
        if new.format != "dcp":
            work.check_shapes()
        if new.format == "universal":
            convert_deepspeed.check_universal(work)
        if new.format in ("deepspeed", "universal"):
            convert_deepspeed.check(work)
        if new.format == "universal":
            convert_deepspeed.write_universal_share(work, ranks.rank, ranks.size)
            if ranks.rank == 0:
                convert_deepspeed.write_universal_rest(work)
        elif new.format == "dcp":
            if ranks.rank == 0:
                convert_dcp.write(work)
        else:
            for rank in target_ranks:
                work.new_scratch()
                if new.format == "ort_zero":
                    parts[rank] = _write_our_rank(work, rank)
                else:
                    convert_deepspeed.write_rank(work, rank)
                shown.update(1)
    check_records_of(work.folder, work.source.files, work.reader.parts, ranks)
    all_parts: dict[int, bytes] = {}
    for rank_parts in ranks.gather(parts):
        all_parts.update(rank_parts)
    with ranks.raise_on_all("converting"):
        if new.format == "ort_zero" and ranks.rank == 0:
            _write_our_manifest(work, [all_parts[rank] for rank in range(new.world_size)])


def _publish(parent: Folder, target: Folder, new: Source) -> tuple[str, ...]:
    """Give the new checkpoint its final name, and write the tag into ``latest``; return warnings."""
    place = parent.child(new.tag)
    if target.url != place.url:
        if place.names():
            _exchange(target.url, place.url)
            shutil.rmtree(target.url)
        else:
            os.rename(target.url, place.url)
    else:
        for name in filter(_is_left_over, place.names()):  # of a killed run
            place.remove_if_possible(name)
    if new.format == "dcp":
        return ()
    latest = file_names.LATEST_UNIVERSAL if new.format == "universal" else manifest.LATEST
    if parent.exists(latest) and parent.read(latest).decode(errors="replace").strip() != new.tag:
        return (f"{parent.path(latest)} names another checkpoint and stays as it is",)
    parent.write(latest, new.tag.encode(), new.save_id)
    return ()


def _exchange(new: str, old: str) -> None:
    """Exchange the names of two folders in one step, or by several renames where the system lacks ``renameat2``."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(new), os.fsencode(old)
    if hasattr(libc, "renameat2") and not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
        return
    aside = f"{new}.old"
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)


def _discard(work: Conversion, ranks: RankGroup, written: bool) -> None:
    """Remove the files of a failed conversion, but for a remote checkpoint whose files are all `written`."""
    if not isinstance(work.target, LocalFolder):
        for name in () if written else work.begun:
            work.target.discard(name, work.new.save_id)
            work.target.remove_if_possible(name)
    elif ranks.rank == 0 and work.target.url.endswith(f"{work.new.save_id}{PARTIAL}"):
        shutil.rmtree(work.target.url, ignore_errors=True)


# ---- ort_zero's format: each tensor cut into one piece per rank -----------------------------------------------------


def _write_our_rank(work: Conversion, rank: int) -> bytes:
    """Write the files of one rank of the new checkpoint; return the rank's part of the manifest, packed."""
    weights: list[ShardEntry] = []
    moments: list[ShardEntry] = []
    requests: list[ReadRequest] = []
    for tensor in work.source.tensors:
        if is_extra_state(tensor.name) and not tensor.is_optimizer_state:
            continue
        start, length = _part(tensor, rank, work.new.world_size)
        if length:
            room = work.scratch.tensor(length, torch_dtype(tensor.dtype))
            requests.append(ReadRequest(tensor, room, start))
            entry = ShardEntry(name=tensor.name, kind=tensor.kind, start=start, tensor=room)
            (moments if tensor.is_optimizer_state else weights).append(entry)
    work.reader.read(requests)
    tensors: list[Any] = []
    state = vars(work.training_state(rank))
    extra = {k: values.encode(v, k, tensors) for k, v in state.items() if v is not None or k not in OPTIONAL_KEYS}
    extra["counters"] = {"micro_steps": 0, **extra["counters"]} if extra["counters"] else extra["counters"]
    optimizer = work.source.optimizer
    scalars = optimizer.scalars if optimizer is not None and rank == 0 else {}
    shard = Shard(weights=weights, moments=moments, extra=extra, extra_tensors=tensors, scalars=scalars)
    names: list[str] = []
    try:
        part = write_rank_files(work.target, work.new, shard, rank, work.new.world_size, names)
    finally:
        work.begun += names
    for name in names:
        work.target.publish(name, work.new.save_id)
        work.files[name] = work.target.size(name) or 0
    return part.packed()


def _write_our_manifest(work: Conversion, packed: list[bytes]) -> None:
    """Write the manifest, which completes the checkpoint, from the packed parts of all ranks in rank order."""
    shapes = {name: t.shape for name, t in work.source.weights().items() if not is_extra_state(name)}
    about = replace(work.new, root=work.target.path(), frozen=work.source.frozen & shapes.keys())
    data = manifest_bytes(joined(work.target, about, shapes, packed))
    work.begun.append(manifest.NAME)
    work.target.write(manifest.NAME, data, work.new.save_id)
    work.files[manifest.NAME] = len(data)


def _part(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    if tensor.kind == BUFFER or tensor.is_of_one_rank:
        return 0, tensor.elements if tensor.kind == buffer_kind(rank) else 0
    start = tensor.elements * rank // world_size
    return start, tensor.elements * (rank + 1) // world_size - start
