"""Define the records of a checkpoint in any format: tensors, the pieces with their bytes, the files of the pieces.

The readers :mod:`~ort_zero.checkpoint.format.manifest` (ort_zero's format) and
:mod:`~ort_zero.checkpoint.deepspeed.reader` return a :class:`Source`. All other modules use only these records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.errors import CheckpointError
from ort_zero.utils.text import shortened

Shape = tuple[int, ...]
"""Number of elements along each axis, or an index along each."""
MASTER = "master"
"""Kind of the values that the optimizer updates: fp32 copies, or in an fp32 run the weights themselves."""
WEIGHT = "weight"
"""Kind of a parameter without master weights: frozen, or saved without an optimizer."""
BUFFER = "buffer"
"""Kind of a persistent buffer of the module."""
MODULE = "module"
"""Kind of a trained parameter's weights in the module, where they are not the masters, cast to the module's dtype."""
BUFFER_OF_RANK = "buffer_of_rank_"
"""Beginning of the kinds of buffers that differ from rank 0's, which have the kind :data:`BUFFER`: the rank follows."""
EXTRA_STATE = "_extra_state"
"""Last part of the state dict key under which torch keeps the result of a module's ``get_extra_state``."""
MAX_NAMED = 20
# every other kind is the name of an optimizer state: "exp_avg", "exp_avg_sq", "momentum_buffer", ...


def is_extra_state(name: str) -> bool:
    """Return True if a name in a state dict belongs to the result of a module's ``get_extra_state``."""
    return name.rpartition(".")[2] == EXTRA_STATE


def check_state_name(name: str, path: str) -> None:
    """Raise CheckpointError if an optimizer state in `path` has the name of another kind of tensor."""
    if name in (MASTER, WEIGHT, BUFFER, MODULE) or name.startswith(BUFFER_OF_RANK):
        raise CheckpointError(f"{path} holds an optimizer state named {name!r}, a name that stands for other tensors")


def tied_names(places: Mapping[str, Hashable]) -> dict[str, str]:
    """Return the names with the bytes of an earlier name, each with the first name of these bytes.

    ``torch.save`` writes the storage of tied weights once.
    """
    owners: dict[Hashable, str] = {}
    return {name: owner for name, place in places.items() if (owner := owners.setdefault(place, name)) != name}


def buffer_kind(rank: int) -> str:
    return f"{BUFFER_OF_RANK}{rank}" if rank else BUFFER


class Piece(NamedTuple):
    """A contiguous range of elements of one tensor, in one file."""

    file: str
    """Name of the file, relative to the checkpoint's folder."""
    offset: int
    """Bytes from the start of the file."""
    length: int
    """Length of the range in bytes."""
    start: int
    """Index of the range's first element in the flattened (row-major) tensor."""
    check: bytes | None = None
    """xxh3-64 of the range's bytes, 8 bytes; None if the format has no such checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One whole tensor, and the places of its bytes."""

    name: str
    kind: str
    """:data:`MASTER`, :data:`WEIGHT`, :data:`BUFFER`, or the name of an optimizer state."""
    dtype: str
    """The dtype's code in safetensors: "F32", "BF16", ..."""
    shape: Shape
    pieces: Sequence[Piece]
    """The ranges of the tensor in the order of `start`; together they cover every element exactly once (see
    :func:`~ort_zero.checkpoint.pieces.check_cover`). A tuple or a lazy sequence."""
    strides: Shape | None = None
    """Strides in elements of a tensor that is not row-major. Such a tensor has one piece, which spans its range of the
    storage. None for a row-major tensor."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the dtype `dtype`."""
        return self.elements * itemsize(self.dtype)

    @property
    def is_optimizer_state(self) -> bool:
        """True for moments and other optimizer state per parameter."""
        return self.kind not in (MASTER, WEIGHT, BUFFER, MODULE) and not self.is_of_one_rank

    @property
    def is_of_one_rank(self) -> bool:
        """True for the buffer of a rank that is not rank 0's."""
        return self.kind.startswith(BUFFER_OF_RANK)


Checksum = tuple[int, int, int]
"""Offset in the file, length, and CRC-32 of a range of bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a checkpoint, with its checksums."""

    name: str
    """Name of the file, relative to the checkpoint's folder."""
    size: int  # bytes
    xxh3_128: str | None = None
    """XXH3-128 checksum of the whole file as 32 hex digits; None if the format has no such checksum."""
    records: tuple[Checksum, ...] = ()
    """Checksums of ranges of bytes: of the records of torch's zips, or of the blocks of a seal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """One parameter group of the optimizer: parameters with the same hyper-parameters."""

    names: tuple[str, ...]
    options: Mapping[str, Any]
    """Hyper-parameters: lr, betas, eps, weight_decay, ... as JSON values."""


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that are JSON values; tuples as lists."""
    plain = {}
    for key, value in options.items():
        with suppress(TypeError, ValueError, RecursionError):
            plain[key] = json.loads(json.dumps(value))
    return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The class, groups and numbers of an optimizer, without the tensors of its state."""

    class_name: str | None
    """Name of the optimizer's class ("AdamW"), None if the format does not store it."""
    groups: tuple[ParamGroup, ...]
    scalars: Mapping[str, Mapping[str, float]]
    """State that is one number per parameter, such as ``{"step": {"layer.weight": 10.0}}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened checkpoint without the bytes of its tensors."""

    format: str
    """Format of the checkpoint: "ort_zero", "deepspeed", "dcp", or "safetensors" for a model."""
    root: str
    """Folder (path or fsspec URL) that holds the files."""
    tag: str = ""
    step: int | None = None
    """Global steps of the engine, None if the format does not store them."""
    world_size: int = 1
    zero_stage: int = 0
    tensors: tuple[Tensor, ...] = ()
    files: Mapping[str, File] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied parameters: name without stored values -> name of the parameter with the stored values."""
    frozen: frozenset[str] = frozenset()
    """Names of the parameters that the optimizer does not train."""
    optimizer: Optimizer | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    """Small text files that describe the model (file name -> text), such as ``config.json``."""
    notes: tuple[str, ...] = ()
    dtype: str | None = None
    """Code of the dtype in which the module computes: its weights are the master weights, cast. None if the format does
    not store it."""
    left_out: frozenset[str] = frozenset()
    """Names of the frozen parameters that the save left out (``exclude_frozen_parameters``), as far as known."""
    run_id: str = ""
    """Id of the run that saved; the same in each file of ort_zero's format."""
    save_id: str = ""

    def by_name(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of one kind by name, in their order."""
        return {t.name: t for t in self.tensors if t.kind == kind}

    def weights(self) -> dict[str, Tensor]:
        """Return the most precise stored tensor of every parameter and buffer by name: master weights, else weights."""
        chosen: dict[str, Tensor] = {}
        for tensor in self.tensors:
            if tensor.kind in (MASTER, BUFFER) or (tensor.kind == WEIGHT and tensor.name not in chosen):
                chosen[tensor.name] = tensor
        return chosen

    def with_weights_of(self, origin: str) -> Source:
        """Return the checkpoint with the masters alone, or for "module" with the module's weights in their place."""
        weights = self.by_name(MODULE) if origin == "module" else {}
        chosen = [replace(weights.get(t.name, t), kind=MASTER) if t.kind == MASTER else t for t in self.tensors]
        return replace(self, tensors=tuple(t for t in chosen if t.kind != MODULE))

    def remarks(self) -> tuple[str, ...]:
        """Return one sentence for each kind of tensor that only some uses of the checkpoint take."""
        sentences = {
            "the module's weights of %s are not the masters, cast (others were put there after the last step): "
            "load_checkpoint restores both under ZeRO-1 and 2; ort-zero aggregate takes the masters, or the module's "
            "weights with --from module": list(self.by_name(MODULE)),
            f"the buffers %s differed between the {self.world_size} ranks: on as many ranks each gets its own again, "
            "everything else takes rank 0's": list(dict.fromkeys(t.name for t in self.tensors if t.is_of_one_rank)),
            "it was saved without the frozen parameters %s (exclude_frozen_parameters)": sorted(self.left_out),
            "files without checksums, in which damage to the values is not noticed (ort-zero verify --seal writes "
            "checksums): %s": [f.name for f in self.files.values() if f.xxh3_128 is None and not f.records],
        }
        return tuple(text % shortened(names, MAX_NAMED) for text, names in sentences.items() if names)
