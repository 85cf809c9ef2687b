"""Read the state of the optimizer that ZeRO wraps: moments, numbers per parameter, hyper-parameters."""

from __future__ import annotations

import json
from typing import Any

from ort_zero.checkpoint.deepspeed.partitioning import FlatLayout, Flats, flat_tensors, masters_of
from ort_zero.checkpoint.deepspeed.state_files import StateFiles, zero_state
from ort_zero.checkpoint.records import Optimizer, ParamGroup, Tensor, check_state_name
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.checkpoint.torch_file import TorchFile, read_number
from ort_zero.errors import CheckpointError, CorruptCheckpointError

State = dict[str, Any]
"""The optimizer's state of one flat tensor, by name: "exp_avg", "step", ..."""


def read_optimizer(files: StateFiles, layout: FlatLayout) -> tuple[Optimizer, list[Tensor]]:
    """Return the optimizer's numbers and hyper-parameters, and the tensors of its state."""
    inner = [_inner_state(files, file) for file in files.optimizers]
    scalars = [[_scalars(files, file, state) for state in states] for file, (states, _) in zip(files.optimizers, inner)]
    steps = {file: tuple(state.get("step") for state in states) for file, states in zip(files.optimizers, scalars)}
    files.check_same("step", steps)
    engine_steps = float(files.module.get("global_steps", 0) - files.module.get("skipped_steps", 0))
    if {state["step"] for state in scalars[0] if state.get("step")} - {engine_steps}:
        files.notes.append(
            f"the optimizer made other steps than {files.modules[0].file.name} counts ({engine_steps:g}): the files "
            "are of different saves, unless the optimizer was started anew"
        )
    moments = _moments(files, layout, [states for states, _ in inner])
    named: dict[str, dict[str, float]] = {}
    members: dict[int, list[str]] = {}
    for name, number in layout.number_of.items():
        members.setdefault(number, []).append(name)
        for key, value in (scalars[0][number] if number < len(scalars[0]) else {}).items():
            named.setdefault(key, {})[name] = value
    options = [group_options(files, files.optimizers[0], group) for group in inner[0][1]]
    if not options:  # "elastic" checkpoints have none
        files.notes.append("it holds no hyper-parameters of the optimizer")
        options = [({}, [number]) for number in sorted(members)]
    groups = tuple(
        ParamGroup(names=tuple(name for number in numbers for name in members.get(number, ())), options=values)
        for values, numbers in options
    )
    return Optimizer(class_name=files.optimizer_class(), groups=groups, scalars=named), moments


def _inner_state(files: StateFiles, file: TorchFile) -> tuple[list[State], list[dict]]:
    """Return the inner optimizer's state of each flat tensor, and its parameter groups."""
    zero = zero_state(file)
    inner = zero.get("optimizer_state_dict" if files.stage == 3 else "base_optimizer_state")
    if isinstance(inner, list):
        step = zero.get("base_optimizer_state_step")
        return [{**state, **({} if step is None else {"step": step})} for state in inner], []
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        files.notes.append(f"{file.file.name} holds no state of the inner optimizer")
        return [], []
    groups = inner.get("param_groups") or []
    steps = {number: group["step"] for group in groups if "step" in group for number in group.get("params", ())}
    state = inner["state"]
    count = 1 + max((number for number in (*state, *steps) if isinstance(number, int)), default=-1)
    return [{**({"step": steps[n]} if n in steps else {}), **state.get(n, {})} for n in range(count)], groups


def _scalars(files: StateFiles, file: TorchFile, state: State) -> dict[str, float]:
    """Return the values of an optimizer state that are single numbers."""
    values = {}
    for key, value in state.items():
        if isinstance(value, StoredTensor) and not value.shape:
            value = number_of(files, file, value, key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            values[key] = float(value)
    return values


def number_of(files: StateFiles, file: TorchFile, stored: StoredTensor, what: str) -> float:
    """Return the value of a tensor without dimensions."""
    code = files.dtype_code(file, stored, what)
    number = read_number(files.folder, file, stored)
    if number is None:
        raise CheckpointError(f"{files.path(file)}: {what!r} is a number of type {code}, which is not expected")
    return number


def group_options(files: StateFiles, file: TorchFile, group: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the hyper-parameters of a parameter group as JSON values, and the numbers of its flat tensors."""
    values = {}
    for key, value in group.items():
        if key in ("params", "step"):
            continue
        if isinstance(value, StoredTensor) and not value.shape:
            value = number_of(files, file, value, key)
        try:
            values[key] = json.loads(json.dumps(value))
        except TypeError:
            files.notes.append(f"the optimizer's option {key!r} is no plain value and is left out")
    return values, list(group.get("params", ()))


def _moments(files: StateFiles, layout: FlatLayout, states: list[list[State]]) -> list[Tensor]:
    """Return the optimizer states that have one value per element, as tensors; add a note for each other state."""
    kinds = dict.fromkeys(
        key
        for rank_states in states
        for state in rank_states
        for key, value in state.items()
        if isinstance(value, StoredTensor) and value.shape
    )
    masters = [masters_of(files, file) for file in files.optimizers]
    tensors: list[Tensor] = []
    for kind in kinds:
        check_state_name(kind, files.path(files.optimizers[0]))
        flats: list[Flats] = [
            {n: state[kind] for n, state in enumerate(rank_states) if kind in state} for rank_states in states
        ]
        # a state may be padded to the size of a part where the master is not, hence "at least"; one of a part with a
        # single element does not tell
        fits = {
            (rank, n): isinstance(stored, StoredTensor) and len(stored.shape) == 1 and stored.shape[0] >= size
            for rank, flat in enumerate(flats)
            for n, stored in flat.items()
            for size in masters[rank][n].shape
        }
        if all(fits.values()):
            tensors += flat_tensors(files, layout, kind, flats)
        elif any(fits[rank, n] for rank, n in fits if masters[rank][n].shape[0] > 1):
            rank, n = next(place for place, right in fits.items() if not right)
            raise CorruptCheckpointError(
                f"{files.path(files.optimizers[rank])} is damaged: its state {kind!r} has the shape "
                f"{list(getattr(flats[rank][n], 'shape', ()))}, its part of the parameters "
                f"{list(masters[rank][n].shape)}"
            )
        else:
            files.notes.append(f"the optimizer's state {kind!r} has no value per element and is left out")
    return tensors
