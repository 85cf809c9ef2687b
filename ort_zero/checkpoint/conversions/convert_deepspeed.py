"""Write a conversion in the format of DeepSpeed's ``save_checkpoint``, for ZeRO-1, 2 or 3, or as universal checkpoint.

A universal checkpoint has one file per whole parameter and per whole optimizer state. It suits every world size and
ZeRO stage, so the module's file is written in both of its forms.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch

from ort_zero.checkpoint.conversions.conversion import Conversion
from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.checkpoint.files.dtypes import torch_dtype
from ort_zero.checkpoint.reads.checked_reads import ReadRequest
from ort_zero.checkpoint.reads.training_state import TrainingState
from ort_zero.checkpoint.records import EXTRA_STATE, MAX_NAMED, Tensor, buffer_kind
from ort_zero.compat import deepspeed_files
from ort_zero.compat.deepspeed_partitions import FlatGroup, zero3_groups, zero3_part, zero12_group
from ort_zero.errors import CheckpointError
from ort_zero.utils.text import shortened

_WITHIN_F32 = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes of masters whose values fp32 holds: DeepSpeed's masters are fp32."""


def check(work: Conversion) -> None:
    """Raise CheckpointError for a source that the formats of DeepSpeed cannot store, before a file is written."""
    root = work.source.root
    if not any(work.groups()):
        raise CheckpointError(f"{root} holds no trained parameter, which DeepSpeed's formats need; --to dcp does not")
    wide = [name for name, tensor in work.masters.items() if tensor.dtype not in _WITHIN_F32]
    if wide:
        raise CheckpointError(
            f"{root}: DeepSpeed's masters are fp32, which cannot hold {work.masters[wide[0]].dtype} of "
            f"{shortened(wide, MAX_NAMED)}; --to dcp and --to ort_zero keep every dtype"
        )
    for names in work.groups():
        work.numbers(names)
        kinds = states_of_group(work, names)
        for name in names:
            missing = [kind for kind in kinds if name not in work.states[kind]]
            if missing and len(missing) < len(kinds):  # without any state it had no gradient yet, and gets zeros
                raise CheckpointError(
                    f"{root}: {name} has no {missing[0]}, which other parameters of its group have: DeepSpeed's "
                    "formats store the same states for a whole group; --to dcp and --to ort_zero do not"
                )


def write_rank(work: Conversion, rank: int) -> None:
    version = deepspeed_files.require_deepspeed()
    saved = work.training_state(rank)
    flats = flat_groups(work, rank)
    prefix = "bf16_" if work.dtype == "BF16" else ""
    content = {
        "optimizer_state_dict": _optimizer_state(work, flats, saved, version),
        "ds_config": ds_config(work),
        "ds_version": version,
    }
    work.save(work.target, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", content)
    if work.new.zero_stage == 3 or rank == 0:
        save_module(work, rank, flats, saved, work.new.zero_stage == 3)


def save_module(work: Conversion, rank: int, flats: list[FlatGroup], saved: TrainingState, by_rank: bool) -> None:
    """Write ``*_model_states.pt``: in the form of ZeRO-3, one file per rank, for `by_rank`, else of ZeRO-1 and 2."""
    work.new_scratch()
    content = _module_content(work, rank, flats, saved, by_rank)
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if by_rank else "mp_rank_00_model_states.pt"
    work.save(work.target, name, content)


def flat_groups(work: Conversion, rank: int) -> list[FlatGroup]:
    shapes = {name: tensor.shape for name, tensor in work.masters.items()}
    if work.new.zero_stage == 3:
        return zero3_groups(work.groups(), shapes, rank, work.new.world_size, work.sub_group_size)
    groups = enumerate(work.groups())
    return [zero12_group(number, names, shapes, rank, work.new.world_size) for number, names in groups]


def ds_config(work: Conversion) -> dict[str, Any]:
    """Return the keys of DeepSpeed's configuration that tools read from the files."""
    optimizer = work.source.optimizer
    config: dict[str, Any] = {
        "optimizer": {"type": optimizer.class_name if optimizer else None},
        "zero_optimization": {"stage": work.new.zero_stage},
    }
    key = {"BF16": "bf16", "F16": "fp16"}.get(work.dtype)
    return {**config, key: {"enabled": True}} if key else config


def param_groups(work: Conversion, numbers: list[list[int]]) -> list[dict[str, Any]]:
    """Return the parameter groups of the inner optimizer; `numbers` lists the flat tensors of each group."""
    return [{**work.options(index), "params": group_numbers} for index, group_numbers in enumerate(numbers)]


def scale_of(work: Conversion, saved: TrainingState) -> dict[str, Any]:
    """Return the entries that a ZeRO optimizer saves for its loss scale."""
    same = work.source.dtype in (None, work.dtype)
    scaler = deepspeed_files.loss_scaler(saved.loss_scaler if same else None, work.dtype == "F16")
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": type(scaler).__name__ == "DynamicLossScaler",
        "overflow": False,
    }


def _optimizer_state(work: Conversion, flats: list[FlatGroup], saved: TrainingState, version: str) -> dict[str, Any]:
    requests: list[ReadRequest] = []
    zero3 = work.new.zero_stage == 3
    masters, state = [], {}
    groups = work.groups()
    for number, flat in enumerate(flats):
        masters.append(_flat(work, flat, work.masters, flat.size - flat.padding, torch.float32, requests))
        state[number] = dict[str, Any](work.numbers(groups[flat.group]))
        for kind, dtype in states_of_group(work, groups[flat.group]).items():
            state[number][kind] = _flat(work, flat, work.states[kind], flat.size, dtype, requests)
    work.reader.read(requests)
    numbers: list[list[int]] = [[] for _ in groups]
    for number, flat in enumerate(flats):
        numbers[flat.group].append(number)
    inner = {"state": state, "param_groups": param_groups(work, numbers)}
    content = {**scale_of(work, saved), "zero_stage": deepspeed_files.stage_number(work.new.zero_stage)}
    if zero3:
        content |= {"partition_count": work.new.world_size, "optimizer_state_dict": inner, "fp32_flat_groups": masters}
        return content
    slices = [OrderedDict((p.name, deepspeed_files.fragment(p.offset, p.length)) for p in f.places) for f in flats]
    return content | {
        "base_optimizer_state": inner,
        "single_partition_of_fp32_groups": masters,
        "group_paddings": [flat.padding for flat in flats],
        "partition_count": [work.new.world_size] * len(flats),
        "ds_version": version,
        "param_slice_mappings": slices,
    }


def states_of_group(work: Conversion, names: list[str]) -> dict[str, torch.dtype]:
    """Return the names of a group's optimizer states, with the dtype that holds the values of all its parameters."""
    states = {}
    for kind, by_name in work.states.items():
        dtypes = dict.fromkeys(torch_dtype(by_name[name].dtype) for name in names if name in by_name)
        if dtypes:
            states[kind] = functools.reduce(torch.promote_types, dtypes)
    return states


def _flat(
    work: Conversion,
    flat: FlatGroup,
    by_name: dict[str, Tensor],
    size: int,
    dtype: torch.dtype,
    requests: list[ReadRequest],
) -> torch.Tensor:
    """Return one flat tensor of zeros; append to `requests` the reads that fill it."""
    room = work.scratch.tensor(size, dtype)
    for place in flat.places:
        if place.name in by_name:
            target = room.narrow(0, place.offset, place.length)
            requests.append(ReadRequest(by_name[place.name], target, place.start))
    return room


def _module_content(
    work: Conversion, rank: int, flats: list[FlatGroup], saved: TrainingState, by_rank: bool
) -> dict[str, Any]:
    requests: list[ReadRequest] = []
    dtype = torch_dtype(work.dtype)
    module: dict[str, Any] = OrderedDict()
    fragments: dict[str, torch.Tensor] = OrderedDict()
    buffers = {**work.buffers, **work.source.by_name(buffer_kind(rank))}
    for name, tensor in work.source.weights().items():
        stored_dtype = torch_dtype(tensor.dtype)
        if name in work.buffers:
            module[name] = work.whole(buffers[name], stored_dtype, requests)
        elif name in work.masters:
            weight = work.module.get(name, tensor)
            module[name] = torch.empty(0, dtype=dtype) if by_rank else work.whole(weight, dtype, requests)
        elif name in work.frozen:
            module[name] = torch.empty(0, dtype=stored_dtype) if by_rank else work.whole(tensor, stored_dtype, requests)
            fragments[name] = _partition(work, tensor, rank, requests) if by_rank else module[name]
    work.reader.read(requests)
    for alias, name in work.source.aliases.items():
        if name in module:
            module[alias] = module[name]
    for prefix, value in saved.extra_state.items():
        module[f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE] = value
    with_frozen = by_rank or work.new.zero_stage == 2
    frozen_shapes = OrderedDict((name, torch.Size(work.frozen[name].shape)) for name in fragments)
    content = {
        "module": module,
        "buffer_names": list(work.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(work.masters[n].shape)) for n in flat.names) for flat in flats],
        "frozen_param_shapes": frozen_shapes if with_frozen else None,
        "shared_params": dict(work.source.aliases),
        "frozen_param_fragments": fragments if with_frozen else None,
        "lr_scheduler": saved.lr_scheduler,
        "data_sampler": saved.data_sampler,
        "random_ltd": saved.random_ltd,
        "skipped_steps": saved.counters.get("skipped_steps", 0),
        "global_steps": saved.counters.get("global_steps", 0),
        "dp_world_size": work.new.world_size,
        "mp_world_size": 1,
        "ds_config": ds_config(work),
        "ds_version": deepspeed_files.require_deepspeed(),
    }
    if "global_samples" in saved.counters:  # otherwise DeepSpeed computes the samples from the steps
        content["global_samples"] = saved.counters["global_samples"]
    clashing = sorted(content.keys() & saved.client_state.keys())
    if clashing:
        raise CheckpointError(
            f"{work.source.root}: client_state has the key {clashing[0]!r}, under which DeepSpeed keeps its own value"
        )
    return {**content, **saved.client_state}


def _partition(work: Conversion, tensor: Tensor, rank: int, requests: list[ReadRequest]) -> torch.Tensor:
    """Return memory for a rank's part of a frozen parameter, padded with zeros; append to `requests` the read of it."""
    start, length = zero3_part(tensor.elements, rank, work.new.world_size)
    room = work.scratch.tensor(-(-tensor.elements // work.new.world_size), torch_dtype(tensor.dtype))
    if length:
        requests.append(ReadRequest(tensor, room.narrow(0, 0, length), start))
    return room


_UNIVERSAL = "zero"
_MASTER, _STEP = "fp32", "step"
_INTEGER_STEPS = ("Fused", "DeepSpeed", "OnebitAdam", "ZeroOneAdam")
"""Prefixes of the class names of optimizers that store the step as a Python int; torch's optimizers store a tensor."""


def check_universal(work: Conversion) -> None:
    """Raise CheckpointError for names that cannot name a folder or a file, and for numbers that have no file."""
    for name in work.masters:
        if not is_plain_name(name):
            raise CheckpointError(f"the parameter's name {name!r} cannot be the name of a folder")
    for kind in work.states:
        if not is_plain_name(kind) or kind in (_MASTER, _STEP):
            raise CheckpointError(f"the name {kind!r} of an optimizer state cannot be the name of its file")
    numbers = work.source.optimizer.scalars.keys() - {_STEP} if work.source.optimizer else ()
    if numbers:
        raise CheckpointError(
            f"{work.source.root}: a universal checkpoint has no place for the optimizer's "
            f"{', '.join(sorted(numbers))}; --to deepspeed has"
        )


def write_universal_share(work: Conversion, rank: int, ranks: int) -> None:
    """Write the files of the parameters that belong to `rank` of `ranks` ranks, one parameter at a time in memory."""
    for number, names in enumerate(work.groups()):
        for index, name in enumerate(names):
            if (number + index) % ranks == rank:
                _write_parameter(work, name, names)


def write_universal_rest(work: Conversion) -> None:
    """Write the files that all parameters share: the optimizer's groups and the module's files."""
    version = deepspeed_files.require_deepspeed()
    saved = work.training_state(0)
    groups = param_groups(work, [[index] for index in range(len(work.groups()))])
    state = {index: _step(work, names) for index, names in enumerate(work.groups())}
    content: dict[str, Any] = {
        **scale_of(work, saved),
        "zero_stage": deepspeed_files.stage_number(work.new.zero_stage),
        "partition_count": [work.new.world_size] * len(groups),
        "ds_version": version,
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }
    work.save(work.target.child(_UNIVERSAL), "optimizer_state.pt", content, f"{_UNIVERSAL}/optimizer_state.pt")
    flats = flat_groups(work, 0)
    save_module(work, 0, flats, saved, by_rank=False)
    save_module(work, 0, flats, saved, by_rank=True)


def _write_parameter(work: Conversion, name: str, group: list[str]) -> None:
    work.new_scratch()
    requests: list[ReadRequest] = []
    master = work.masters[name]
    content: dict[str, Any] = {_MASTER: {"param": work.whole(master, torch.float32, requests)}}
    for kind, dtype in states_of_group(work, group).items():
        state = work.states[kind].get(name)
        if state is None:
            content[kind] = {"param": work.scratch.tensor(master.elements, dtype).view(master.shape)}
        else:
            content[kind] = {"param": work.whole(state, torch_dtype(state.dtype), requests)}
    work.reader.read(requests)
    content |= _step(work, group)
    folder = work.target.child(f"{_UNIVERSAL}/{name}")
    folder.make()
    for kind, value in content.items():
        work.save(folder, f"{kind}.pt", value, f"{_UNIVERSAL}/{name}/{kind}.pt")


def _step(work: Conversion, names: list[str]) -> dict[str, Any]:
    """Return ``{"step": ...}`` of a group in its optimizer's type; an empty dict before the first step."""
    optimizer = work.source.optimizer
    step = work.numbers(names).get(_STEP)
    if step is None or optimizer is None:
        return {}
    integer = (optimizer.class_name or "").startswith(_INTEGER_STEPS)
    return {_STEP: int(step) if integer else torch.tensor(float(step))}
