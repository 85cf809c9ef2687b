"""Locate the parameters of ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat vector per group, cut equally over the ranks.

A group of experts has one vector for each expert-parallel rank, cut over the ranks that hold the same experts.
"""

from __future__ import annotations

from ort_zero.checkpoint.deepspeed.experts import Experts
from ort_zero.checkpoint.deepspeed.file_names import WAY_OUT
from ort_zero.checkpoint.deepspeed.flat_layout import FlatLayout
from ort_zero.checkpoint.deepspeed.partitioning import Partitioning, Shapes
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, zero_state
from ort_zero.checkpoint.format.flat_groups import FlatGroup, zero12_group
from ort_zero.checkpoint.torch_file import TorchFile
from ort_zero.errors import CheckpointError


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
