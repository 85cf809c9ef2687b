"""ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat vector per parameter group, cut into equal parts, one per rank."""

from __future__ import annotations

from ort_zero.checkpoint.deepspeed.flat_layout import ElementRange, FlatLayout, elements_of
from ort_zero.checkpoint.deepspeed.partitioning import Partitioning, Shapes
from ort_zero.checkpoint.deepspeed.state_files import zero_state
from ort_zero.errors import CorruptCheckpointError


class Zero12(Partitioning):
    """A vector is a parameter group; its part number r is rank r's."""

    masters_key = "single_partition_of_fp32_groups"
    inner_optimizer_key = "base_optimizer_state"

    def check(self, layout: FlatLayout) -> None:
        """See :meth:`.partitioning.Partitioning.check`; what the files note of their slices is compared first."""
        self._check_slices(layout)
        super().check(layout)

    def _fill(self, layout: FlatLayout, groups: Shapes) -> None:
        world_size, first = self.files.world_size, self.files.optimizers[0]
        paddings = zero_state(first).get("param_alignment_paddings") or [[0] * len(group) for group in groups]
        if [len(p) for p in paddings] != [len(group) for group in groups]:
            raise self.files.foreign(
                first, "its parameter groups have other numbers of parameters than the module file's"
            )
        for number, (group, pads) in enumerate(zip(groups, paddings)):
            position = 0
            for (name, shape), pad in zip(group.items(), pads):
                size = elements_of(shape)
                layout.ranges[name] = [ElementRange(number, position, position + size, 0)]
                position += size + pad
            part = -(-position // (2 * world_size)) * 2
            layout.lengths.append([part] * world_size)
            layout.parts.append([(rank, number) for rank in range(world_size)])

    def _least_lengths(self, layout: FlatLayout, vector: int) -> list[int]:
        # what fills the end of a vector may be saved or not
        end = max((r.end for ranges in layout.ranges.values() for r in ranges if r.vector == vector), default=0)
        part = layout.lengths[vector][0]
        return [min(max(end - rank * part, 0), part) for rank, _ in layout.parts[vector]]

    def _check_slices(self, layout: FlatLayout) -> None:
        """Raise if a file holds other slices of parameters than its rank must."""
        files = self.files
        held = [zero_state(file).get("param_slice_mappings") for file in files.optimizers]
        if not all(isinstance(mapping, list) for mapping in held):
            return
        expected = [self._slices_of(layout, rank) for rank in range(files.world_size)]
        found = [[{n: (a.start, a.numel) for n, a in group.items()} for group in mapping or ()] for mapping in held]
        wrong = [rank for rank in range(files.world_size) if found[rank] != expected[rank]]
        if not wrong or self._is_round_robin():
            return
        file = files.optimizers[wrong[0]]
        if found[wrong[0]] in expected:
            raise CorruptCheckpointError(
                f"{files.path(file)} is rank {expected.index(found[wrong[0]])}'s file: it holds that rank's slices"
            )
        raise files.foreign(file, f"it holds other slices of the parameters than rank {wrong[0]} must")

    def _is_round_robin(self) -> bool:
        # DeepSpeed then deals the parameters out in another order than the one in which it notes the slices
        config = self.files.optimizers[0].content.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))

    def _slices_of(self, layout: FlatLayout, rank: int) -> list[dict[str, tuple[int, int]]]:
        """Return (first element, elements) in a rank's part of each parameter it has a slice of, for each group."""
        groups: list[dict[str, tuple[int, int]]] = [{} for _ in layout.lengths]
        for name, ranges in layout.ranges.items():
            for r in ranges:
                part = layout.lengths[r.vector][rank]
                begin, end = max(r.begin, rank * part), min(r.end, (rank + 1) * part)
                if begin < end:
                    groups[r.vector][name] = (begin - rank * part, end - begin)
        return groups
