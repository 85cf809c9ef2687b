"""Locate ZeRO-3's parameters: each is cut over all ranks; a rank's vector has its cuts, sub-group after sub-group."""

from __future__ import annotations

from collections.abc import Iterator

from ort_zero.checkpoint.deepspeed.flat_layout import ElementRange, FlatLayout, elements_of
from ort_zero.checkpoint.deepspeed.partitioning import Partitioning, Shapes
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, covered
from ort_zero.checkpoint.records import WEIGHT, Piece, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor


class Zero3(Partitioning):
    """The partitioning of ZeRO-3: one vector per rank, whose part number n is the flat tensor of sub-group n."""

    masters_key = "fp32_flat_groups"
    inner_optimizer_key = "optimizer_state_dict"

    def _fill(self, layout: FlatLayout, groups: Shapes) -> None:
        world_size = self.files.world_size
        position = 0
        lengths: list[int] = []
        for group in groups:
            start = position
            for name, shape in group.items():
                cuts = list(_cuts(elements_of(shape), world_size))
                ranges = [
                    ElementRange(rank, position, position + stop - begin, begin)
                    for rank, (begin, stop) in enumerate(cuts)
                    if stop > begin
                ]
                layout.add(name, shape, len(lengths), ranges, name)
                position += -(-elements_of(shape) // world_size)
            lengths.append(position - start)
        layout.lengths = [lengths] * world_size
        layout.parts = [[(rank, number) for number in range(len(groups))] for rank in range(world_size)]

    def _min_lengths(self, layout: FlatLayout, vector: int) -> list[int]:
        return layout.lengths[vector]


def frozen_parameters(files: StateFiles) -> Iterator[Tensor]:
    """Yield the frozen parameters, joined from the pieces in the ranks' module files.

    Raises:
        CorruptCheckpointError: a piece is missing, or has another length or dtype.
    """
    for name, shape in (files.module.get("frozen_param_shapes") or {}).items():
        pieces, codes = [], {}
        for rank, (file, (begin, end)) in enumerate(
            zip(files.modules, _cuts(elements_of(shape), files.world_size), strict=True)
        ):
            stored = (file.content.get("frozen_param_fragments") or {}).get(name)
            # the last pieces may be padded to the length of the others
            lengths = end - begin, -(-elements_of(shape) // files.world_size)
            if not isinstance(stored, StoredTensor) or elements_of(stored.shape) not in lengths:
                raise files.foreign(file, f"it does not hold rank {rank}'s piece of the frozen parameter {name}")
            codes[file] = files.dtype_code(file, stored, name)
            if end > begin:
                pieces.append(Piece(file.file.name, stored.offset, (end - begin) * stored.itemsize, begin))
        files.check_same(f"dtype of {name}", codes)
        code = next(iter(codes.values()))
        tensor = Tensor(name=name, kind=WEIGHT, dtype=code, shape=tuple(shape), pieces=tuple(pieces))
        yield covered(tensor, files.folder.path())


def _cuts(elements: int, world_size: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each rank's elements: ceil(elements / world size) per rank, fewer on the last ranks."""
    part = -(-elements // world_size)
    for rank in range(world_size):
        yield min(rank * part, elements), min((rank + 1) * part, elements)
