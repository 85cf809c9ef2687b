"""Write a conversion as DeepSpeed's universal checkpoint: one file per whole parameter and per whole optimizer state.

A universal checkpoint suits every world size and ZeRO stage, so the module's file is written in both of its forms.
"""

from __future__ import annotations

from typing import Any

import torch

from ort_zero.checkpoint.conversions import convert_deepspeed
from ort_zero.checkpoint.conversions.conversion import Conversion
from ort_zero.checkpoint.files.allowed_names import is_plain_name
from ort_zero.checkpoint.files.dtypes import torch_dtype
from ort_zero.checkpoint.reads.checked_reads import ReadRequest
from ort_zero.compat import deepspeed_files
from ort_zero.errors import CheckpointError

_FOLDER = "zero"
_MASTER, _STEP = "fp32", "step"
_INTEGER_STEPS = ("Fused", "DeepSpeed", "OnebitAdam", "ZeroOneAdam")
"""Prefixes of the class names of optimizers that store the step as a Python int; torch's optimizers store a tensor."""


def check(work: Conversion) -> None:
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


def write_share(work: Conversion, rank: int, ranks: int) -> None:
    """Write the files of the parameters that belong to `rank` of `ranks` ranks, one parameter at a time in memory."""
    for number, names in enumerate(work.groups()):
        for index, name in enumerate(names):
            if (number + index) % ranks == rank:
                _write_parameter(work, name, names)


def write_rest(work: Conversion) -> None:
    """Write the files that all parameters share: the optimizer's groups and the module's files."""
    version = deepspeed_files.require_deepspeed()
    saved = work.training_state(0)
    groups = convert_deepspeed.param_groups(work, [[index] for index in range(len(work.groups()))])
    state = {index: _step(work, names) for index, names in enumerate(work.groups())}
    content: dict[str, Any] = {
        **convert_deepspeed.scale_of(work, saved),
        "zero_stage": deepspeed_files.stage_number(work.new.zero_stage),
        "partition_count": [work.new.world_size] * len(groups),
        "ds_version": version,
        "param_groups": groups,
        "optimizer_state_dict": {"state": state, "param_groups": groups},
    }
    work.save(work.target.child(_FOLDER), "optimizer_state.pt", content, f"{_FOLDER}/optimizer_state.pt")
    flats = convert_deepspeed.flat_groups(work, 0)
    convert_deepspeed.save_module(work, 0, flats, saved, by_rank=False)
    convert_deepspeed.save_module(work, 0, flats, saved, by_rank=True)


def _write_parameter(work: Conversion, name: str, group: list[str]) -> None:
    work.new_scratch()
    requests: list[ReadRequest] = []
    master = work.masters[name]
    content: dict[str, Any] = {_MASTER: {"param": work.whole(master, torch.float32, requests)}}
    for kind, dtype in convert_deepspeed.states_of_group(work, group).items():
        state = work.states[kind].get(name)
        if state is None:
            content[kind] = {"param": work.scratch.tensor(master.elements, dtype).view(master.shape)}
        else:
            content[kind] = {"param": work.whole(state, torch_dtype(state.dtype), requests)}
    work.reader.read(requests)
    content |= _step(work, group)
    folder = work.target.child(f"{_FOLDER}/{name}")
    folder.make()
    for kind, value in content.items():
        work.save(folder, f"{kind}.pt", value, f"{_FOLDER}/{name}/{kind}.pt")


def _step(work: Conversion, names: list[str]) -> dict[str, Any]:
    """Return ``{"step": ...}`` of a group in its optimizer's type; an empty dict before the first step."""
    optimizer = work.source.optimizer
    step = work.numbers(names).get(_STEP)
    if step is None or optimizer is None:
        return {}
    integer = (optimizer.class_name or "").startswith(_INTEGER_STEPS)
    return {_STEP: int(step) if integer else torch.tensor(float(step))}
