"""Writes a checkpoint: every rank its shards, then rank 0 the manifest, which makes the checkpoint exist."""

from __future__ import annotations

import functools
import json
import pickle
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import xxhash

from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.model_files.config_files import keep_beside
from ort_zero.checkpoint.records import WEIGHT, File, Tensor
from ort_zero.checkpoint.saves.capture import Model, Shard
from ort_zero.checkpoint.saves.shard_writer import ShardEntry, WrittenPiece, write_shard
from ort_zero.checkpoint.zero_to_fp32 import SCRIPT_NAME, write_script
from ort_zero.distributed.process_group import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.garbage import collection_paused


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save on one rank, with nothing of the engine left in it but tensors."""

    path: str
    tag: str
    save_id: str
    run_id: str
    suffix: str
    """Part of the file names where a tag is saved anew: the old manifest's files stay until the new one is there."""
    save_latest: bool
    durable: bool
    """Wait for the disk itself before files get their final names."""
    model: Model
    shard: Shard


def write_checkpoint(job: SaveJob, ranks: RankGroup) -> None:
    """Write this rank's files, publish them, and let rank 0 write the manifest. All ranks must call.

    Args:
        job: what this rank has to write.
        ranks: all ranks of the engine.

    Raises:
        CheckpointError: a file cannot be written, or a rank is gone; what existed before is as it was.
        RankError: it failed on another rank.
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
        parts = ranks.gather(pickle.dumps((files, written, job.shard.scalars)))  # which only rank 0 has to unpack
        with ranks.raise_on_all(f"saving {folder.path()}"):
            if ranks.rank == 0:
                _publish_manifest(folder, job, [pickle.loads(part) for part in parts], ranks.size)
    except BaseException:
        # With another rank gone nobody but rank 0 knows whether it is just about to write the manifest.
        unknown = rank_0_may_publish and ranks.broken and ranks.rank != 0
        keep = unknown or _may_be_published(folder, job.save_id)
        for name in names:
            with suppress(OSError):
                folder.discard(name, job.save_id)
                if not keep:
                    folder.remove(name)
        raise


def _may_be_published(folder: Folder, save_id: str) -> bool:
    """Return False only if the folder's manifest, if there is one, can be read and is of another save."""
    try:
        found = manifest.read(folder)
    except (CheckpointError, OSError):
        return True
    return found is not None and found.save_id == save_id


def write_rank_files(
    folder: Folder, job: SaveJob, rank: int, size: int, names: list[str]
) -> tuple[list[File], list[WrittenPiece]]:
    """Write the files of `rank` of `size` under partial names; `names` gets their final ones as they are begun.

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
        rank: whose.
        kind: "master", "optimizer" or "extra".
        extension: without its dot.
        suffix: see :attr:`SaveJob.suffix`.
    """
    return f"rank_{rank:05d}_{kind}{suffix}.{extension}"


def _write_json(folder: Folder, name: str, value: Any, token: str, durable: bool) -> File:
    """Write a JSON file under its partial name; return its record."""
    data = (json.dumps(value, indent=1) + "\n").encode()
    with folder.writing(name, token, durable) as stream:
        stream.write(data)
    return File(name=name, size=len(data), xxh3_128=xxhash.xxh3_128(data).hexdigest())


def manifest_of(folder: Folder, job: SaveJob, parts: list[tuple], size: int) -> manifest.Manifest:
    """Return the manifest of what each rank wrote: (files, pieces, numbers per parameter).

    Raises:
        CheckpointError: the pieces leave a gap or overlap.
    """
    scalars: dict[str, dict[str, float]] = {}
    for _, _, known in parts:
        for key, by_name in known.items():
            scalars.setdefault(key, {}).update(by_name)
    files = [file for part in parts for file in part[0]]
    model = job.model
    document = manifest.build(
        tensors=_tensors(model, [w for part in parts for w in part[1]]),
        files=files,
        optimizer=model.optimizer(scalars),
        tag=job.tag,
        step=model.step,
        world_size=size,
        zero_stage=model.zero_stage,
        dtype=model.dtype,
        run_id=job.run_id,
        save_id=job.save_id,
        versions={name: _version(name) for name in ("ort-zero", "torch", "deepspeed")},
        aliases=model.aliases,
        frozen=model.frozen,
        config=model.config,
    )
    manifest.source_of(document, folder.url)  # a gap or an overlap is found now, not when the checkpoint is needed
    return document


def _publish_manifest(folder: Folder, job: SaveJob, parts: list[tuple], size: int) -> None:
    """Write the manifest of what each rank wrote, and what comes after it."""
    _check_that_all_are_here(folder, parts)
    with collection_paused():
        document = manifest_of(folder, job, parts, size)
        content = manifest.dump(document)
    if job.durable:
        folder.settle()  # a manifest that outlives a loss of power must find its files
    write_script(job.path, job.save_id, job.durable)
    keep_beside(open_folder(job.path), folder, job.model.config, job.save_id)
    folder.write(manifest.NAME, content, job.save_id, durable=job.durable)
    _remove_left_overs(folder, {file.name for file in document.files})
    run = open_folder(job.path)
    for name in run.names():  # what saves that were killed left of files beside the tags
        if name.startswith((f".{manifest.LATEST}.", f".{SCRIPT_NAME}.")) and name.endswith(PARTIAL):
            run.remove(name)
    if job.save_latest:
        run.write(manifest.LATEST, job.tag.encode(), job.save_id, durable=job.durable)


def _check_that_all_are_here(folder: Folder, parts: list[tuple]) -> None:
    """Raise CheckpointError if a rank wrote its files into another folder than this rank sees."""
    if not isinstance(folder, LocalFolder):
        return
    for rank, (files, _, _) in enumerate(parts):
        for file in files:
            if folder.size(file.name) != file.size:
                raise CheckpointError(
                    f"{folder.path(file.name)} of rank {rank} is not there: the ranks do not write into one folder "
                    "(a relative path in another working directory, or a disk of each machine's own); give one that "
                    "all of them share. The checkpoint was not made"
                )


def _tensors(model: Model, written: list[WrittenPiece]) -> list[Tensor]:
    """Return the tensors that the pieces of all ranks make up, weights first, in the order of the model.

    Raises:
        CheckpointError: no rank wrote a piece of a parameter or buffer.
    """
    pieces: dict[tuple[str, str], list[WrittenPiece]] = {}
    for item in written:
        pieces.setdefault((item.kind, item.name), []).append(item)
    order = {name: i for i, name in enumerate(model.shapes)}
    found = [
        Tensor(
            name=name,
            kind=kind,
            dtype=items[0].dtype,
            shape=model.shapes[name],
            pieces=tuple(sorted((i.piece for i in items if i.piece.length), key=lambda p: p.start)),
        )
        for (kind, name), items in pieces.items()
    ]
    empty = [n for n, shape in model.shapes.items() if 0 in shape and not any(name == n for _, name in pieces)]
    found += [Tensor(name=n, kind=WEIGHT, dtype=model.dtype, shape=model.shapes[n], pieces=()) for n in empty]
    missing = set(model.shapes) - {tensor.name for tensor in found}
    if missing:
        raise CheckpointError(f"no rank holds {', '.join(sorted(missing))}; the checkpoint was not made")
    return sorted(found, key=lambda t: (t.is_optimizer_state, t.kind if t.is_optimizer_state else "", order[t.name]))


def _remove_left_overs(folder: Folder, ours: set[str]) -> None:
    """Remove what an interrupted save left, and the files of the manifest that was replaced."""
    for name in folder.names():
        stale = name.startswith("rank_") and name not in ours and name.endswith((".safetensors", ".json"))
        if stale or (name.startswith((".rank_", f".{manifest.NAME}.")) and name.endswith(PARTIAL)):
            folder.remove(name)


@functools.cache
def _version(name: str) -> str:
    """Return the version of an installed distribution, "unknown" for a copy that was not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
