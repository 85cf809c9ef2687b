"""Read the files of one model rank: a whole model, or a pipeline stage or tensor-parallel part of a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ort_zero.checkpoint.deepspeed.experts import Experts, is_expert
from ort_zero.checkpoint.deepspeed.inner_optimizer import read_optimizer
from ort_zero.checkpoint.deepspeed.module_state import ModuleState
from ort_zero.checkpoint.deepspeed.partitioning import flat_tensors, layout_of, masters_of
from ort_zero.checkpoint.deepspeed.state_files import StateFiles
from ort_zero.checkpoint.files.dtypes import is_floating
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import MASTER, WEIGHT, Optimizer, ParamGroup, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile


@dataclass
class ModelRank:
    """The tensors and files of one model rank, or of several model ranks that were joined."""

    number: int
    """The number after ``mp_rank_`` in the names of the rank's files."""
    states: StateFiles
    """The rank's files of module and optimizer states."""
    files: list[TorchFile]
    """All files of the rank, including files of layers and experts."""
    tensors: list[Tensor]
    optimizer: Optimizer | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied parameters: the name that is not stored -> the name that is."""
    frozen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Folder:
        """Folder of the checkpoint."""
        return self.states.folder

    @property
    def module(self) -> dict[str, Any]:
        """Content of the file of module states."""
        return self.states.module

    @property
    def dtype(self) -> str | None:
        """Code of the weights' floating-point dtype, None if unknown; ZeRO-3's empty weights have this dtype too."""
        module = self.module.get("module") or {}
        buffers = set(self.module.get("buffer_names") or ())
        weights = (v for name, v in module.items() if isinstance(v, StoredTensor) and name not in buffers)
        codes = (self.states.dtype_code(self.states.modules[0], stored, "a weight") for stored in weights)
        return next(filter(is_floating, codes), None)


def read_model_rank(
    number: int,
    files: StateFiles,
    experts: Experts | None = None,
    trained: Mapping[str, tuple[int, ...]] | None = None,
    is_whole: bool = False,
) -> ModelRank:
    """Return the tensors and the optimizer in the files of one model rank.

    Args:
        trained: shapes of the trained parameters if other files have their values (a universal checkpoint).
        is_whole: True for the only model rank; weights that are not the masters, cast, and buffers that differ between
            ranks are read then.
    """
    tensors: list[Tensor] = []
    optimizer: Optimizer | None = None
    shapes: dict[str, tuple[int, ...]] = {}
    if files.optimizers:
        layout = layout_of(files, experts)
        shapes = layout.shapes
        module = ModuleState(files, list(shapes))
        tensors += flat_tensors(files, layout, MASTER, [masters_of(files, file) for file in files.optimizers])
        optimizer, moments = read_optimizer(files, layout)
        if files.stage < 3 and is_whole:
            tensors += module.weights_unlike_masters(tensors, optimizer)
        tensors += moments
    else:
        module = ModuleState(files, list(trained or ()))
    tensors += [*module.weights(), *module.buffers(of_ranks=is_whole)]
    frozen = [name for name in module.frozen if not is_expert(name)]
    opened = [*files.modules, *files.optimizers]
    if experts is not None:
        weights = list(experts.tensors(shapes))
        tensors += weights
        frozen += [tensor.name for tensor in weights if files.optimizers]
        opened += [*experts.weights, *experts.optimizers]
    return ModelRank(number, files, opened, tensors, optimizer, module.aliases, frozen, files.notes)


def untrained(tensors: Iterable[Tensor]) -> list[str]:
    """Return the names of the weights without masters; an empty list if no tensor is a master."""
    tensors = list(tensors)
    trained = {t.name for t in tensors if t.kind == MASTER}
    return [t.name for t in tensors if t.kind == WEIGHT and t.name not in trained] if trained else []


def joined_optimizers(optimizers: Sequence[Optimizer | None]) -> Optimizer | None:
    """Return one optimizer, with the ranks' groups of equal hyper-parameters joined; None if a rank has none."""
    present = [optimizer for optimizer in optimizers if optimizer is not None]
    if not present or len(present) != len(optimizers):
        return None
    groups: dict[str, ParamGroup] = {}
    scalars: dict[str, dict[str, float]] = {}
    named: set[str] = set()
    for optimizer in present:
        seen: dict[str, int] = {}
        for group in optimizer.groups:
            options = json.dumps(group.options, sort_keys=True)
            seen[options] = seen.get(options, -1) + 1
            key = f"{seen[options]} {options}"  # equal groups of one rank stay separate
            names = tuple(name for name in group.names if name not in named)
            named.update(names)
            before = groups.get(key)
            groups[key] = replace(group, names=(*before.names, *names) if before else names)
        for kind, values in optimizer.scalars.items():
            scalars.setdefault(kind, {}).update({n: v for n, v in values.items() if n not in scalars.get(kind, {})})
    return Optimizer(class_name=present[0].class_name, groups=tuple(groups.values()), scalars=scalars)
