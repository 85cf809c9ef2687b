"""Read files of single ranks: one ``torch.save`` a rank, with a state dict of shards (verl, Accelerate, scripts).

A DTensor's record in the pickle has the rank's block, the mesh of ranks, this rank's place in it, and the placements:
along which axis of the tensor each axis of the mesh divides it (``torch/distributed/tensor``, torch 2.5 to 2.13).
The record of a ShardedTensor, which FSDP1 makes, has the blocks of this rank with their offsets.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ort_zero.checkpoint.dcp.assembly import CheckpointContents, Entry
from ort_zero.checkpoint.dcp.blocks import shape_of
from ort_zero.checkpoint.dcp.names import KeyPath, leaves
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import MAX_NAMED, Shape
from ort_zero.checkpoint.restricted_pickle.values import OpaqueObject, StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile, open_torch_file
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_NAME = re.compile(r"(model|optim|optimizer)_world_size_(\d+)_rank_(\d+)\.pt")
"""verl's name: what is in the file, the number of ranks, the rank."""
_LOCAL_NAME = re.compile(r"pytorch_model_fsdp_rank(\d+)\.bin")
"""Accelerate's name of a model's ``LOCAL_STATE_DICT``, with the rank."""


def files_by_kind(listed: Sequence[str]) -> dict[str, dict[int, dict[int, str]]]:
    """Return the files of the model and of the optimizer among `listed`, by the number of ranks and the rank."""
    found: dict[str, dict[int, dict[int, str]]] = {}
    local = {int(match[1]): match[0] for match in map(_LOCAL_NAME.fullmatch, listed) if match}
    if local:
        found["model"] = {max(local) + 1: local}
    for kind, size, rank, name in (match.group(1, 2, 3, 0) for match in map(_NAME.fullmatch, listed) if match):
        found.setdefault(kind, {}).setdefault(int(size), {})[int(rank)] = name
    return found if "model" in found else {}


def read_rank_files(contents: CheckpointContents) -> None:
    """Add what the files of all ranks hold."""
    folder = contents.folder
    for kind, by_size in files_by_kind(folder.names()).items():
        files = _of_one_save(folder, kind, by_size)
        contents.world_size = len(files)
        entries: dict[KeyPath, Entry] = {}
        for name in files:
            opened = open_torch_file(folder, name)
            contents.records[name] = set(opened.file.records)
            for path, value in leaves(opened.content, ("model" if kind == "model" else "optimizer",)):
                if _class_of(value) in _PLACES:
                    _add(contents, opened, path, value, entries)
                else:
                    entries.setdefault(path, Entry(path, value=value))
        contents.entries += entries.values()


def _of_one_save(folder: Folder, kind: str, by_size: Mapping[int, Mapping[int, str]]) -> list[str]:
    """Return the names of a save's files, rank 0's first; raise CorruptCheckpointError if a rank's file is missing."""
    if len(by_size) > 1:
        complete = [size for size, files in by_size.items() if len(files) >= size]
        raise CorruptCheckpointError(
            f"{folder.path()} mixes files of saves of {sorted(by_size)} ranks; all files of {complete or 'none'} are "
            "there: move those of the other saves, which may have been interrupted, away"
        )
    ((size, files),) = by_size.items()
    surplus = sorted(rank for rank in files if rank >= size)
    if surplus:
        raise CorruptCheckpointError(f"{folder.path(files[surplus[0]])} is one too many: {size} ranks saved")
    if len(files) < size:
        missing = list(itertools.islice((rank for rank in range(size) if rank not in files), MAX_NAMED))
        raise CorruptCheckpointError(f"{folder.path()}: the {kind}'s files of the ranks {missing} are missing")
    return [files[rank] for rank in range(size)]


def _class_of(value: Any) -> str:
    """Return the class of a tensor in a pickle: "StoredTensor" for a whole one, "DTensor" or "ShardedTensor"."""
    if isinstance(value, OpaqueObject) and value.class_name.endswith("._rebuild_from_type_v2"):
        return getattr(value.args[1], "class_name", "").rpartition(".")[2]
    return type(value).__name__


def _add(
    contents: CheckpointContents, opened: TorchFile, path: KeyPath, value: Any, entries: dict[KeyPath, Entry]
) -> None:
    """Add one rank's block of a tensor; a block that another rank has too must hold the same bytes."""
    key, where, kind = ".".join(map(str, path)), contents.folder.path(opened.file.name), _class_of(value)
    try:
        local, shape, offsets = _PLACES[kind](value)
        if not isinstance(local, (StoredTensor, type(None))):
            raise TypeError(f"its part is {local!r}")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: the {kind} {key} is not as torch 2.5 to 2.13 write it ({type(error).__name__}: {error})"
        ) from None
    if local is None:  # of the ranks after the last one with rows
        return
    is_sharded = not isinstance(value, StoredTensor)
    entry = entries.setdefault(path, Entry(path, local.dtype, shape, is_dtensor=is_sharded))
    if (entry.dtype, entry.shape) != (local.dtype, shape):
        raise CorruptCheckpointError(f"{where}: {key} is of another shape or dtype than rank 0's")
    if not math.prod(local.shape):
        return
    block = entry.add(contents.folder, opened, local, offsets)
    before = entry.blocks[offsets]
    if before.record == block.record or None in (before.record, block.record):
        return
    if is_sharded:
        raise CorruptCheckpointError(
            f"{where}: its elements of {key} from {list(offsets)} on are not the same as those in {before.file}"
        )
    if path[-1] == "step":
        raise CorruptCheckpointError(f"{where} is of another step than {before.file}: {key}")
    contents.notes.append(f"{key} differs between the ranks; rank 0's is taken")


def _of_sharded_tensor(value: OpaqueObject) -> tuple[StoredTensor | None, Shape, Shape]:
    """Return a rank's tensor of torch's ShardedTensor or None, the whole shape, and the tensor's offsets there."""
    shards, whole = value.args[3][0], value.args[3][1].state["size"]
    if not shards:
        return None, whole, ()
    (shard,) = (_attributes(shard.state) for shard in shards)
    return shard["tensor"], whole, shape_of(_attributes(shard["metadata"].state)["shard_offsets"])


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
    divided = [(p.class_name.rpartition(".")[2], n, p.state) for n, p in enumerate(spec["placements"])]
    # tensor-parallel ranks divide an axis before FSDP's do, whose mesh axis comes first: it has a _StridedShard
    for kind, number, placement in sorted(divided, key=lambda each: each[0] == "_StridedShard"):
        if kind in ("Shard", "_StridedShard"):
            axis = placement["dim"]
            full = -(-shape[axis] // sizes[number])
            start = min(place[number] * full, shape[axis])
            offsets[axis], shape[axis] = offsets[axis] + start, min(full, shape[axis] - start)
        elif kind != "Replicate":
            raise ValueError(f"its placement is {kind}")
    if tuple(shape) != local.shape:
        raise ValueError(f"its shard has the shape {list(local.shape)}, its placements say {shape}")
    return local, tuple(whole), tuple(offsets)


_PLACES: dict[str, Callable[[Any], tuple[StoredTensor | None, Shape, Shape]]] = {
    "StoredTensor": lambda value: (value, value.shape, (0,) * len(value.shape)),
    "DTensor": _of_dtensor,
    "ShardedTensor": _of_sharded_tensor,
}
"""Functions that return a rank's tensor, the whole shape, and the tensor's offsets there, by the class."""
