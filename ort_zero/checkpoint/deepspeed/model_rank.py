"""Read the files of one model rank: a whole model, or a pipeline stage or tensor-parallel part of a model.

The files of module states have whole weights, frozen parameters, buffers and tied names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ort_zero.checkpoint.deepspeed import partitioning
from ort_zero.checkpoint.deepspeed.compare_values import same_values
from ort_zero.checkpoint.deepspeed.experts import Experts, is_expert
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, whole_tensor
from ort_zero.checkpoint.files.dtypes import is_floating, itemsize
from ort_zero.checkpoint.files.storage import LocalFolder
from ort_zero.checkpoint.records import (
    BUFFER,
    MASTER,
    MAX_NAMED,
    MODULE,
    WEIGHT,
    Optimizer,
    ParamGroup,
    Shape,
    Tensor,
    buffer_kind,
    tied_names,
)
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_SAMPLE = 4096
"""Number of neighbouring elements that are compared in one place."""
_MAX_REMOTE_PLACES = 32
"""Maximum number of places that are compared in an object store, where each is a request."""


class ModuleState:
    """The model's tensors in the files of module states, with the tied and the frozen names."""

    def __init__(self, files: StateFiles, trained: list[str]):
        self._files = files
        self._trained = set(trained)
        module = files.module["module"]
        valueless = sorted(set(files.buffer_names) - module.keys())
        if valueless and module:  # the module of a pipeline's stage is always empty
            files.notes.append(f"it holds no values of the buffers {shortened(valueless, MAX_NAMED)}")
        self._buffers = [name for name in files.buffer_names if name in module]
        self._values: dict[str, StoredTensor] = {n: v for n, v in module.items() if isinstance(v, StoredTensor)}
        self.aliases = self._noted_aliases()
        self.aliases |= self._same_bytes({*trained, *self._buffers}, {*self.aliases})
        self.frozen = self._frozen_names()

    def weights(self) -> Iterator[Tensor]:
        if self._files.stage == 3:
            yield from partitioning.frozen_parameters(self._files)
            yield from self._whole_weights_of_zero3()
            return
        skip = {*self._trained, *self.aliases, *self._buffers}
        for name, stored in self._values.items():
            if name not in skip:
                yield self._tensor(name, WEIGHT, stored)
        if not self._files.optimizers and not self._trained:
            self._files.notes.append(
                "it was saved without optimizer states that can be read: the weights are from the module file"
            )

    def weights_unlike_masters(self, masters: list[Tensor], optimizer: Optimizer) -> list[Tensor]:
        """Return the weights of trained parameters that are not the masters, cast to the weights' dtype.

        DeepSpeed casts the masters to the weights after every step; a program may put others into the module. Only if
        a sample of each part differs, all values are compared.
        """
        folder, stored = self._files.folder, self._values
        pairs = [(t, self._tensor(t.name, MODULE, stored[t.name])) for t in masters if t.name in stored]
        pairs = [pair for pair in pairs if _comparable(*pair)]
        places = [
            (master, weight, start)
            for master, weight in pairs
            for piece in master.pieces
            for start in {piece.start, piece.start + max(0, piece.length // itemsize(master.dtype) - _SAMPLE)}
        ]
        if not isinstance(folder, LocalFolder):
            places = places[:: 1 + len(places) // _MAX_REMOTE_PLACES]
        differing = (m for m, w, at in places if not same_values(folder, m, w, at, min(at + _SAMPLE, m.elements)))
        wrong = next(differing, None)
        if wrong is None:
            return []
        counts = self._files.module
        made = float(counts.get("global_steps", 0) - counts.get("skipped_steps", 0))
        if set(optimizer.scalars.get("step", {}).values()) - {made}:
            raise CorruptCheckpointError(
                f"{self._files.path(self._files.modules[0])} is of another step than the masters: it counts {made:g} "
                f"steps, the optimizer others, and the weights of {wrong.name} are not its masters, cast"
            )
        return [weight for master, weight in pairs if not same_values(folder, master, weight)]

    def buffers(self, of_ranks: bool) -> Iterator[Tensor]:
        """Yield the persistent buffers of the module; with `of_ranks` also of ranks with other bytes than rank 0."""
        crcs = [{offset: crc for offset, _, crc in file.file.records} for file in self._files.modules]
        for name in self._buffers:
            first = self._values[name]
            yield self._tensor(name, BUFFER, first)
            for rank, file in enumerate(self._files.modules if of_ranks else ()):
                stored = file.content["module"].get(name)
                if isinstance(stored, StoredTensor) and stored.shape == first.shape:
                    if crcs[rank].get(stored.storage_offset) != crcs[0].get(first.storage_offset):
                        yield whole_tensor(self._files, file, name, buffer_kind(rank), stored)

    def _tensor(self, name: str, kind: str, stored: StoredTensor) -> Tensor:
        return whole_tensor(self._files, self._files.modules[0], name, kind, stored)

    def _frozen_names(self) -> list[str]:
        module = self._files.module
        shapes = module.get("frozen_param_shapes")
        if shapes is not None:
            return list(shapes)
        trained = self._trained or {n for group in module.get("param_shapes") or () for n in group}
        if not trained:
            return []
        return [n for n in self._values if n not in trained and n not in self.aliases and n not in self._buffers]

    def _whole_weights_of_zero3(self) -> Iterator[Tensor]:
        """Yield the trained parameters that are in no optimizer's file, from the module file."""
        shapes = {n: tuple(s) for group in self._files.module.get("param_shapes") or () for n, s in group.items()}
        for name, shape in shapes.items():
            if name in self._trained:
                continue
            stored = self._values.get(name)
            if stored is None or stored.shape != shape:
                raise CheckpointError(
                    f"{self._files.folder.path()} has no *_optim_states.pt, and with ZeRO-3 only these files "
                    "have the weights; save with the optimizer, or use engine.save_16bit_model"
                )
            yield self._tensor(name, WEIGHT, stored)

    def _noted_aliases(self) -> dict[str, str]:
        noted = self._files.module.get("shared_params") or {}
        aliases = {}
        for name, target in noted.items():
            seen = {name}
            while target in noted and target not in seen:
                seen.add(target)
                target = noted[target]
            one, other = self._values.get(name), self._values.get(target)
            # parameters without elements all have the address 0, by which DeepSpeed takes them for tied
            empty = one is not None and other is not None and 0 in (*one.shape, *other.shape) and self._files.stage != 3
            if name not in self._trained and target != name and not empty:
                aliases[name] = target
        return aliases

    def _same_bytes(self, kept: set[str], tied: set[str]) -> dict[str, str]:
        """Return the tied names whose values are the same bytes of the file, each with its stored name."""
        if self._files.stage == 3:
            return {}  # ZeRO-3's values are empty placeholders
        values = {n: stored for n, stored in self._values.items() if n not in tied and 0 not in stored.shape}
        # kept names come first: DeepSpeed does not note the second name of a module that a model has twice
        ordered = {name: values[name] for name in sorted(values, key=lambda name: name not in kept)}
        return {name: target for name, target in tied_names(ordered).items() if name not in kept}


def _comparable(master: Tensor, weight: Tensor) -> bool:
    """Return True if a weight is stored row by row, in a dtype to which masters are cast."""
    is_cast = weight.dtype == master.dtype or (master.dtype == "F32" and weight.dtype in ("BF16", "F16"))
    return is_cast and weight.shape == master.shape and weight.strides is None


@dataclass
class ModelRank:
    """The tensors and files of one model rank, or of several model ranks that were joined."""

    states: StateFiles
    files: list[TorchFile]
    """All files of the rank, including files of layers and experts."""
    tensors: list[Tensor]
    optimizer: Optimizer | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied parameters: the name that is not stored -> the name that is."""
    frozen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> str | None:
        """Code of the weights' floating-point dtype, None if unknown; ZeRO-3's empty weights have this dtype too."""
        module, buffers = self.states.module.get("module") or {}, self.states.buffer_names
        weights = (v for name, v in module.items() if isinstance(v, StoredTensor) and name not in buffers)
        codes = (self.states.dtype_code(self.states.modules[0], stored, "a weight") for stored in weights)
        return next(filter(is_floating, codes), None)


def read_model_rank(
    files: StateFiles,
    experts: Experts | None = None,
    trained: Mapping[str, Shape] | None = None,
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
    shapes: dict[str, Shape] = {}
    if files.optimizers:
        layout = partitioning.layout_of(files, experts)
        shapes = layout.shapes
        module = ModuleState(files, list(shapes))
        tensors += partitioning.flat_tensors(
            files, layout, MASTER, [partitioning.masters_of(files, file) for file in files.optimizers]
        )
        optimizer, moments = partitioning.read_optimizer(files, layout)
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
    return ModelRank(files, opened, tensors, optimizer, module.aliases, frozen, files.notes)


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
