"""Read universal checkpoints (``ds_to_universal.py``): a folder of files with whole tensors for each trained parameter.

``zero/<parameter>/fp32.pt`` holds the master and ``exp_avg.pt``, ... the moments; ``zero/optimizer_state.pt`` holds the
hyper-parameters. Frozen parameters and buffers are in the copied files of module states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ort_zero.checkpoint.deepspeed.experts import is_expert
from ort_zero.checkpoint.deepspeed.file_names import UNIVERSAL_FOLDER, UNIVERSAL_OPTIMIZER_FILE
from ort_zero.checkpoint.deepspeed.model_rank import ModelRank, read_model_rank
from ort_zero.checkpoint.deepspeed.partitioning import group_options, number_of
from ort_zero.checkpoint.deepspeed.splits import Rule
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, open_states, whole_tensor
from ort_zero.checkpoint.deepspeed.tensor_parallel import join_tensor_parallel
from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.records import MASTER, MAX_NAMED, Optimizer, ParamGroup, Shape, Tensor, check_state_name
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile, open_torch_file
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_MASTER = "fp32.pt"
_STEP = "step.pt"


@dataclass
class _Parameter:
    tensors: list[Tensor]
    files: list[TorchFile]
    step: float | None


def read_universal(
    folder: Folder,
    files: Mapping[int, StateFiles],
    tensor_degree: int,
    tp_split: Sequence[Rule],
    config: object,
    zero3_modules: Sequence[str] = (),
) -> ModelRank:
    first = files[0]
    shapes = _trained_shapes(files.values())
    experts = [name for name in shapes if is_expert(name)]
    if experts:
        raise CheckpointError(
            f"{folder.path()} is a universal checkpoint of a mixture of experts: DeepSpeed's converter writes the "
            f"experts of several ranks over each other ({shortened(experts, MAX_NAMED)}); "
            "use the checkpoint it was made from"
        )
    parameters = {n: _read_parameter(first, n, shape if tensor_degree == 1 else None) for n, shape in shapes.items()}
    others = _not_trained(files, shapes, tensor_degree, tp_split, config)
    optimizer, optimizer_file = _optimizer(first, files.values(), parameters)
    tensors = [tensor for parameter in parameters.values() for tensor in parameter.tensors]
    kinds = {tensor.kind for tensor in tensors} - {MASTER}
    for kind in sorted(kinds):
        without = sorted(shapes.keys() - {t.name for t in tensors if t.kind == kind})
        if without:
            others.notes.append(f"it has no {kind} of {shortened(without, MAX_NAMED)}, which had no gradient yet")
    others.tensors = [*tensors, *others.tensors]
    others.files += [file for parameter in parameters.values() for file in parameter.files]
    others.files += [optimizer_file] if optimizer_file is not None else []
    others.files += [open_states(folder, name) for name in zero3_modules]
    others.optimizer = optimizer
    return others


def _trained_shapes(files: Iterable[StateFiles]) -> dict[str, Shape]:
    """Return the trained parameters' shapes in the files of module states, from the first tensor-parallel rank."""
    shapes: dict[str, Shape] = {}
    for states in files:
        noted = states.param_shapes()
        if noted is None:
            raise CorruptCheckpointError(
                f"{states.path(states.modules[0])} has no param_shapes: it is not the module file of a ZeRO checkpoint"
            )
        for name, shape in (item for group in noted for item in group.items()):
            if not is_plain_name(name):
                raise CorruptCheckpointError(
                    f"{states.path(states.modules[0])} has a parameter named {name!r}, which cannot name a folder"
                )
            shapes.setdefault(name, shape)
    return shapes


def _read_parameter(states: StateFiles, name: str, shape: Shape | None) -> _Parameter:
    """Return the tensors of one parameter; its shape is None if tensor-parallel ranks had parts of it."""
    place = f"{UNIVERSAL_FOLDER}/{name}"
    file_names = states.folder.child(place).names()
    if _MASTER not in file_names:
        raise CorruptCheckpointError(f"{states.folder.path(f'{place}/{_MASTER}')} is missing")
    parameter = _Parameter([], [], None)
    for file_name in sorted(file_names, key=lambda n: (n != _MASTER, n)):
        if not file_name.endswith(".pt"):
            continue
        file = open_torch_file(states.folder, f"{place}/{file_name}")
        parameter.files.append(file)
        value = file.content
        if file_name == _STEP:
            parameter.step = _as_number(states, file, value)
            continue
        stored = value.get("param") if isinstance(value, dict) else value
        if not isinstance(stored, StoredTensor):
            raise CorruptCheckpointError(f"{states.path(file)} is no file of a universal checkpoint: it has no tensor")
        kind = MASTER if file_name == _MASTER else file_name.removesuffix(".pt")
        if file_name != _MASTER:
            check_state_name(kind, states.path(file))
        parameter.tensors.append(_tensor(states, file, name, kind, stored, shape))
    for tensor in parameter.tensors:
        if tensor.shape != parameter.tensors[0].shape:
            raise CorruptCheckpointError(
                f"{states.folder.path(place)} holds tensors of two shapes: {tensor.kind} has {list(tensor.shape)}, "
                f"{_MASTER} has {list(parameter.tensors[0].shape)}"
            )
    return parameter


def _tensor(
    states: StateFiles, file: TorchFile, name: str, kind: str, stored: StoredTensor, shape: Shape | None
) -> Tensor:
    """Return one tensor of a parameter; ZeRO-3's files are flat, and files lack the padding of a vocabulary."""
    tensor = whole_tensor(states, file, name, kind, stored)
    if shape is None or tensor.shape == shape:
        return tensor
    if tensor.strides is None and len(tensor.shape) == 1 and tensor.elements == math.prod(shape):
        return replace(tensor, shape=shape)
    if len(tensor.shape) == len(shape) and tensor.shape[1:] == shape[1:] and tensor.shape[0] < shape[0]:
        info = states.module.get("universal_checkpoint_info")
        if isinstance(info, dict) and info.get("original_vocab_size") == tensor.shape[0]:
            return tensor
    raise CorruptCheckpointError(
        f"{states.path(file)} is of another checkpoint: it has the shape {list(tensor.shape)}, "
        f"{states.modules[0].file.name} says {list(shape)}"
    )


def _not_trained(
    files: Mapping[int, StateFiles], shapes: Mapping[str, Shape], degree: int, tp_split: Sequence[Rule], config: object
) -> ModelRank:
    ranks = [read_model_rank(states, trained=shapes) for states in files.values()]
    stages = [ranks[at : at + degree] for at in range(0, len(ranks), degree)]
    joined = [join_tensor_parallel(stage, tp_split, config) if degree > 1 else stage[0] for stage in stages]
    whole = joined[0]
    for stage in joined[1:]:
        whole.tensors += stage.tensors
        whole.files += stage.files
        whole.notes += stage.notes
        whole.aliases |= stage.aliases
        whole.frozen += stage.frozen
    if len(stages) > 1:
        buffers = sorted({name for states in files.values() for name in states.buffer_names})
        whole.notes.append(
            "DeepSpeed's converter does not copy the buffers and frozen parameters of a pipeline's layers"
            + (f": {shortened(buffers, MAX_NAMED)}" if buffers else "")
        )
    return whole


def _optimizer(
    first: StateFiles, files: Iterable[StateFiles], parameters: Mapping[str, _Parameter]
) -> tuple[Optimizer | None, TorchFile | None]:
    name = UNIVERSAL_OPTIMIZER_FILE
    if not first.folder.exists(name):
        first.notes.append(f"{name} is missing: the hyper-parameters of the optimizer are unknown")
        return None, None
    file = open_torch_file(first.folder, name)
    content = file.content if isinstance(file.content, dict) else {}
    rows = [row for row in content.get("param_groups") or () if isinstance(row, dict)]
    groups, steps = [], {n: p.step for n, p in parameters.items() if p.step is not None}
    inner = content.get("optimizer_state_dict")  # ZeRO-3: the first rank's whole file
    states = inner.get("state") if isinstance(inner, dict) else None
    members = _members(files)
    for number, row in enumerate(rows):
        options, flats = group_options(first, file, row)
        names = tuple(n for flat in flats or [number] for n in members.get(flat, ()))
        groups.append(ParamGroup(names=names, options=options))
        step = row.get("step")
        if step is None and isinstance(states, dict) and flats:
            step = (states.get(flats[0]) or {}).get("step")
        if step is not None:
            steps |= {n: _as_number(first, file, step) for n in names if n not in steps}
    scalars = {"step": steps} if steps else {}
    return Optimizer(class_name=first.optimizer_class(), groups=tuple(groups), scalars=scalars), file


def _members(files: Iterable[StateFiles]) -> dict[int, list[str]]:
    members: dict[int, list[str]] = {}
    for states in files:
        for number, group in enumerate(states.param_shapes() or ()):
            row = members.setdefault(number, [])
            row.extend(name for name in group if name not in row)
    return members


def _as_number(states: StateFiles, file: TorchFile, value: Any) -> float:
    if isinstance(value, StoredTensor) and not value.shape:
        return number_of(states, file, value, "step")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise CorruptCheckpointError(f"{states.path(file)} holds no number of steps")
