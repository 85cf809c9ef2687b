"""Write a checkpoint: every rank its shards, then rank 0 the manifest, which makes the checkpoint exist.

A shard is a safetensors file of live tensors, hashed while it is written, never copied whole.
"""

from __future__ import annotations

import functools
import json
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, NamedTuple

import torch
import xxhash

from ort_zero.checkpoint.files import dtypes, safetensors_header
from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.files.safetensors_header import HeaderEntry
from ort_zero.checkpoint.files.storage import CHUNK, Folder, LocalFolder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.model_files.config_files import keep_beside
from ort_zero.checkpoint.pieces import PieceRun, PieceRuns, add_piece
from ort_zero.checkpoint.records import MASTER, WEIGHT, File, Shape, Source, Tensor
from ort_zero.checkpoint.zero_to_fp32 import SCRIPT_NAME, write_script
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.garbage import collection_paused

BLOCK = 512 << 10
"""Number of bytes that are hashed and written at a time: the kernel copies them from the processor's cache.

A write ends at a multiple of `BLOCK` in the file: the kernel caches aligned writes to a file in larger pages.
"""
MAX_BUFFERS = 1000
"""Maximum number of buffers of one write; the kernel accepts 1024."""
_WAY_OUT = 'set "checkpoint": {"sharded": false}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A range of elements of one tensor, as it lies in this rank's memory."""

    name: str
    kind: str
    start: int
    """First element in the flattened tensor."""
    tensor: torch.Tensor
    """The elements, 1-D and contiguous, on any device."""

    @property
    def key(self) -> str:
        """Key in the safetensors header: the name of masters and weights, ``kind/name`` of others."""
        return self.name if self.kind in (MASTER, WEIGHT) else f"{self.kind}/{self.name}"

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of one rank in a checkpoint. Its tensors are the live tensors or copies."""

    weights: list[ShardEntry]
    """Masters, parameters without master, buffers."""
    moments: list[ShardEntry]
    """States of the optimizer with one value per element."""
    extra: dict[str, Any]
    """JSON values: counters, scheduler, loss scaler, the user's state."""
    extra_tensors: list[torch.Tensor]
    scalars: Mapping[str, Mapping[str, float]]
    """Numbers of this rank's parameters, such as ``step``: parameter name to number, by key."""


class Written(NamedTuple):
    """A range of elements of one tensor, as it lies in a file."""

    kind: str
    name: str
    dtype: str
    run: PieceRun
    """One piece; its file is an index among the files of the rank."""


def write_shard(
    folder: Folder,
    name: str,
    entries: Sequence[ShardEntry],
    metadata: dict[str, str],
    token: str,
    durable: bool = False,
    index: int = 0,
) -> tuple[File, list[Written]]:
    """Write a safetensors file under its partial name; :meth:`Folder.publish` with `token` makes it visible."""
    ordered = sorted(entries, key=lambda e: -e.tensor.element_size())
    rows, position = [], 0
    for entry in ordered:
        try:
            code = dtypes.code_of(entry.tensor.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{entry.key}: {error}; {_WAY_OUT}") from None
        rows.append(HeaderEntry(entry.key, code, (entry.tensor.numel(),), position, entry.nbytes))
        position += entry.nbytes
    header = safetensors_header.encode(rows, metadata, _WAY_OUT)
    size = len(header) + position
    file_hash = xxhash.xxh3_128(header)
    written = []
    with folder.writing(name, token, durable, size) as stream:
        unwritten = [memoryview(header)]
        for entry, row in zip(ordered, rows):
            piece_hash = xxhash.xxh3_64()
            end = start = len(header) + row.offset
            for block in _blocks(entry.tensor, start):
                piece_hash.update(block)
                file_hash.update(block)
                unwritten.append(block)
                end += len(block)
                if end % BLOCK == 0 or len(unwritten) == MAX_BUFFERS:
                    stream.writelines(unwritten)
                    unwritten = []
            run = PieceRun(index, start, row.nbytes, entry.start, piece_hash.digest())
            written.append(Written(entry.kind, entry.name, row.dtype, run))
        stream.writelines(unwritten)
    return File(name=name, size=size, xxh3_128=file_hash.hexdigest()), written


def _blocks(tensor: torch.Tensor, position: int) -> Iterator[memoryview]:
    """Yield the bytes of a 1-D tensor: views of CPU memory, or copies from a device one chunk at a time.

    No block crosses a multiple of :data:`BLOCK` in the file, in which the tensor begins at byte `position`.
    """
    step = tensor.numel() if tensor.device.type == "cpu" else CHUNK // tensor.element_size()
    for start in range(0, tensor.numel(), max(1, step)):
        data = tensor[start : start + step].detach().cpu().view(torch.uint8).numpy().data
        begin = 0
        while begin < len(data):
            block = data[begin : begin + BLOCK - position % BLOCK]
            yield block
            begin += len(block)
            position += len(block)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save on one rank; tensors are all that it shares with the engine."""

    path: str
    about: Source
    """The checkpoint without its tensors, its files and the numbers of its optimizer; the same on all ranks."""
    shapes: Mapping[str, Shape]
    """Shapes of all parameters and buffers by name, in the order of the model."""
    suffix: str
    """Part of the file names if a tag is saved again: the old manifest's files stay until the new manifest exists."""
    save_latest: bool
    durable: bool
    shard: Shard


class RankPart(NamedTuple):
    """The files that one rank wrote, and what rank 0 needs of them for the manifest."""

    files: list[File]
    written: list[Written]
    scalars: Mapping[str, Mapping[str, float]]
    """Numbers of the rank's parameters, such as ``step``: parameter name to number, by key."""

    def packed(self) -> bytes:
        """Return the part as bytes for rank 0: with hundreds of ranks they are most of what a save exchanges."""
        return zlib.compress(pickle.dumps(tuple(self)), 1)


def write_checkpoint(job: SaveJob, ranks: RankGroup) -> None:
    """Write this rank's files, publish them, and let rank 0 write the manifest. All ranks must call."""
    folder = open_folder(job.path).child(job.about.tag)
    save_id, action = job.about.save_id, f"saving {folder.path()}"
    names: list[str] = []
    rank_0_may_publish = False
    try:
        with ranks.raise_on_all(action):
            folder.make()
            part = write_rank_files(
                folder, job.about, job.shard, ranks.rank, ranks.size, names, job.suffix, job.durable
            )
        with ranks.raise_on_all(action):
            for name in names:
                folder.publish(name, save_id)
        rank_0_may_publish = True
        packed = ranks.gather_to_first(part.packed())
        with ranks.raise_on_all(action):
            if ranks.rank == 0:
                _publish_manifest(folder, job, packed)
    except BaseException:
        # With another rank gone only rank 0 knows whether it is about to write the manifest.
        unknown = rank_0_may_publish and ranks.broken and ranks.rank != 0
        keep = unknown or _may_be_published(folder, save_id)
        for name in names:
            with suppress(OSError):
                folder.discard(name, save_id)
                if not keep:
                    folder.remove_if_possible(name)
        raise


def _may_be_published(folder: Folder, save_id: str) -> bool:
    """Return False only if the folder has no manifest, or a readable manifest of another save."""
    try:
        there = manifest.read(folder)
    except (CheckpointError, OSError):
        return True
    return there is not None and there.save_id == save_id


def write_rank_files(
    folder: Folder,
    about: Source,
    shard: Shard,
    rank: int,
    size: int,
    names: list[str],
    suffix: str = "",
    durable: bool = False,
) -> RankPart:
    """Write the files of `rank` of `size` ranks under partial names; append each final name to `names` first."""
    header = {
        "save_id": about.save_id,
        "run_id": about.run_id,
        "tag": about.tag,
        "step": str(about.step),
        "rank": str(rank),
        "world_size": str(size),
    }
    extra_entries = [
        ShardEntry(name=str(i), kind="extra", start=0, tensor=t.view(-1)) for i, t in enumerate(shard.extra_tensors)
    ]
    files: list[File] = []
    written: list[Written] = []
    for kind, entries in (("master", shard.weights), ("optimizer", shard.moments), ("extra", extra_entries)):
        if entries or kind == "master":
            name = f"rank_{rank:05d}_{kind}{suffix}.safetensors"
            names.append(name)
            file, rows = write_shard(folder, name, entries, header, about.save_id, durable, len(files))
            files.append(file)
            written += rows if kind != "extra" else []
    name = f"rank_{rank:05d}_extra{suffix}.json"
    names.append(name)
    extra = {**header, "tensor_shapes": [list(t.shape) for t in shard.extra_tensors], **shard.extra}
    data = (json.dumps(extra, indent=1) + "\n").encode()
    with folder.writing(name, about.save_id, durable) as stream:
        stream.write(data)
    files.append(File(name=name, size=len(data), xxh3_128=xxhash.xxh3_128(data).hexdigest()))
    return RankPart(files, written, shard.scalars)


def joined(
    folder: Folder, about: Source, shapes: Mapping[str, Shape], packed: Sequence[bytes], all_here: bool = False
) -> Source:
    """Return the checkpoint of the files of all ranks; with `all_here` each must be in `folder`."""
    files: dict[str, File] = {}
    runs: dict[tuple[str, str], tuple[str, list[PieceRun]]] = {}
    scalars: dict[str, dict[str, float]] = {}
    for rank, data in enumerate(packed):
        part = RankPart(*pickle.loads(zlib.decompress(data)))
        for file in part.files if all_here else ():
            if folder.size(file.name) != file.size:
                raise CheckpointError(
                    f"{folder.path(file.name)} of rank {rank} is not there: the ranks do not write into one folder "
                    "(a relative path in another working directory, or a local disk of each machine); give one that "
                    "all of them share. The checkpoint was not made"
                )
        for kind, name, dtype, run in part.written:
            _, own = runs.setdefault((kind, name), (dtype, []))
            if run.length:
                add_piece(own, run._replace(file=len(files) + run.file), itemsize(dtype))
        files |= {file.name: file for file in part.files}
        for key, by_name in part.scalars.items():
            scalars.setdefault(key, {}).update(by_name)
    names = list(files)
    tensors = [
        Tensor(name=name, kind=kind, dtype=dtype, shape=shapes[name], pieces=PieceRuns(names, own, dtype))
        for (kind, name), (dtype, own) in runs.items()
    ]
    unwritten = shapes.keys() - {name for _, name in runs}
    missing = sorted(name for name in unwritten if 0 not in shapes[name])
    if missing:
        raise CheckpointError(f"no rank holds {', '.join(missing)}; the checkpoint was not made")
    dtype = about.dtype or "F32"
    empty = PieceRuns(names, (), dtype)
    tensors += [Tensor(name=n, kind=WEIGHT, dtype=dtype, shape=shapes[n], pieces=empty) for n in unwritten]
    order = {name: number for number, name in enumerate(shapes)}
    tensors.sort(key=lambda t: (t.is_optimizer_state, t.kind if t.is_optimizer_state else "", order[t.name]))
    source = replace(
        about,
        world_size=len(packed),
        tensors=tuple(tensors),
        files=files,
        optimizer=about.optimizer and replace(about.optimizer, scalars=scalars),
    )
    manifest.check(source)  # a gap or an overlap is found now, not when the checkpoint is needed
    return source


def manifest_bytes(source: Source) -> bytes:
    """Return the content of the manifest of a checkpoint, with the versions of the packages here."""
    return manifest.dump(source, {name: _version(name) for name in ("ort-zero", "torch", "deepspeed")})


def _publish_manifest(folder: Folder, job: SaveJob, packed: Sequence[bytes]) -> None:
    """Write the manifest and ``latest``, and remove files of replaced and interrupted saves."""
    save_id = job.about.save_id
    with collection_paused():
        source = joined(folder, job.about, job.shapes, packed, isinstance(folder, LocalFolder))
        content = manifest_bytes(source)
    if job.durable:
        folder.settle()  # after a loss of power a manifest must not lack files
    run = open_folder(job.path)
    write_script(run, save_id, job.durable)
    keep_beside(run, folder, source.config, save_id)
    folder.write(manifest.NAME, content, save_id, durable=job.durable)
    for name in folder.names():
        of_a_rank = name.startswith("rank_") and name.endswith((".safetensors", ".json"))
        incomplete = name.startswith((".rank_", f".{manifest.NAME}.")) and name.endswith(PARTIAL)
        if incomplete or (of_a_rank and name not in source.files):
            folder.remove_if_possible(name)
    for name in run.names():  # partial files beside the tags that killed saves left
        if name.startswith((f".{manifest.LATEST}.", f".{SCRIPT_NAME}.")) and name.endswith(PARTIAL):
            run.remove_if_possible(name)
    if job.save_latest:
        run.write(manifest.LATEST, job.about.tag.encode(), save_id, durable=job.durable)


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
