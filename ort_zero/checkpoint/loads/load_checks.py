"""Check that a checkpoint fits an engine, and choose the numbers and hyper-parameters of its optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_zero import log
from ort_zero.checkpoint.format.values import decode_in_json
from ort_zero.checkpoint.reads.shard_checks import MAX_STEPS
from ort_zero.checkpoint.records import Source
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_MAX_NAMED = 5
"""Maximum number of names that a message lists."""
_EXTRA_STATE = "_extra_state"


def refuse_misfit(state: EngineState, source: Source, strict: bool, full: bool = False) -> None:
    """Raise if names or shapes of tensors differ between the engine and the checkpoint; `full` loads optimizer states.

    Raises:
        CheckpointError: names the first missing, unexpected and differing tensors.
    """
    stored = source.weights()
    names = {**{n: state.shape(n) for n in state.parameters}, **{n: tuple(b.shape) for n, b in state.buffers()}}
    resolved = {name: source.aliases.get(name, name) for name in names}
    optimized = state.optimized()
    missing = [n for n in names if resolved[n] not in stored and (n in optimized or n not in state.parameters)]
    stored_names = set(resolved.values())
    unexpected = [n for n in stored if n not in stored_names and n.rpartition(".")[2] != _EXTRA_STATE]
    wrong = [
        f"{n}: {list(stored[resolved[n]].shape)} stored, {list(shape)} in the model"
        for n, shape in names.items()
        if resolved[n] in stored and stored[resolved[n]].shape != shape
    ]
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {shortened(missing, _MAX_NAMED)}")
    if unexpected and strict:
        problems.append(f"the model lacks {shortened(unexpected, _MAX_NAMED)} (load_module_strict=False ignores them)")
    if wrong:
        problems.append(f"shapes differ: {shortened(wrong, _MAX_NAMED)}")
    if problems:
        raise CheckpointError(f"{source.root} does not fit the model: {'; '.join(problems)}")
    _warn_of_differences(state, source, resolved, full)


def _warn_of_differences(state: EngineState, source: Source, resolved: dict[str, str], full: bool) -> None:
    """Warn of tensors that stay as they are, lose their tie, or lose their optimizer state.

    Args:
        state: state of the engine.
        source: the checkpoint.
        resolved: stored name of each parameter and buffer by its name in the model.
        full: True if optimizer states are loaded.
    """
    stored, trained = source.weights(), state.optimized()
    moments = {tensor.name for tensor in source.tensors if tensor.is_optimizer_state} if full else set()
    warnings = {
        "%s lacks %s, which the optimizer does not train: they stay as they are": [
            name for name, stored_name in resolved.items() if stored_name not in stored
        ],
        "%s holds one tensor for %s, which the model does not tie: both get its values and are trained apart": [
            f"{name} and {other}" for name, other in resolved.items() if name != other and other in state.parameters
        ],
        "%s was saved while %s was not trained: its optimizer state starts empty": [
            name for name in resolved if name in trained and resolved[name] in source.frozen
        ],
        "%s was saved while %s was trained: its optimizer state is left out, and the next save lacks it": [
            name for name in state.parameters if name not in trained and resolved[name] in moments
        ],
    }
    for text, names in warnings.items():
        if names:
            log.get_logger().warning(text, source.root, shortened(names, _MAX_NAMED))


# -- numbers and hyper-parameters -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The numbers and hyper-parameters for the engine's optimizer, chosen before the engine changes."""

    numbers: list[dict[str, float]] = field(default_factory=list)
    """Numbers by key, such as ``step``, of each flat buffer of the engine."""
    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters by the index of the parameter group."""


def optimizer_settings(state: EngineState, source: Source, full: bool) -> OptimizerSettings:
    """Return the optimizer's numbers and hyper-parameters in a checkpoint.

    Args:
        state: state of the engine.
        source: the checkpoint.
        full: False for empty settings, which change nothing.

    Raises:
        CheckpointError: a number differs between parameters that share a flat buffer.
        CorruptCheckpointError: a number or hyper-parameter has a value that no optimizer can have.
    """
    optimizer = source.optimizer
    settings = OptimizerSettings()
    if not full or optimizer is None or state.base_optimizer() is None:
        return settings
    groups = [[source.aliases.get(name, name) for name in names] for names in state.group_names()]
    stored_names = {tensor.name for tensor in source.tensors if tensor.is_optimizer_state}
    stored_names.update(*optimizer.scalars.values())
    for flat in state.flats():
        numbers = {}
        parameter = state.name_of_key(flat)
        names = [source.aliases.get(n, n) for n in ([parameter] if parameter else (s.name for s in flat.spans))]
        for key, by_name in optimizer.scalars.items():
            values = {by_name[name] for name in names if name in by_name}
            if not values and not parameter:  # a buffer of padding alone, or a group that is new since the save
                values = {by_name[name] for name in groups[flat.group] if name in by_name}
                if not values and stored_names.isdisjoint(groups[flat.group]):
                    values = set(by_name.values())  # as if the group had made the steps of the others
            if len(values) > 1:
                raise CheckpointError(
                    f"{key} differs between the parameters of one group ({sorted(values)[:3]}): they cannot share a "
                    "flat buffer; load with load_optimizer_states=False"
                )
            for value in values:
                if not abs(value) < MAX_STEPS:
                    raise CorruptCheckpointError(f"{source.root}: {key} of the optimizer cannot be {value}")
                numbers[key] = value
        settings.numbers.append(numbers)
    stored = [(set(group.names), group.options) for group in optimizer.groups]
    for index, (names, live) in enumerate(zip(groups, state.group_options(), strict=True)):
        match = next((options for group, options in stored if group == set(names)), None)
        if match is None:
            log.get_logger().warning(
                "the checkpoint has no group of the parameters of group %d, whose hyper-parameters stay as configured",
                index,
            )
            continue
        for key, value in match.items():
            if _is_number_of_an_optimizer(live.get(key)) and not (_is_number(value) and math.isfinite(value)):
                raise CorruptCheckpointError(f"{source.root}: {key} of parameter group {index} cannot be {value!r}")
        settings.options[index] = {key: decode_in_json(value) for key, value in match.items()}
    return settings


def _is_number_of_an_optimizer(value: Any) -> bool:
    return _is_number(value) or (torch.is_tensor(value) and value.numel() == 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def restore_numbers(state: EngineState, settings: OptimizerSettings) -> None:
    """Set the numbers per parameter (``step``) in the optimizer's state."""
    kinds = type(state.base_optimizer()).__mro__
    as_tensor = any(kind.__module__.startswith("torch.") and kind is not torch.optim.Optimizer for kind in kinds)
    for flat, numbers in zip(state.flats(), settings.numbers):
        live = state.state_of(flat)
        for key, value in numbers.items():
            _set_number(live, key, value, as_tensor)


def _set_number(live: dict[str, Any], key: str, value: float, as_tensor: bool) -> None:
    """Set a number in the optimizer's state in the form that the optimizer uses: tensor, int or float."""
    old = live.get(key)
    if torch.is_tensor(old):
        old.fill_(value)
    elif old is None and as_tensor:
        live[key] = torch.tensor(value, dtype=torch.float32)
    else:
        live[key] = int(value) if float(value).is_integer() else value
