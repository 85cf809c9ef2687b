"""Write a checkpoint: every rank its shards, then rank 0 the manifest, which makes the checkpoint exist."""

from __future__ import annotations

import functools
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import NamedTuple

import xxhash

from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.model_files.config_files import keep_beside
from ort_zero.checkpoint.pieces import PieceRun, PieceRuns, add_piece
from ort_zero.checkpoint.records import WEIGHT, File, Source, Tensor
from ort_zero.checkpoint.saves.capture import Shard
from ort_zero.checkpoint.saves.shard_writer import ShardEntry, Written, write_shard
from ort_zero.checkpoint.zero_to_fp32 import SCRIPT_NAME, write_script
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.garbage import collection_paused


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save on one rank; tensors are all that it shares with the engine."""

    path: str
    """Folder or URL of the checkpoints."""
    about: Source
    """The checkpoint without its tensors, its files and the numbers of its optimizer; the same on all ranks."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all parameters and buffers by name, in the order of the model."""
    suffix: str
    """Part of the file names if a tag is saved again: the old manifest's files stay until the new manifest exists."""
    save_latest: bool
    durable: bool
    """Flush files to the disk before they get their final names."""
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
    """Write this rank's files, publish them, and let rank 0 write the manifest. All ranks must call.

    Raises:
        CheckpointError: a file cannot be written, or a rank is gone; earlier checkpoints are unchanged.
        RankError: the save failed on another rank.
    """
    folder = open_folder(job.path).child(job.about.tag)
    save_id, action = job.about.save_id, f"saving {folder.path()}"
    names: list[str] = []
    rank_0_may_publish = False
    try:
        with ranks.raise_on_all(action):
            folder.make()
            part = write_rank_files(folder, job, ranks.rank, ranks.size, names)
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


def write_rank_files(folder: Folder, job: SaveJob, rank: int, size: int, names: list[str]) -> RankPart:
    """Write the files of `rank` of `size` ranks under partial names; append each final name to `names` first."""
    about, shard = job.about, job.shard
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
            name = file_name(rank, kind, "safetensors", job.suffix)
            names.append(name)
            file, rows = write_shard(folder, name, entries, header, about.save_id, job.durable, len(files))
            files.append(file)
            written += rows if kind != "extra" else []
    name = file_name(rank, "extra", "json", job.suffix)
    names.append(name)
    extra = {**header, "tensor_shapes": [list(t.shape) for t in shard.extra_tensors], **shard.extra}
    data = (json.dumps(extra, indent=1) + "\n").encode()
    with folder.writing(name, about.save_id, job.durable) as stream:
        stream.write(data)
    files.append(File(name=name, size=len(data), xxh3_128=xxhash.xxh3_128(data).hexdigest()))
    return RankPart(files, written, shard.scalars)


def file_name(rank: int, kind: str, extension: str, suffix: str = "") -> str:
    """Return the name of one of a rank's files: ``"rank_00003_master.safetensors"``."""
    return f"rank_{rank:05d}_{kind}{suffix}.{extension}"


def joined(folder: Folder, job: SaveJob, packed: Sequence[bytes], *, all_here: bool = False) -> Source:
    """Return the checkpoint of the files of all ranks, weights first, in the order of the model.

    Args:
        all_here: check that the files of each rank are in `folder`.
    """
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
    about, shapes, names = job.about, job.shapes, list(files)
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
        source = joined(folder, job, packed, all_here=isinstance(folder, LocalFolder))
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
    """Return the version of an installed distribution, "unknown" for a copy that was not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
