"""Share the source, the new description and memory for tensors between the writers of a conversion."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ort_zero.checkpoint.deepspeed.training_state import saved_training_state
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.format.values import decode_in_json
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, ReadRequest
from ort_zero.checkpoint.reads.training_state import TrainingState
from ort_zero.checkpoint.records import BUFFER, MASTER, MAX_NAMED, MODULE, WEIGHT, Source, Tensor, is_extra_state
from ort_zero.errors import CheckpointError
from ort_zero.utils.text import shortened

_MAPPED = 64 << 20
"""Minimum number of bytes per memory map: the number of maps of a process is limited, so tensors share maps."""
_ALIGNMENT = 64


class Scratch:
    """A temporary file with tensors. The file has no name, so it vanishes when the process ends."""

    def __init__(self, folder: str | None = None):
        self._file = tempfile.TemporaryFile(prefix=".ort_zero_", dir=folder, buffering=0)
        self._size = 0
        self._map: mmap.mmap | None = None
        self._used = 0

    def tensor(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros in the file."""
        size = elements * dtype.itemsize
        if not size:
            return torch.empty(0, dtype=dtype)
        if self._map is None or self._used + size > len(self._map):
            room = -(-max(size, _MAPPED) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self._file.fileno(), self._size + room)
            self._map = mmap.mmap(self._file.fileno(), room, offset=self._size)
            self._size += room
            self._used = 0
        begin = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return torch.frombuffer(self._map, dtype=dtype, count=elements, offset=begin)

    def close(self) -> None:
        """Close the file; the system frees its disk space when no tensor uses it."""
        self._map = None
        self._file.close()


@dataclass(kw_only=True)
class Conversion:
    """The part of a conversion that runs on one rank."""

    source: Source
    target: Folder
    new: Source
    """The new checkpoint without tensors and files; its `save_id` is part of the names of partial files, its format
    "ort_zero", "deepspeed", "universal" or "dcp"."""
    sub_group_size: int
    """Number of elements of one rank at which a sub-group of ZeRO-3 is full."""
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each file that this rank has written, by name."""
    begun: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.new.world_size != self.source.world_size:
            self.source = replace(self.source, tensors=tuple(t for t in self.source.tensors if not t.is_of_one_rank))
        self.dtype = self.new.dtype or "F32"
        self.folder = open_folder(self.source.root)
        self.reader = CheckedReader(self.folder, self.source.files)
        self.scratch = Scratch()
        self.masters = self.source.by_name(MASTER)
        self.module = self.source.by_name(MODULE)
        self.frozen = {n: t for n, t in self.source.by_name(WEIGHT).items() if not is_extra_state(n)}
        self.buffers = self.source.by_name(BUFFER)
        kinds = dict.fromkeys(t.kind for t in self.source.tensors if t.is_optimizer_state)
        self.states = {kind: self.source.by_name(kind) for kind in kinds}

    def groups(self, with_frozen: bool = False) -> list[list[str]]:
        """Return the stored names of the trained parameters of each parameter group, or of all its parameters."""
        if self.source.optimizer is None:
            raise CheckpointError(f"{self.source.root} holds no optimizer state, which DeepSpeed's formats need")
        aliases = self.source.aliases
        groups = [[aliases.get(name, name) for name in group.names] for group in self.source.optimizer.groups]
        kept = self.masters.keys() | (self.frozen.keys() if with_frozen else set())
        groups = [[name for name in group if name in kept] for group in groups]
        ungrouped = self.masters.keys() - {name for group in groups for name in group}
        if ungrouped:
            raise CheckpointError(f"{self.source.root}: no parameter group has {sorted(ungrouped)[0]}")
        return groups

    def check_shapes(self) -> None:
        """Raise CheckpointError for optimizer states, such as Adafactor's, of another shape than their parameter."""
        for kind, tensors in self.states.items():
            names = [n for n, tensor in tensors.items() if n in self.masters and tensor.shape != self.masters[n].shape]
            if names:
                raise CheckpointError(
                    f"{self.source.root}: the optimizer's {kind} has another shape than the parameter for "
                    f"{shortened(names, MAX_NAMED)}, which the format {self.new.format} cannot store; --to dcp can"
                )

    def training_state(self, rank: int) -> TrainingState:
        """Return the training state (without tensors) of `rank` of the source; a new rank gets the state of rank 0."""
        return saved_training_state(self.folder, self.source, rank)

    def new_scratch(self) -> None:
        self.scratch.close()
        self.scratch = Scratch(self.target.url if isinstance(self.target, LocalFolder) else None)

    def whole(self, tensor: Tensor, dtype: torch.dtype, requests: list[ReadRequest]) -> torch.Tensor:
        """Return memory for a whole tensor, in its shape; append to `requests` the reads that fill it."""
        flat = self.scratch.tensor(tensor.elements, dtype)
        if tensor.elements:
            requests.append(ReadRequest(tensor, flat))
        return flat.view(tensor.shape)

    def save(self, folder: Folder, name: str, content: Any, reported_name: str | None = None) -> None:
        """Write `content` into a file by ``torch.save``, and report the file, under `reported_name` if given."""
        self.begun.append(reported_name or name)
        with folder.writing(name, self.new.save_id) as stream:
            torch.save(content, stream)
        folder.publish(name, self.new.save_id)
        self.files[reported_name or name] = folder.size(name) or 0

    def numbers(self, names: Sequence[str]) -> dict[str, float]:
        """Return the numbers, such as ``step``, of parameters that share a flat tensor; whole numbers as int."""
        numbers: dict[str, float] = {}
        assert self.source.optimizer is not None
        for key, by_name in self.source.optimizer.scalars.items():
            values = {by_name[name] for name in names if name in by_name}
            if len(values) > 1:
                raise CheckpointError(
                    f"{self.source.root}: {key} differs between the parameters of one group ({sorted(values)[:3]}), "
                    "which DeepSpeed's formats cannot store"
                )
            for value in values:
                numbers[key] = int(value) if float(value).is_integer() else value
        return numbers

    def options(self, index: int) -> dict[str, Any]:
        """Return the hyper-parameters of parameter group `index` in DeepSpeed's form: tuples instead of lists."""
        assert self.source.optimizer is not None
        options = self.source.optimizer.groups[index].options
        decoded = {key: decode_in_json(value) for key, value in options.items()}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in decoded.items()}
