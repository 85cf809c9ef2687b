"""What the writers of a conversion share: the source, the wanted form, room for tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_zero.checkpoint.files.scratch import Scratch
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.reads.checked_reads import CheckedReader
from ort_zero.checkpoint.reads.leftovers import Leftovers
from ort_zero.checkpoint.reads.reading import ReadRequest
from ort_zero.checkpoint.reads.training_state import TrainingState, read_training_state
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT, Source, Tensor
from ort_zero.errors import CheckpointError

EXTRA_STATE = "_extra_state"
"""Last part of the name in a state dict of what ``get_extra_state`` of a module returned."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The form of the destination; the same on all ranks."""

    to: str
    """"ort_zero", "deepspeed" or "universal"."""
    world_size: int
    stage: int
    dtype: str
    """Code of the dtype of the module's weights."""
    sub_group_size: int
    """Elements of one rank from which a sub-group of ZeRO-3 is full."""
    tag: str
    token: str
    """Tells the files of this run from others'."""


@dataclass(kw_only=True)
class Conversion:
    """One conversion on one rank."""

    source: Source
    target: Folder
    """Where the files of the new checkpoint are written."""
    wanted: Wanted
    trust_pickle: bool
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each file that this rank has written."""
    begun: list[str] = field(default_factory=list)
    """Names of the files that this rank has begun to write."""

    def __post_init__(self) -> None:
        self.folder = open_folder(self.source.root)
        self.leftovers = Leftovers(self._place())
        self.leftovers.wanted = False
        self.reader = CheckedReader(self.folder, self.source.files, self.leftovers)
        self.scratch = Scratch()
        self.masters = self.source.by_name(MASTER)
        self.frozen = {n: t for n, t in self.source.by_name(WEIGHT).items() if n.rpartition(".")[2] != EXTRA_STATE}
        self.buffers = self.source.by_name(BUFFER)
        kinds = dict.fromkeys(t.kind for t in self.source.tensors if t.is_optimizer_state)
        self.states = {kind: self.source.by_name(kind) for kind in kinds}

    def groups(self) -> list[list[str]]:
        """Return the names of the trained parameters of each parameter group, under which they are stored.

        Raises:
            CheckpointError: the source has no optimizer, or parameters of no group.
        """
        if self.source.optimizer is None:
            raise CheckpointError(f"{self.source.root} holds no optimizer state, which DeepSpeed's formats need")
        aliases = self.source.aliases
        found = [[aliases.get(name, name) for name in group.names] for group in self.source.optimizer.groups]
        found = [[name for name in group if name in self.masters] for group in found]
        alone = self.masters.keys() - {name for group in found for name in group}
        if alone:
            raise CheckpointError(f"{self.source.root}: no parameter group has {sorted(alone)[0]}")
        return found

    def training_state(self, rank: int) -> TrainingState:
        """Return what `rank` of the source saved beside its tensors; rank 0's for a rank that it did not have."""
        if self.source.format == "ort_zero":
            return read_training_state(self.folder, self.source, rank)
        from ort_zero.checkpoint.deepspeed.training_state import read_deepspeed_training_state

        return read_deepspeed_training_state(self.folder, self.source, rank, self.trust_pickle)

    def new_scratch(self) -> None:
        """Give the room for tensors back, and have new room."""
        self.scratch.close()
        self.scratch = Scratch(self._place())

    def new_rank(self, *, last: bool) -> None:
        """Begin with the next of the ranks whose parts are written here, in their order."""
        self.new_scratch()
        self.leftovers.next_file()
        self.leftovers.wanted = not last

    def close(self) -> None:
        """Remove what is temporary."""
        self.scratch.close()
        self.leftovers.close()

    def _place(self) -> str | None:
        return self.target.url if isinstance(self.target, LocalFolder) else None

    def whole(self, tensor: Tensor, dtype: torch.dtype, requests: list[ReadRequest]) -> torch.Tensor:
        """Return room for a whole tensor, in its shape; what has to be read into it is appended to `requests`."""
        flat = self.scratch.tensor(tensor.elements, dtype)
        if tensor.elements:
            requests.append(ReadRequest(tensor=tensor, start=0, length=tensor.elements, target=flat))
        return flat.view(tensor.shape)

    def read(self, requests: Iterable[ReadRequest]) -> None:
        """Fill the targets; see :meth:`~ort_zero.checkpoint.reads.checked_reads.CheckedReader.read`."""
        self.reader.read(requests)

    def save(self, folder: Folder, name: str, content: Any, shown: str | None = None) -> None:
        """Write a file of ``torch.save``.

        Args:
            folder: where.
            name: its name.
            content: what it holds.
            shown: its name in the report, if another.
        """
        self.begun.append(shown or name)
        with folder.writing(name, self.wanted.token) as stream:
            torch.save(content, stream)
        folder.publish(name, self.wanted.token)
        self.files[shown or name] = folder.size(name) or 0

    def numbers(self, names: Sequence[str]) -> dict[str, float]:
        """Return the numbers, such as ``step``, of parameters that share a flat tensor; whole ones as int.

        Raises:
            CheckpointError: they differ.
        """
        found: dict[str, float] = {}
        assert self.source.optimizer is not None
        for key, by_name in self.source.optimizer.scalars.items():
            values = {by_name[name] for name in names if name in by_name}
            if len(values) > 1:
                raise CheckpointError(
                    f"{self.source.root}: {key} differs between the parameters of one group ({sorted(values)[:3]}), "
                    "which DeepSpeed's formats do not know"
                )
            for value in values:
                found[key] = int(value) if float(value).is_integer() else value
        return found

    def options(self, index: int) -> dict[str, Any]:
        """Return the hyper-parameters of a parameter group as DeepSpeed stores them."""
        assert self.source.optimizer is not None
        options = self.source.optimizer.groups[index].options
        return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
