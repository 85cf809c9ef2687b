"""Write a conversion in the format of ort_zero: each tensor cut into one piece per rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ort_zero.checkpoint.conversions.conversion import Conversion
from ort_zero.checkpoint.files.dtypes import torch_dtype
from ort_zero.checkpoint.format import manifest, values
from ort_zero.checkpoint.reads.checked_reads import ReadRequest
from ort_zero.checkpoint.reads.training_state import OPTIONAL_KEYS
from ort_zero.checkpoint.records import BUFFER, Tensor, buffer_kind, is_extra_state
from ort_zero.checkpoint.saves.capture import Shard
from ort_zero.checkpoint.saves.checkpoint_writer import SaveJob, joined, manifest_bytes, write_rank_files
from ort_zero.checkpoint.saves.shard_writer import ShardEntry


def write_rank(work: Conversion, rank: int) -> bytes:
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
            requests.append(ReadRequest(tensor=tensor, start=start, length=length, target=room))
            entry = ShardEntry(name=tensor.name, kind=tensor.kind, start=start, tensor=room)
            (moments if tensor.is_optimizer_state else weights).append(entry)
    work.reader.read(requests)
    tensors: list[Any] = []
    state = vars(work.training_state(rank))
    extra = {
        key: values.encode(v, key, tensors) for key, v in state.items() if v is not None or key not in OPTIONAL_KEYS
    }
    extra["counters"] = {"micro_steps": 0, **extra["counters"]} if extra["counters"] else extra["counters"]
    optimizer = work.source.optimizer
    scalars = optimizer.scalars if optimizer is not None and rank == 0 else {}
    shard = Shard(weights=weights, moments=moments, extra=extra, extra_tensors=tensors, scalars=scalars)
    names: list[str] = []
    try:
        part = write_rank_files(work.target, _job(work, shard), rank, work.new.world_size, names)
    finally:
        work.begun += names
    for name in names:
        work.target.publish(name, work.new.save_id)
        work.files[name] = work.target.size(name) or 0
    return part.packed()


def write_manifest(work: Conversion, packed: list[bytes]) -> None:
    """Write the manifest, which completes the checkpoint, from the packed parts of all ranks in rank order."""
    shard = Shard(weights=[], moments=[], extra={}, extra_tensors=[], scalars={})
    data = manifest_bytes(joined(work.target, _job(work, shard), packed))
    work.begun.append(manifest.NAME)
    work.target.write(manifest.NAME, data, work.new.save_id)
    work.files[manifest.NAME] = len(data)


def _part(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first element and the number of elements of `tensor` that a rank stores."""
    if tensor.kind == BUFFER or tensor.is_of_one_rank:
        return 0, tensor.elements if tensor.kind == buffer_kind(rank) else 0
    start = tensor.elements * rank // world_size
    return start, tensor.elements * (rank + 1) // world_size - start


def _job(work: Conversion, shard: Shard) -> SaveJob:
    shapes = {name: t.shape for name, t in work.source.weights().items() if not is_extra_state(name)}
    new = replace(work.new, root=work.target.path(), frozen=work.source.frozen & shapes.keys())
    return SaveJob(
        path=work.new.tag, about=new, shapes=shapes, suffix="", save_latest=False, durable=False, shard=shard
    )
