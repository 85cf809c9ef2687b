"""Find the trained parameters in the flat tensors of the optimizer's files, as each stage of ZeRO cuts them.

ZeRO-1, ZeRO-2 and BF16_Optimizer have one flat vector per parameter group, cut equally over the ranks. A group of
experts has one vector for each expert-parallel rank, cut over the ranks that hold the same experts. ZeRO-3 cuts each
parameter over all ranks: a rank has a flat tensor of its cuts for each sub-group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ort_zero.checkpoint.deepspeed.experts import Experts
from ort_zero.checkpoint.deepspeed.file_names import WAY_OUT
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, covered, zero_state
from ort_zero.checkpoint.format.flat_groups import FlatGroup, zero3_group, zero3_part, zero12_group
from ort_zero.checkpoint.records import WEIGHT, Piece, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile
from ort_zero.errors import CheckpointError, CorruptCheckpointError

Flats = Mapping[int, StoredTensor]
"""The flat tensors of one rank by number: of a parameter group, or of a sub-group for ZeRO-3."""


@dataclass
class FlatLayout:
    """The places of the trained parameters in the flat tensors of all ranks."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    number_of: dict[str, int] = field(default_factory=dict)
    """Number of the flat tensor (group, or sub-group for ZeRO-3) of each parameter."""
    groups: dict[tuple[int, int], FlatGroup] = field(default_factory=dict)
    """Places in each flat tensor by rank and by number in the rank's file."""

    def add(
        self, shapes: Mapping[str, tuple[int, ...]], number: int, groups: Mapping[tuple[int, int], FlatGroup]
    ) -> None:
        """Add parameters that lie in the flat tensors `groups`, which have that number."""
        self.shapes |= shapes
        self.number_of |= dict.fromkeys(shapes, number)
        self.groups |= groups


def flat_tensors(files: StateFiles, layout: FlatLayout, kind: str, flats: list[Flats]) -> Iterator[Tensor]:
    """Yield the tensor of `kind` of each parameter that has such a tensor.

    Args:
        files: files of the checkpoint.
        layout: places of the parameters.
        kind: :data:`~ort_zero.checkpoint.records.MASTER` or the name of an optimizer state.
        flats: flat tensors of each rank; a missing tensor has no entry.

    Raises:
        CorruptCheckpointError: a flat tensor is too short, or missing or of another dtype on some ranks.
        CheckpointError: a dtype is unknown.
    """
    numbers = set(layout.number_of.values())
    present = {number for number in numbers if not _is_missing(files, kind, number, flats)}
    codes = {number: _same_code(files, kind, number, flats) for number in present}
    pieces: dict[str, list[Piece]] = {name: [] for name in layout.shapes}
    for (rank, number), group in layout.groups.items():
        if number not in present:
            continue
        file, stored = files.optimizers[rank].file.name, flats[rank][number]
        size, elements = stored.itemsize, math.prod(stored.shape)
        for place in group.places:
            # a flat tensor that is too short leaves a gap, which the check of the tensor's pieces reports
            length = min(place.length, elements - place.offset)
            if length > 0:
                piece = Piece(file, stored.offset + place.offset * size, length * size, place.start)
                pieces[place.name].append(piece)
    for name, shape in layout.shapes.items():
        number = layout.number_of[name]
        if number in present:
            ordered = tuple(sorted(pieces[name], key=lambda piece: piece.start))
            tensor = Tensor(name=name, kind=kind, dtype=codes[number], shape=shape, pieces=ordered)
            yield covered(tensor, files.folder.path())


def _same_code(files: StateFiles, kind: str, number: int, flats: list[Flats]) -> str:
    """Return the dtype's code of one flat tensor, which must be the same on all ranks."""
    what = f"{kind} of group {number}"
    codes = {file: files.dtype_code(file, flat[number], what) for file, flat in zip(files.optimizers, flats)}
    files.check_same(f"dtype of {what}", codes)
    return next(iter(codes.values()))


def _is_missing(files: StateFiles, kind: str, number: int, flats: list[Flats]) -> bool:
    """Return True if no rank has the flat tensor; raise CorruptCheckpointError if only some ranks have it."""
    present = [number in flat for flat in flats]
    if any(present) and not all(present):
        raise files.foreign(
            files.optimizers[present.index(False)],
            f"it has no {kind} of group {number}, but rank {present.index(True)}'s file has one",
        )
    return not any(present)


Shapes = list[dict[str, tuple[int, ...]]]
"""Shapes of the trained parameters by name, for each flat tensor."""


class Partitioning:
    """The partitioning of the trained parameters over the ranks; base class of ``Zero12`` and ``Zero3``.

    Args:
        files: the opened files, with optimizer states.
    """

    masters_key: str
    """Key under which the optimizer's file holds the flat masters."""
    orders_groups = True
    """False if ranks may have the same parameter groups in another order."""
    inner_optimizer_key: str
    """Key under which the optimizer's file holds the state of the optimizer that ZeRO wraps."""

    def __init__(self, files: StateFiles):
        self.files = files

    def layout(self) -> FlatLayout:
        """Return the places of the trained parameters.

        Raises:
            CorruptCheckpointError: the module file has no shapes, or other parameters than the optimizer's files.
        """
        groups = self._shapes()
        layout = FlatLayout()
        self._fill(layout, groups)
        return layout

    def check(self, layout: FlatLayout) -> None:
        """Raise if a rank's file holds other parts of the parameters than the layout requires.

        Raises:
            CorruptCheckpointError: a file does not fit the layout; names the file.
        """
        flats = [self.masters(file) for file in self.files.optimizers]
        count = 1 + max((number for _, number in layout.groups), default=-1)
        for rank, flat in enumerate(flats):
            if len(flat) != count:
                raise self.files.foreign(
                    self.files.optimizers[rank], f"it has {len(flat)} groups, the module file has {count}"
                )
        for (rank, number), group in layout.groups.items():
            elements = math.prod(flats[rank][number].shape)
            if not self._min_length(group) <= elements <= group.size:
                raise self.files.foreign(
                    self.files.optimizers[rank],
                    f"its part of group {number} has {elements} elements, the parameters' shapes require {group.size}",
                )

    def masters(self, file: TorchFile) -> Flats:
        """Return the flat masters of one rank.

        Raises:
            CheckpointError: the file holds no masters that can be read.
        """
        flat: Any = zero_state(file).get(self.masters_key)
        if isinstance(flat, StoredTensor):
            flat = [flat]
        if not isinstance(flat, (list, tuple)) or not all(isinstance(f, StoredTensor) for f in flat):
            raise CheckpointError(f"{self.files.path(file)} holds no masters that can be read; {WAY_OUT}")
        return dict(enumerate(flat))

    def _shapes(self) -> Shapes:
        """Return the shapes of the trained parameters from the module file.

        Raises:
            CorruptCheckpointError: the module file has no shapes.
        """
        shapes = self.files.module.get("param_shapes") or self._shapes_by_slices()
        if shapes is None:
            raise CorruptCheckpointError(
                f"{self.files.path(self.files.modules[0])} has no param_shapes: "
                "it is not the module file of a ZeRO checkpoint"
            )
        shapes = [shapes] if isinstance(shapes, dict) else shapes
        return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]

    def _shapes_by_slices(self) -> Shapes | None:
        """Return the shapes of the parameters whose slices the ranks' files list; None if a shape is unknown.

        DeepSpeed's BF16_Optimizer without ZeRO, as in pipelines, writes ``param_shapes`` into no file.
        """
        shapes = {n: v.shape for n, v in self.files.module["module"].items() if isinstance(v, StoredTensor)}
        shapes |= self.files.shapes
        groups: Shapes = []
        for file in self.files.optimizers:
            slices = zero_state(file).get("param_slice_mappings")
            for number, group in enumerate(slices if isinstance(slices, list) else ()):
                if number == len(groups):
                    groups.append({})
                for name in group:
                    if name not in shapes:
                        return None
                    groups[number].setdefault(name, shapes[name])
        return groups or None

    def _fill(self, layout: FlatLayout, groups: Shapes) -> None:
        """Add the parameters with their places in the ranks' flat tensors."""
        raise NotImplementedError

    def _min_length(self, group: FlatGroup) -> int:
        """Return the minimum number of elements of a flat tensor."""
        raise NotImplementedError


class Zero12(Partitioning):
    """The partitioning of ZeRO-1 and 2: a vector is a parameter group, with one part per rank that shares the group.

    Args:
        files: the opened files, with optimizer states.
        experts: the experts of the model; None for a model without experts.
    """

    masters_key = "single_partition_of_fp32_groups"
    inner_optimizer_key = "base_optimizer_state"

    def __init__(self, files: StateFiles, experts: Experts | None = None):
        super().__init__(files)
        self._experts = experts
        self.orders_groups = experts is None
        self._group_names = [self._names_of_groups(file) for file in files.optimizers] if experts else []

    def _fill(self, layout: FlatLayout, groups: Shapes) -> None:
        first = self.files.optimizers[0]
        paddings = zero_state(first).get("param_alignment_paddings") or [[0] * len(group) for group in groups]
        if [len(p) for p in paddings] != [len(group) for group in groups]:
            raise self.files.foreign(
                first, "its parameter groups have other numbers of parameters than the module file's"
            )
        for number, (group, pads) in enumerate(zip(groups, paddings)):
            for ranks, names in self._sharers(number, group):
                shapes = {names[saved_as]: shape for saved_as, shape in group.items()}
                parts = {
                    (rank, self._number_on(rank, number)): zero12_group(
                        number, list(shapes), shapes, index, len(ranks), pads
                    )
                    for index, rank in enumerate(ranks)
                }
                layout.add(shapes, number, parts)

    def _names_of_groups(self, file: TorchFile) -> list[tuple[str, int]]:
        """Return (name, number of earlier groups of this name) for each parameter group of a rank."""
        inner = zero_state(file).get(self.inner_optimizer_key)
        rows = inner.get("param_groups") if isinstance(inner, dict) else None
        names = [str(row.get("name")) for row in rows or () if isinstance(row, dict)]
        return [(name, names[:number].count(name)) for number, name in enumerate(names)]

    def _number_on(self, rank: int, number: int) -> int:
        """Return the number that a rank gives to the first rank's group `number`.

        DeepSpeed collects the names of groups of experts in a set, whose order differs from process to process.

        Raises:
            CorruptCheckpointError: the rank has no such group.
        """
        if not self._group_names or number >= len(self._group_names[0]):
            return number
        wanted = self._group_names[0][number]
        if wanted not in self._group_names[rank]:
            raise self.files.foreign(self.files.optimizers[rank], f"it has no parameter group {wanted[0]!r}")
        return self._group_names[rank].index(wanted)

    def _sharers(self, number: int, group: dict[str, tuple[int, ...]]) -> list[tuple[list[int], dict[str, str]]]:
        """Return (ranks that share the vector, parameters' names by names in the files) for each vector of a group."""
        world_size = self.files.world_size
        counts = zero_state(self.files.optimizers[0]).get("partition_count")
        count = counts[number] if isinstance(counts, list) and number < len(counts) else world_size
        if self._experts is not None and self._experts.holds(group):
            return self._experts.sharers(count, group)
        if count != world_size:
            raise CheckpointError(
                f"{self.files.path(self.files.optimizers[0])} has parameter groups over {counts} ranks, as experts "
                f"have, but no file of an expert (layer_*_expert_*) is there; {WAY_OUT}"
            )
        return [(list(range(world_size)), {name: name for name in group})]

    def _min_length(self, group: FlatGroup) -> int:
        # the padding at the end of a vector is not always saved
        return max((place.offset + place.length for place in group.places), default=0)


class Zero3(Partitioning):
    """The partitioning of ZeRO-3: one vector per rank, whose part number n is the flat tensor of sub-group n."""

    masters_key = "fp32_flat_groups"
    inner_optimizer_key = "optimizer_state_dict"

    def _fill(self, layout: FlatLayout, groups: Shapes) -> None:
        world_size = self.files.world_size
        for number, group in enumerate(groups):
            parts = {
                (rank, number): zero3_group(number, list(group), group, rank, world_size) for rank in range(world_size)
            }
            layout.add(group, number, parts)

    def _min_length(self, group: FlatGroup) -> int:
        return group.size


def frozen_parameters(files: StateFiles) -> Iterator[Tensor]:
    """Yield the frozen parameters, joined from the pieces in the ranks' module files.

    Raises:
        CorruptCheckpointError: a piece is missing, or has another length or dtype.
    """
    for name, shape in (files.module.get("frozen_param_shapes") or {}).items():
        pieces, codes = [], {}
        for rank, file in enumerate(files.modules):
            begin, count = zero3_part(math.prod(shape), rank, files.world_size)
            stored = (file.content.get("frozen_param_fragments") or {}).get(name)
            # the last pieces may be padded to the length of the others
            lengths = count, -(-math.prod(shape) // files.world_size)
            if not isinstance(stored, StoredTensor) or math.prod(stored.shape) not in lengths:
                raise files.foreign(file, f"it does not hold rank {rank}'s piece of the frozen parameter {name}")
            codes[file] = files.dtype_code(file, stored, name)
            if count:
                pieces.append(Piece(file.file.name, stored.offset, count * stored.itemsize, begin))
        files.check_same(f"dtype of {name}", codes)
        code = next(iter(codes.values()))
        tensor = Tensor(name=name, kind=WEIGHT, dtype=code, shape=tuple(shape), pieces=tuple(pieces))
        yield covered(tensor, files.folder.path())
