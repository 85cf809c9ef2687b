"""Read files of single ranks: one ``torch.save`` a rank, with a state dict of shards (verl, Accelerate, scripts).

A DTensor's record in the pickle has the rank's block, the mesh of ranks, this rank's place in it, and the placements:
along which axis of the tensor each axis of the mesh divides it (``torch/distributed/tensor``, torch 2.5 to 2.13).
The record of a ShardedTensor, which FSDP1 makes, has the blocks of this rank with their offsets.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint.dcp.assembly import CheckpointContents
from ort_zero.checkpoint.dcp.blocks import Block
from ort_zero.checkpoint.dcp.names import OPTION, OTHER, WEIGHT, KeyPath, Value, meanings
from ort_zero.checkpoint.records import MAX_NAMED, Shape
from ort_zero.checkpoint.restricted_pickle.values import OpaqueObject, StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile, open_torch_file, read_number
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_NAME = re.compile(r"(model|optim|optimizer)_world_size_(\d+)_rank_(\d+)\.pt")
"""verl's name: what is in the file, the number of ranks, the rank."""
_LOCAL_NAME = re.compile(r"pytorch_model_fsdp_rank(\d+)\.bin")
"""Accelerate's name of a model's ``LOCAL_STATE_DICT``, with the rank."""


def files_by_kind(listed: Sequence[str]) -> dict[str, dict[int, str]]:
    """Return the files of the model and of the optimizer among `listed`, by rank."""
    found: dict[str, dict[int, str]] = {}
    for name in listed:
        if match := _NAME.fullmatch(name):
            found.setdefault(match[1], {})[int(match[3])] = name
        elif match := _LOCAL_NAME.fullmatch(name):
            found.setdefault("model", {}).setdefault(int(match[1]), name)
    return found if "model" in found else {}


@dataclass
class _Shards:
    dtype: str
    shape: Shape
    is_sharded: bool
    file: TorchFile
    """The first file that has the tensor; a number without dimensions is read from it."""
    local: StoredTensor
    blocks: dict[Shape, tuple[Block, tuple[int, int] | None]] = field(default_factory=dict)
    """Block, and (length, CRC-32) of its record if the record is the block alone, by the block's offsets."""
    strides: Shape | None = None


def read_rank_files(contents: CheckpointContents) -> None:
    folder = contents.folder
    for kind, by_rank in files_by_kind(folder.names()).items():
        sizes = {int(match[2]) for name in by_rank.values() if (match := _NAME.fullmatch(name))}
        if len(sizes) > 1:
            raise CorruptCheckpointError(f"{folder.path()} mixes files of runs with {sorted(sizes)} ranks")
        size = sizes.pop() if sizes else max(by_rank) + 1
        surplus = sorted(rank for rank in by_rank if rank >= size)
        if surplus:
            raise CorruptCheckpointError(f"{folder.path(by_rank[surplus[0]])} is one too many: {size} ranks saved")
        if len(by_rank) < size:
            missing = list(itertools.islice((rank for rank in range(size) if rank not in by_rank), MAX_NAMED))
            raise CorruptCheckpointError(f"{folder.path()}: the {kind}'s files of the ranks {missing} are missing")
        contents.world_size = size
        shards: dict[KeyPath, _Shards] = {}
        others: dict[KeyPath, Any] = {}
        for rank in range(size):
            file = open_torch_file(folder, by_rank[rank])
            contents.records[by_rank[rank]] = set(file.file.records)
            top = ("model",) if kind == "model" else ("optimizer",)
            for path, value in _leaves(file.content, top):
                if isinstance(value, StoredTensor) or _sharded_kind(value):
                    _add(contents, file, path, value, shards)
                else:
                    others.setdefault(path, value)
        _take(contents, kind, shards, others)


def _leaves(value: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    """Return (path, value) of everything in nested dicts; ``param_groups`` is a list of dicts."""
    if isinstance(value, Mapping):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, key))]
    if isinstance(value, list) and path[-1] == "param_groups":
        return [leaf for number, inner in enumerate(value) for leaf in _leaves(inner, (*path, number))]
    return [(path, value)]


def _take(
    contents: CheckpointContents, kind: str, shards: Mapping[KeyPath, _Shards], others: Mapping[KeyPath, Any]
) -> None:
    owners: dict[Any, str] = {}
    parameters = []
    for (path, found), meaning in zip(shards.items(), meanings(list(shards))):
        blocks = [block for block, _ in found.blocks.values()]
        name, place = str(meaning.name), (found.shape, found.strides, *(block[2:] for block in blocks))
        if meaning.kind == WEIGHT and blocks and place in owners:
            contents.aliases[name] = owners[place]  # torch.save writes the storage of tied weights once
            continue
        owners[place] = name
        if meaning.kind == WEIGHT and found.is_sharded:
            parameters.append(name)
        is_number = not found.shape and meaning.kind != WEIGHT
        number = read_number(contents.folder, found.file, found.local) if is_number else None
        key = ".".join(map(str, path))
        if found.is_sharded:
            contents.sharded.add(key)
        contents.add(key, meaning, found.dtype, found.shape, blocks, found.strides, number)
    if kind == "model":
        contents.parameters = parameters or None
    for (path, value), meaning in zip(others.items(), meanings(list(others))):
        if meaning.kind in (WEIGHT, OTHER):
            contents.others.append(".".join(map(str, path)))
        elif meaning.kind == OPTION or isinstance(value, (int, float)):
            contents.values.append(Value(meaning, None, value))


def _sharded_kind(value: Any) -> str | None:
    """Return the class of a record of a DTensor or ShardedTensor; None for other values."""
    if not isinstance(value, OpaqueObject) or not value.class_name.endswith("._rebuild_from_type_v2"):
        return None
    name = getattr(value.args[1], "class_name", "").rpartition(".")[2]
    return name if name in ("DTensor", "ShardedTensor") else None


def _add(
    contents: CheckpointContents, file: TorchFile, path: KeyPath, value: Any, shards: dict[KeyPath, _Shards]
) -> None:
    """Add one rank's block of a tensor; a block that another rank has too must hold the same bytes."""
    key, name, kind = ".".join(map(str, path)), file.file.name, _sharded_kind(value)
    is_sharded = kind is not None
    try:
        if kind == "ShardedTensor":
            placed = _of_sharded_tensor(value)
            if placed is None:  # the ranks after the last one with rows
                return
        else:
            placed = _of_dtensor(value) if is_sharded else (value, value.shape, (0,) * len(value.shape))
        local, shape, offsets = placed
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{contents.folder.path(name)}: the {kind} {key} is not as torch 2.5 to 2.13 write it "
            f"({type(error).__name__}: {error})"
        ) from None
    found = shards.setdefault(path, _Shards(local.dtype, shape, is_sharded, file, local))
    if (found.dtype, found.shape) != (local.dtype, shape):
        raise CorruptCheckpointError(f"{contents.folder.path(name)}: {key} is of another shape or dtype than rank 0's")
    if not math.prod(local.shape):
        return
    record = next(((n, crc) for start, n, crc in file.file.records if start == local.storage_offset), None)
    block = Block(offsets, local.shape, name, local.offset)
    if not local.is_row_major:
        if local.shape != shape:
            raise CheckpointError(f"{contents.folder.path(name)}: the shard of {key} is not contiguous")
        found.strides = local.strides
    before = found.blocks.setdefault(offsets, (block, record))
    if before[1] == record or None in (before[1], record):
        return
    if is_sharded:
        raise CorruptCheckpointError(
            f"{contents.folder.path()}: the ranks do not agree on the elements of {key} from {list(offsets)} on: "
            f"{before[0].file} and {name} hold other values of them"
        )
    if path[-1] == "step":
        raise CorruptCheckpointError(f"{contents.folder.path(name)} is of another step than {before[0].file}: {key}")
    contents.notes.append(f"{key} differs between the ranks; rank 0's is taken")


def _of_sharded_tensor(value: OpaqueObject) -> tuple[StoredTensor, Shape, Shape] | None:
    """Return a rank's tensor of torch's ShardedTensor, the whole shape and its offsets there; None if it has none."""
    shards, whole = value.args[3][0], value.args[3][1].state["size"]
    if not shards:
        return None
    (shard,) = (_attributes(shard.state) for shard in shards)
    local, offsets = shard["tensor"], tuple(_attributes(shard["metadata"].state)["shard_offsets"])
    if not len(offsets) == len(whole) == len(local.shape) or any(type(n) is not int or n < 0 for n in offsets):
        raise ValueError(f"its shard of the shape {list(local.shape)} lies at {list(offsets)} of {list(whole)}")
    return local, whole, offsets


def _attributes(state: Any) -> Any:
    """Return the attributes in a pickled state, which for a class with slots is (attributes or None, slots)."""
    return state[1] if isinstance(state, tuple) else state


def _of_dtensor(value: OpaqueObject) -> tuple[StoredTensor, Shape, Shape]:
    """Return the local tensor, the whole shape and the block's offsets of a DTensor's record."""
    state = _attributes(value.args[3])
    local, spec = state["_local_tensor"], state["_spec"].state
    mesh, whole = spec["mesh"].state, spec["tensor_meta"].args[0]
    axes = mesh["_layout"].state["axes"] if "_layout" in mesh else None
    sizes = [axis.state["shape"] for axis in axes] if axes is not None else list(mesh["mesh"].shape)
    sizes = [math.prod(size) if isinstance(size, tuple) else size for size in sizes]
    place = mesh["_coordinate_on_dim"]
    offsets, shape = [0] * len(whole), list(whole)
    for axis, placement in _in_order(spec["placements"]):
        full = -(-shape[axis] // sizes[placement])
        start = min(place[placement] * full, shape[axis])
        offsets[axis], shape[axis] = offsets[axis] + start, min(full, shape[axis] - start)
    if tuple(shape) != local.shape:
        raise ValueError(f"its shard has the shape {list(local.shape)}, its placements say {shape}")
    return local, tuple(whole), tuple(offsets)


def _in_order(placements: Sequence[OpaqueObject]) -> list[tuple[int, int]]:
    """Return (axis of the tensor, axis of the mesh) in the order in which the axes of the mesh divide the tensor.

    FSDP over tensor parallelism divides along an axis after the tensor-parallel ranks, whose mesh axis comes later: the
    placement is then a ``_StridedShard``.
    """
    plain, strided = [], []
    for number, placement in enumerate(placements):
        kind = placement.class_name.rpartition(".")[2]
        if kind == "Shard":
            plain.append((placement.state["dim"], number))
        elif kind == "_StridedShard":
            strided.append((placement.state["dim"], number))
        elif kind != "Replicate":
            raise ValueError(f"its placement is {kind}")
    return plain + strided
