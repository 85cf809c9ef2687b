"""How a ZeRO stage cuts the trained parameters over the ranks; the rules of each are in ``zero12`` and ``zero3``."""

from __future__ import annotations

from typing import Any

from ort_zero.checkpoint.deepspeed.file_names import WAY_OUT
from ort_zero.checkpoint.deepspeed.flat_layout import FlatLayout, Flats, elements_of
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, zero_state
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile
from ort_zero.errors import CheckpointError, CorruptCheckpointError

Shapes = list[dict[str, tuple[int, ...]]]
"""Shapes of the trained parameters by name, for each flat tensor."""


class Partitioning:
    """The rules of one family of stages; the base of ``Zero12`` and ``Zero3``.

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
        """Return where the trained parameters lie.

        Raises:
            CorruptCheckpointError: the module file has no shapes, or other parameters than the optimizer's.
        """
        groups = self._shapes()
        layout = FlatLayout()
        self._fill(layout, groups)
        return layout

    def check(self, layout: FlatLayout) -> None:
        """Raise if a rank's file holds other parts of the parameters than follow from the layout.

        Raises:
            CorruptCheckpointError: it does; names the file.
        """
        flats = [self.masters(file) for file in self.files.optimizers]
        count = 1 + max((number for row in layout.parts for _, number in row), default=-1)
        for rank, flat in enumerate(flats):
            if len(flat) != count:
                raise self.files.foreign(
                    self.files.optimizers[rank], f"it has {len(flat)} groups, the module file has {count}"
                )
        for vector, (lengths, parts) in enumerate(zip(layout.lengths, layout.parts)):
            used = self._least_lengths(layout, vector)
            for length, (rank, number), least in zip(lengths, parts, used):
                found = elements_of(flats[rank][number].shape)
                if not least <= found <= length:
                    raise self.files.foreign(
                        self.files.optimizers[rank],
                        f"its part of group {number} has {found} elements, the shapes of the parameters want {length}",
                    )

    def masters(self, file: TorchFile) -> Flats:
        """Return the flat masters of one rank.

        Raises:
            CheckpointError: it holds none that can be read.
        """
        flat: Any = zero_state(file).get(self.masters_key)
        if isinstance(flat, StoredTensor):
            flat = [flat]
        if not isinstance(flat, (list, tuple)) or not all(isinstance(f, StoredTensor) for f in flat):
            raise CheckpointError(f"{self.files.path(file)} holds no masters that can be read; {WAY_OUT}")
        return dict(enumerate(flat))

    def _shapes(self) -> Shapes:
        """Return the shapes that the module file notes.

        Raises:
            CorruptCheckpointError: it notes none.
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
        """Return the shapes of what the ranks note that they hold; None if one is not known.

        DeepSpeed's BF16_Optimizer without ZeRO, as pipelines have it, has them in no file of module states.
        """
        known = {n: v.shape for n, v in self.files.module["module"].items() if isinstance(v, StoredTensor)}
        known |= self.files.shapes
        groups: Shapes = []
        for file in self.files.optimizers:
            held = zero_state(file).get("param_slice_mappings")
            for number, group in enumerate(held if isinstance(held, list) else ()):
                if number == len(groups):
                    groups.append({})
                for name in group:
                    if name not in known:
                        return None
                    groups[number].setdefault(name, known[name])
        return groups or None

    def _fill(self, layout: FlatLayout, groups: Shapes) -> None:
        """Add the parameters with their ranges, and the parts and lengths of the vectors."""
        raise NotImplementedError

    def _least_lengths(self, layout: FlatLayout, vector: int) -> list[int]:
        """Return how many elements each part of a vector must have at least."""
        raise NotImplementedError
