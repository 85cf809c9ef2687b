"""Join the stages of a pipeline, and the files of its layers, into one model.

Layer N of the pipeline is in ``layer_NN-model_states.pt``, with its tensors under the names in the layer's module. In
the whole model, as in ``PipelineModule.state_dict()``, they are named ``N.<name>``; tensors that layers share
(``TiedLayerSpec``) are named ``tied_modules.<key>.<name>``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ort_zero.checkpoint.deepspeed.compare_values import same_values
from ort_zero.checkpoint.deepspeed.model_rank import ModelRank, joined_optimizers, untrained
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, notes_on, whole_tensor, zero_state
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT, Tensor
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile
from ort_zero.errors import CorruptCheckpointError

_TIED = "tied_modules."


def add_shapes(states: StateFiles, layers: Mapping[int, TorchFile]) -> None:
    """Add the shapes of the layers' parameters to the files of a stage that do not list them."""
    if states.module.get("param_shapes") or not states.optimizers:
        return
    for number, file in layers.items():
        for inner_name, stored in file.content.items():
            if isinstance(stored, StoredTensor):
                states.shapes[f"{number}.{inner_name}"] = stored.shape
    elements: dict[str, int] = {}
    for file in states.optimizers:
        slices = zero_state(file).get("param_slice_mappings")
        for group in slices if isinstance(slices, list) else ():
            for name, address in group.items():
                elements[name] = elements.get(name, 0) + address.numel
    for name in elements:
        if name.startswith(_TIED) and name.count(".") >= 2:
            inner_name = name.split(".", 2)[2]
            shapes = {shape for other, shape in states.shapes.items() if other.partition(".")[2] == inner_name}
            fitting = [shape for shape in shapes if math.prod(shape) == elements[name]]
            if len(fitting) == 1:
                states.shapes[name] = fitting[0]


def join_stages(stages: list[ModelRank], opened: Mapping[int, TorchFile]) -> ModelRank:
    """Return the whole model, joined from the stages of a pipeline and the files of its layers."""
    first = stages[0]
    notes = [note for stage in stages for note in stage.notes]
    tensors = _trained(stages, notes)
    _check_layers(first.states.folder, stages, tensors, opened)
    tensors += _untrained_tensors(first.states, stages, tensors, opened, notes)
    gaps = _gaps(opened)
    if gaps:
        notes.append(f"layers {', '.join(gaps)} of the pipeline have no file: they have no tensors, or share them")
    notes += notes_on(list(opened.values()))
    notes.append(f"it is a pipeline of {len(stages)} stages: the tensors of its layer N are named N.<name>")
    return replace(
        first,
        files=[*(file for stage in stages for file in stage.files), *opened.values()],
        tensors=tensors,
        optimizer=joined_optimizers([stage.optimizer for stage in stages]),
        aliases={alias: name for stage in stages for alias, name in stage.aliases.items()},
        frozen=untrained(tensors),
        notes=notes,
    )


def _gaps(numbers: Iterable[int]) -> list[str]:
    gaps, expected = [], 0
    for number in sorted(numbers):
        if number > expected:
            gaps.append(f"{expected} to {number - 1}" if number - expected > 1 else f"{expected}")
        expected = number + 1
    return gaps


def _trained(stages: list[ModelRank], notes: list[str]) -> list[Tensor]:
    """Return the tensors in the optimizers' files of all stages; a tensor that stages share occurs once."""
    tensors: dict[tuple[str, str], Tensor] = {}
    for stage in stages:
        for tensor in stage.tensors:
            key = (tensor.kind, tensor.name)
            if key not in tensors:
                tensors[key] = tensor
                continue
            if not tensor.name.startswith(_TIED) or tensor.shape != tensors[key].shape:
                raise CorruptCheckpointError(
                    f"{stage.states.path(stage.files[0])} belongs to another run: {tensor.name} is in another stage too"
                )
            if tensor.kind == MASTER and not same_values(stage.states.folder, tensors[key], tensor):
                notes.append(
                    f"the stages hold different values of {tensor.name}, which they share; the first stage's "
                    "are taken, as DeepSpeed does when it loads"
                )
    return list(tensors.values())


def _check_layers(
    folder: Folder, stages: list[ModelRank], trained: list[Tensor], opened: Mapping[int, TorchFile]
) -> None:
    """Raise CorruptCheckpointError if the file of a layer with tensors is missing, or lacks one of them."""
    buffers = [name for stage in stages for name in stage.states.buffer_names]
    shapes = {t.name: t.shape for t in trained if t.kind == MASTER}
    for name in (*shapes, *buffers):
        number, _, inner_name = name.partition(".")
        if not number.isdigit():
            continue
        file = opened.get(int(number))
        if file is None:
            example = next(iter(opened.values())).file.name if opened else "layer_00-model_states.pt"
            missing = f"layer_{int(number):02d}{example[example.index('-') :]}"
            raise CorruptCheckpointError(f"{folder.path(missing)} is missing: the pipeline has {name}")
        stored = file.content.get(inner_name)
        if not isinstance(stored, StoredTensor) or stored.shape != tuple(shapes.get(name, stored.shape)):
            raise CorruptCheckpointError(
                f"{folder.path(file.file.name)} belongs to another run: its {inner_name} differs"
            )


def _untrained_tensors(
    states: StateFiles,
    stages: list[ModelRank],
    trained: list[Tensor],
    opened: Mapping[int, TorchFile],
    notes: list[str],
) -> list[Tensor]:
    masters = {t.name: t for t in trained if t.kind == MASTER}
    buffers = {name for stage in stages for name in stage.states.buffer_names}
    aliases = {alias for stage in stages for alias in stage.aliases}
    tensors, sharing = [], set()
    for number, file in opened.items():
        for inner_name, stored in file.content.items():
            name = f"{number}.{inner_name}"
            if not isinstance(stored, StoredTensor) or name in masters or name in aliases:
                continue
            kind = BUFFER if name in buffers else WEIGHT
            tensor = whole_tensor(states, file, name, kind, stored)
            shared = [m for m in masters.values() if m.name.startswith(_TIED) and m.name.endswith(f".{inner_name}")]
            if any(m.shape == tensor.shape and same_values(states.folder, m, tensor) for m in shared):
                sharing.add(number)
            else:
                tensors.append(tensor)
    if sharing:
        notes.append(
            f"layers {', '.join(map(str, sorted(sharing)))} of the pipeline share tensors, "
            f"which are written once, under {_TIED}*"
        )
    return tensors
