"""Write a checkpoint: every rank its shards, then rank 0 the manifest, which makes the checkpoint exist."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import xxhash

from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.model_files.config_files import keep_beside
from ort_zero.checkpoint.records import File
from ort_zero.checkpoint.saves.capture import Model, Shard
from ort_zero.checkpoint.saves.manifest_parts import Parts, pack, unpack
from ort_zero.checkpoint.saves.shard_writer import ShardEntry, WrittenPiece, write_shard
from ort_zero.checkpoint.zero_to_fp32 import SCRIPT_NAME, write_script
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.garbage import collection_paused


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save on one rank; tensors are all that it shares with the engine."""

    path: str
    tag: str
    save_id: str
    run_id: str
    suffix: str
    """Part of the file names if a tag is saved again: the old manifest's files stay until the new manifest exists."""
    save_latest: bool
    durable: bool
    """Flush files to the disk before they get their final names."""
    model: Model
    shard: Shard


def write_checkpoint(job: SaveJob, ranks: RankGroup) -> None:
    """Write this rank's files, publish them, and let rank 0 write the manifest. All ranks must call.

    Args:
        job: the save on this rank.
        ranks: all ranks of the engine.

    Raises:
        CheckpointError: a file cannot be written, or a rank is gone; earlier checkpoints are unchanged.
        RankError: the save failed on another rank.
    """
    folder = open_folder(job.path).child(job.tag)
    names: list[str] = []
    rank_0_may_publish = False
    try:
        with ranks.raise_on_all(f"saving {folder.path()}"):
            folder.make()
            files, written = write_rank_files(folder, job, ranks.rank, ranks.size, names)
        with ranks.raise_on_all(f"saving {folder.path()}"):
            for name in names:
                folder.publish(name, job.save_id)
        rank_0_may_publish = True
        packed = ranks.gather_to_first(pack(files, written, job.shard.scalars))
        with ranks.raise_on_all(f"saving {folder.path()}"):
            if ranks.rank == 0:
                _publish_manifest(folder, job, packed)
    except BaseException:
        # With another rank gone only rank 0 knows whether it is about to write the manifest.
        unknown = rank_0_may_publish and ranks.broken and ranks.rank != 0
        keep = unknown or _may_be_published(folder, job.save_id)
        for name in names:
            with suppress(OSError):
                folder.discard(name, job.save_id)
                if not keep:
                    folder.remove_if_possible(name)
        raise


def _may_be_published(folder: Folder, save_id: str) -> bool:
    """Return False only if the folder has no manifest, or a readable manifest of another save."""
    try:
        document = manifest.read(folder)
    except (CheckpointError, OSError):
        return True
    return document is not None and document.save_id == save_id


def write_rank_files(
    folder: Folder, job: SaveJob, rank: int, size: int, names: list[str]
) -> tuple[list[File], list[WrittenPiece]]:
    """Write the files of `rank` of `size` ranks under partial names; append each final name to `names` first.

    Raises:
        CheckpointError: a file cannot be written.
    """
    files: list[File] = []
    written: list[WrittenPiece] = []
    header = {
        "save_id": job.save_id,
        "run_id": job.run_id,
        "tag": job.tag,
        "step": str(job.model.step),
        "rank": str(rank),
        "world_size": str(size),
    }
    kinds = {"master": job.shard.weights, "optimizer": job.shard.moments}
    if job.shard.extra_tensors:
        kinds["extra"] = [
            ShardEntry(name=str(i), kind="extra", start=0, tensor=t.view(-1))
            for i, t in enumerate(job.shard.extra_tensors)
        ]
    for kind, entries in kinds.items():
        if kind == "optimizer" and not entries:
            continue
        name = file_name(rank, kind, "safetensors", job.suffix)
        names.append(name)
        file, pieces = write_shard(folder, name, entries, header, job.save_id, job.durable)
        files.append(file)
        if kind != "extra":
            written += pieces
    name = file_name(rank, "extra", "json", job.suffix)
    names.append(name)
    shapes = [list(t.shape) for t in job.shard.extra_tensors]
    extra = {**header, "tensor_shapes": shapes, **job.shard.extra}
    files.append(_write_json(folder, name, extra, job.save_id, job.durable))
    return files, written


def file_name(rank: int, kind: str, extension: str, suffix: str = "") -> str:
    """Return the name of one of a rank's files: ``"rank_00003_master.safetensors"``.

    Args:
        rank: rank that writes the file.
        kind: "master", "optimizer" or "extra".
        extension: without its dot.
        suffix: see :attr:`SaveJob.suffix`.
    """
    return f"rank_{rank:05d}_{kind}{suffix}.{extension}"


def _write_json(folder: Folder, name: str, value: Any, token: str, durable: bool) -> File:
    """Write a JSON file under its partial name and return the record of the file."""
    data = (json.dumps(value, indent=1) + "\n").encode()
    with folder.writing(name, token, durable) as stream:
        stream.write(data)
    return File(name=name, size=len(data), xxh3_128=xxhash.xxh3_128(data).hexdigest())


def manifest_of(folder: Folder, job: SaveJob, packed: Sequence[bytes], *, all_here: bool = False) -> manifest.Manifest:
    """Return the manifest of the files of all ranks.

    Args:
        folder: folder of the checkpoint.
        job: the save, as rank 0 has it.
        packed: the packed part of each rank.
        all_here: check that the files of each rank are in `folder`.

    Raises:
        CheckpointError: the pieces leave a gap or overlap, or a file is missing.
    """
    parts = Parts(job.model)
    for rank, data in enumerate(packed):
        part = unpack(data)
        if all_here:
            _check_that_files_are_here(folder, rank, part.files)
        parts.add(part)
    model = job.model
    document = manifest.build(
        tensors=parts.tensors(),
        files=parts.files,
        optimizer=model.optimizer(parts.scalars),
        tag=job.tag,
        step=model.step,
        world_size=len(packed),
        zero_stage=model.zero_stage,
        dtype=model.dtype,
        run_id=job.run_id,
        save_id=job.save_id,
        versions={name: _version(name) for name in ("ort-zero", "torch", "deepspeed")},
        aliases=model.aliases,
        frozen=model.frozen,
        left_out=model.left_out,
        config=model.config,
    )
    manifest.source_of(document, folder.url)  # a gap or an overlap is found now, not when the checkpoint is needed
    return document


def _publish_manifest(folder: Folder, job: SaveJob, packed: Sequence[bytes]) -> None:
    """Write the manifest and ``latest``, and remove files of replaced and interrupted saves."""
    with collection_paused():
        document = manifest_of(folder, job, packed, all_here=isinstance(folder, LocalFolder))
        content = manifest.dump(document)
    if job.durable:
        folder.settle()  # after a loss of power a manifest must not lack files
    write_script(job.path, job.save_id, job.durable)
    keep_beside(open_folder(job.path), folder, job.model.config, job.save_id)
    folder.write(manifest.NAME, content, job.save_id, durable=job.durable)
    _remove_left_overs(folder, {file.name for file in document.files})
    run = open_folder(job.path)
    for name in run.names():  # partial files beside the tags that killed saves left
        if name.startswith((f".{manifest.LATEST}.", f".{SCRIPT_NAME}.")) and name.endswith(PARTIAL):
            run.remove_if_possible(name)
    if job.save_latest:
        run.write(manifest.LATEST, job.tag.encode(), job.save_id, durable=job.durable)


def _check_that_files_are_here(folder: Folder, rank: int, files: Sequence[File]) -> None:
    """Raise CheckpointError if this rank does not see the files that `rank` wrote."""
    for file in files:
        if folder.size(file.name) != file.size:
            raise CheckpointError(
                f"{folder.path(file.name)} of rank {rank} is not there: the ranks do not write into one folder "
                "(a relative path in another working directory, or a local disk of each machine); give one that "
                "all of them share. The checkpoint was not made"
            )


def _remove_left_overs(folder: Folder, ours: set[str]) -> None:
    """Remove the files of interrupted saves and of the replaced manifest."""
    for name in folder.names():
        stale = name.startswith("rank_") and name not in ours and name.endswith((".safetensors", ".json"))
        if stale or _is_left_over(name):
            folder.remove_if_possible(name)


def _is_left_over(name: str) -> bool:
    """Return whether a file is an incomplete file of a rank or an incomplete manifest."""
    return name.startswith((".rank_", f".{manifest.NAME}.")) and name.endswith(PARTIAL)


@functools.cache
def _version(name: str) -> str:
    """Return the version of an installed distribution, "unknown" for a copy that was not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
