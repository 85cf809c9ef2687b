"""Check how a ZeRO stage cuts the trained parameters over the ranks; ``zero12`` and ``zero3`` have the rules."""

from __future__ import annotations

from typing import Any

from ort_zero.checkpoint.deepspeed.file_names import WAY_OUT
from ort_zero.checkpoint.deepspeed.flat_layout import FlatLayout, Flats, elements_of
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, zero_state
from ort_zero.checkpoint.format.flat_groups import FlatGroup
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile
from ort_zero.errors import CheckpointError, CorruptCheckpointError

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
            elements = elements_of(flats[rank][number].shape)
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
