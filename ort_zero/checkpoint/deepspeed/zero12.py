"""Locate the parameters of ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat vector per group, cut equally over the ranks.

A group of experts has one vector for each expert-parallel rank, cut over the ranks that hold the same experts.
"""

from __future__ import annotations

from ort_zero.checkpoint.deepspeed.experts import Experts
from ort_zero.checkpoint.deepspeed.file_names import WAY_OUT
from ort_zero.checkpoint.deepspeed.flat_layout import ElementRange, FlatLayout, elements_of
from ort_zero.checkpoint.deepspeed.partitioning import Partitioning, Shapes
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, zero_state
from ort_zero.checkpoint.torch_file import TorchFile
from ort_zero.errors import CheckpointError, CorruptCheckpointError


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

    def check(self, layout: FlatLayout) -> None:
        """Raise CorruptCheckpointError if a file lists other slices, or holds other parts, than the layout requires."""
        self._check_slices(layout)
        super().check(layout)

    def _fill(self, layout: FlatLayout, groups: Shapes) -> None:
        first = self.files.optimizers[0]
        paddings = zero_state(first).get("param_alignment_paddings") or [[0] * len(group) for group in groups]
        if [len(p) for p in paddings] != [len(group) for group in groups]:
            raise self.files.foreign(
                first, "its parameter groups have other numbers of parameters than the module file's"
            )
        for number, (group, pads) in enumerate(zip(groups, paddings)):
            for ranks, names in self._sharers(number, group):
                numbers = [self._number_on(rank, number) for rank in ranks]
                vector, position = len(layout.parts), 0
                for (saved_as, shape), pad in zip(group.items(), pads):
                    size = elements_of(shape)
                    ranges = [ElementRange(vector, position, position + size, 0)]
                    layout.add(names[saved_as], shape, number, ranges, saved_as)
                    position += size + pad
                part = -(-position // (2 * len(ranks))) * 2
                layout.lengths.append([part] * len(ranks))
                layout.parts.append(list(zip(ranks, numbers)))

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

    def _min_lengths(self, layout: FlatLayout, vector: int) -> list[int]:
        # the padding at the end of a vector is not always saved
        end = max((r.end for ranges in layout.ranges.values() for r in ranges if r.vector == vector), default=0)
        part = layout.lengths[vector][0]
        return [min(max(end - index * part, 0), part) for index in range(len(layout.parts[vector]))]

    def _check_slices(self, layout: FlatLayout) -> None:
        """Raise CorruptCheckpointError if a file lists other slices of parameters than its rank must hold."""
        files = self.files
        mappings = [zero_state(file).get("param_slice_mappings") for file in files.optimizers]
        if not all(isinstance(mapping, list) for mapping in mappings):
            return
        expected = [self._slices_of(layout, rank) for rank in range(files.world_size)]
        listed = [[{n: (a.start, a.numel) for n, a in group.items()} for group in row or ()] for row in mappings]
        wrong = [rank for rank in range(files.world_size) if listed[rank] != expected[rank]]
        if not wrong or self._is_round_robin():
            return
        file = files.optimizers[wrong[0]]
        if listed[wrong[0]] in expected:
            raise CorruptCheckpointError(
                f"{files.path(file)} is rank {expected.index(listed[wrong[0]])}'s file: it holds that rank's slices"
            )
        raise files.foreign(file, f"it holds other slices of the parameters than rank {wrong[0]} must hold")

    def _is_round_robin(self) -> bool:
        # with this option DeepSpeed orders the parameters otherwise than the slices that it notes
        config = self.files.optimizers[0].content.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))

    def _slices_of(self, layout: FlatLayout, rank: int) -> list[dict[str, tuple[int, int]]]:
        """Return (first element, number of elements) of each parameter's slice in a rank's part, for each group."""
        count = 1 + max((number for row in layout.parts for _, number in row), default=-1)
        groups: list[dict[str, tuple[int, int]]] = [{} for _ in range(count)]
        places = [{holder: (index, n) for index, (holder, n) in enumerate(row)} for row in layout.parts]
        for name, ranges in layout.ranges.items():
            for r in ranges:
                if rank not in places[r.vector]:
                    continue
                index, number = places[r.vector][rank]
                part = layout.lengths[r.vector][index]
                begin, end = max(r.begin, index * part), min(r.end, (index + 1) * part)
                if begin < end:
                    groups[number][layout.saved_names[name]] = (begin - index * part, end - begin)
        return groups
