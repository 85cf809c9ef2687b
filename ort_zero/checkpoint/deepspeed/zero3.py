"""Locate ZeRO-3's parameters: each is cut over all ranks; a rank's vector has its cuts, sub-group after sub-group."""

from __future__ import annotations

from collections.abc import Iterator

from ort_zero.checkpoint.deepspeed.flat_layout import FlatLayout, elements_of
from ort_zero.checkpoint.deepspeed.partitioning import Partitioning, Shapes
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, covered
from ort_zero.checkpoint.format.flat_groups import FlatGroup, zero3_group, zero3_part
from ort_zero.checkpoint.records import WEIGHT, Piece, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor


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
            begin, count = zero3_part(elements_of(shape), rank, files.world_size)
            stored = (file.content.get("frozen_param_fragments") or {}).get(name)
            # the last pieces may be padded to the length of the others
            lengths = count, -(-elements_of(shape) // files.world_size)
            if not isinstance(stored, StoredTensor) or elements_of(stored.shape) not in lengths:
                raise files.foreign(file, f"it does not hold rank {rank}'s piece of the frozen parameter {name}")
            codes[file] = files.dtype_code(file, stored, name)
            if count:
                pieces.append(Piece(file.file.name, stored.offset, count * stored.itemsize, begin))
        files.check_same(f"dtype of {name}", codes)
        code = next(iter(codes.values()))
        tensor = Tensor(name=name, kind=WEIGHT, dtype=code, shape=tuple(shape), pieces=tuple(pieces))
        yield covered(tensor, files.folder.path())
