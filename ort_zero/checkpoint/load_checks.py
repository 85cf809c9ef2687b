"""Decides whether a checkpoint fits an engine, and which numbers and hyper-parameters its optimizer gets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_zero import log
from ort_zero.checkpoint.records import Source
from ort_zero.checkpoint.shard_checks import MOST_STEPS
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_MOST_NAMED = 5
"""Maximum number of names that a message lists."""
_EXTRA_STATE = "_extra_state"


def refuse_misfit(state: EngineState, source: Source, strict: bool) -> None:
    """Raise if names or shapes differ.

    Raises:
        CheckpointError: lists the first of each.
    """
    stored = source.weights()
    names = {**{n: state.shape(n) for n in state.parameters}, **{n: tuple(b.shape) for n, b in state.buffers()}}
    resolved = {name: source.aliases.get(name, name) for name in names}
    optimized = state.optimized()
    missing = [n for n in names if resolved[n] not in stored and (n in optimized or n not in state.parameters)]
    known = set(resolved.values())
    unexpected = [n for n in stored if n not in known and n.rpartition(".")[2] != _EXTRA_STATE]
    wrong = [
        f"{n}: {list(stored[resolved[n]].shape)} stored, {list(shape)} in the model"
        for n, shape in names.items()
        if resolved[n] in stored and stored[resolved[n]].shape != shape
    ]
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {shortened(missing, _MOST_NAMED)}")
    if unexpected and strict:
        problems.append(f"the model lacks {shortened(unexpected, _MOST_NAMED)} (load_module_strict=False ignores them)")
    if wrong:
        problems.append(f"shapes differ: {shortened(wrong, _MOST_NAMED)}")
    if problems:
        raise CheckpointError(f"{source.root} does not fit the model: {'; '.join(problems)}")


def refuse_other_optimizer(state: EngineState, source: Source) -> None:
    """Raise CheckpointError if the checkpoint's optimizer has other states than the engine's."""
    stored = {t.kind for t in source.tensors if t.is_optimizer_state}
    if not stored and source.optimizer is not None and not source.step:
        return  # saved before the first step, which makes the states
    if not stored and state.base_optimizer() is not None:
        raise CheckpointError(
            f"{source.root} holds no optimizer state; load it with load_optimizer_states=False to take the weights only"
        )
    for flat in state.flats():
        kinds = set(state.elementwise(flat))
        if kinds and kinds != stored:
            raise CheckpointError(
                f"{source.root} holds the optimizer states {sorted(stored)} of {_class_name(source)}, "
                f"the engine's {type(state.base_optimizer()).__name__} has {sorted(kinds)}; "
                "use the same optimizer, or load_optimizer_states=False"
            )


def _class_name(source: Source) -> str | None:
    return None if source.optimizer is None else source.optimizer.class_name


# -- numbers and hyper-parameters -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The numbers and hyper-parameters that the engine's optimizer gets; decided before anything is changed."""

    numbers: list[dict[str, float]] = field(default_factory=list)
    """One value by key, such as ``step``, for each of the engine's flat buffers."""
    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters by the index of the parameter group."""


def optimizer_settings(state: EngineState, source: Source, full: bool) -> OptimizerSettings:
    """Return what a checkpoint says of the optimizer besides its tensors.

    Args:
        state: state of the engine.
        source: the checkpoint.
        full: False for settings that change nothing.

    Raises:
        CheckpointError: a number differs between parameters that share a flat buffer.
        CorruptCheckpointError: a number or hyper-parameter that no optimizer can have.
    """
    optimizer = source.optimizer
    settings = OptimizerSettings()
    if not full or optimizer is None or state.base_optimizer() is None:
        return settings
    for flat in state.flats():
        numbers = {}
        for key, by_name in optimizer.scalars.items():
            found = {by_name[n] for n in (source.aliases.get(s.name, s.name) for s in flat.spans) if n in by_name}
            if not found:
                found = set(by_name.values())  # a rank whose buffer is all padding steps along with the others
            if len(found) > 1:
                raise CheckpointError(
                    f"{key} differs between the parameters of one group ({sorted(found)[:3]}): they cannot share a "
                    "flat buffer; load with load_optimizer_states=False"
                )
            for value in found:
                if not abs(value) < MOST_STEPS:
                    raise CorruptCheckpointError(f"{source.root}: {key} of the optimizer cannot be {value}")
                numbers[key] = value
        settings.numbers.append(numbers)
    stored = [(set(group.names), group.options) for group in optimizer.groups]
    for index, (names, live) in enumerate(zip(state.group_names(), state.group_options(), strict=True)):
        wanted = {source.aliases.get(name, name) for name in names}
        match = next((options for group, options in stored if group == wanted), None)
        if match is None:
            log.get_logger().warning(
                "parameter group %d is not one of the checkpoint's; its hyper-parameters stay as configured", index
            )
            continue
        for key, value in match.items():
            if _is_number(live.get(key)) and not (_is_number(value) and math.isfinite(value)):
                raise CorruptCheckpointError(f"{source.root}: {key} of parameter group {index} cannot be {value!r}")
        settings.options[index] = dict(match)
    return settings


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def restore_numbers(state: EngineState, settings: OptimizerSettings) -> None:
    """Put the numbers per parameter (``step``) into the optimizer's state."""
    as_tensor = type(state.base_optimizer()).__module__.startswith("torch.")
    for flat, numbers in zip(state.flats(), settings.numbers):
        live = state.state_of(flat)
        for key, value in numbers.items():
            _set_number(live, key, value, as_tensor)


def _set_number(live: dict[str, Any], key: str, value: float, as_tensor: bool) -> None:
    """Set a number of the optimizer's state in the form that the optimizer keeps it."""
    old = live.get(key)
    if torch.is_tensor(old):
        old.fill_(value)
    elif old is None and as_tensor:
        live[key] = torch.tensor(value, dtype=torch.float32)
    else:
        live[key] = int(value) if float(value).is_integer() else value
