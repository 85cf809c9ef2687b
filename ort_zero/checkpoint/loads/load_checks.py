"""Check that a checkpoint fits an engine: names and shapes, the optimizer's states and numbers, the scheduler."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_zero import log
from ort_zero.checkpoint.format.values import decode_in_json
from ort_zero.checkpoint.reads.training_state import MAX_STEPS, TrainingState
from ort_zero.checkpoint.records import Source, is_extra_state
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.compat.optimizer_states import OptimizerStates, states_after_a_step
from ort_zero.errors import CheckpointError, CorruptCheckpointError
from ort_zero.utils.text import shortened

_MAX_NAMED = 5
"""Maximum number of names that a message lists."""
_VARIANT = re.compile(r"^(mu(?=adam|sgd))?(deepspeed)?(cpu|fused|torch)?")
"""Matches a prefix of a class name in lower case that tells implementations of one optimizer apart."""


def refuse_misfit(state: EngineState, source: Source, strict: bool, full: bool = False) -> None:
    """Raise if names or shapes of tensors differ; warn of differences; `full` means with the optimizer's states."""
    stored = source.weights()
    names = {**{n: state.shape(n) for n in state.parameters}, **{n: tuple(b.shape) for n, b in state.buffers()}}
    resolved = {name: source.aliases.get(name, name) for name in names}
    optimized = state.optimized()
    missing = [n for n in names if resolved[n] not in stored and (n in optimized or n not in state.parameters)]
    stored_names = set(resolved.values())
    unexpected = [n for n in stored if n not in stored_names and not is_extra_state(n)]
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
    """Warn of tensors that stay as they are, lose their tie, or lose their optimizer state."""
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


def refuse_other_optimizer(state: EngineState, source: Source, saved: TrainingState) -> None:
    """Raise if the engine's optimizer has other states than the checkpoint's; warn if only the class differs."""
    base = state.base_optimizer()
    if base is None:
        return
    engine_class = type(base).__name__
    stored = {t.kind for t in source.tensors if t.is_optimizer_state}
    numbers = set(source.optimizer.scalars) if source.optimizer is not None else set()
    steps = saved.counters.get("global_steps", 0) - saved.counters.get("skipped_steps", 0)
    if source.optimizer is not None and not stored and not steps:
        return  # saved before the first step (skipped steps do not count), so there are no states yet
    live = _live_states(state)
    way_out = "load it with load_optimizer_states=False to take the weights only"
    if source.optimizer is None or (not stored and (live is None or live.elementwise)):
        raise CheckpointError(f"{source.root} holds no optimizer state; {way_out}")
    if live is not None:
        lacking = live.numbers - numbers - stored - {"step"}  # states of a parameter with one element count as numbers
        # a state that other groups get at their first step, such as Muon's moments, is not live yet
        misfits = live.elementwise - stored if _has_groups_without_state(state) else live.elementwise ^ stored
        if misfits or lacking:
            raise CheckpointError(
                f"{source.root} holds the optimizer states {sorted(stored | numbers)} of "
                f"{source.optimizer.class_name}, the engine's {engine_class} has "
                f"{sorted(live.elementwise | live.numbers)}; use the same optimizer, or {way_out}"
            )
    if _is_other_optimizer(source.optimizer.class_name, engine_class):
        text = "%s was saved with the optimizer %s, whose states %s continues with"
        log.get_logger().warning(text, source.root, source.optimizer.class_name, engine_class)


def _has_groups_without_state(state: EngineState) -> bool:
    return len({bool(state.existing_state_of(flat)) for flat in state.flats() if flat.places}) > 1


def _live_states(state: EngineState) -> OptimizerStates | None:
    """Return the states that the engine's optimizer has or will have; None if they cannot be determined."""
    states = OptimizerStates(set(), set())
    for flat in state.flats():
        elementwise = state.elementwise(flat)
        states.elementwise.update(elementwise)
        states.numbers.update(state.existing_state_of(flat).keys() - elementwise.keys())
    if states.elementwise or states.numbers:
        return states
    device = next((flat.key.device for flat in state.flats()), None)
    return None if device is None else states_after_a_step(state.base_optimizer(), device)


def _is_other_optimizer(stored: str | None, name: str) -> bool:
    """Return True if two class names belong to different optimizers, not to implementations of one optimizer."""
    if stored in (None, "unknown"):
        return False

    def plain(text: str) -> str:
        return _VARIANT.sub("", text.lower()).removesuffix("w")

    return plain(str(stored)) != plain(name)


def refuse_other_scheduler(state: EngineState, saved: TrainingState, root: str) -> None:
    """Raise if the engine's scheduler cannot load the saved scheduler state; warn if the classes differ."""
    scheduler, stored = state.engine.lr_scheduler, saved.lr_scheduler
    stored_class = saved.lr_scheduler_class
    if not hasattr(scheduler, "load_state_dict"):
        if stored is not None:
            text = "%s holds the state of %s, which is left out: the engine has no scheduler of the learning rate"
            log.get_logger().warning(text, root, stored_class or "a scheduler")
        return
    name = type(scheduler).__name__
    if stored is None:
        log.get_logger().warning("%s holds no state of a scheduler: the engine's %s starts anew", root, name)
        return
    if stored_class is None or stored_class == name:
        return
    if stored.keys() != scheduler.state_dict().keys():
        raise CheckpointError(
            f"{root} holds the state of the scheduler {stored_class}, the engine has a {name}; use the same, or "
            "load_lr_scheduler_states=False to start it anew"
        )
    text = "%s was saved with the scheduler %s, whose state %s continues with"
    log.get_logger().warning(text, root, stored_class, name)


# -- numbers and hyper-parameters -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The numbers and hyper-parameters for the engine's optimizer, chosen before the engine changes."""

    numbers: list[dict[str, float]] = field(default_factory=list)
    """Numbers by key, such as ``step``, of each flat buffer of the engine."""
    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Hyper-parameters by the index of the parameter group."""


def optimizer_settings(state: EngineState, source: Source, full: bool) -> OptimizerSettings:
    """Return the optimizer's numbers and hyper-parameters in a checkpoint; none without `full`."""
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
        owned = [parameter] if parameter else [place.name for place in flat.places]
        names = [source.aliases.get(name, name) for name in owned]
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
        # torch's optimizers may hold frozen parameters, DeepSpeed's do not
        same = (options for group, options in stored if set(names) in (group, group - source.frozen))
        match = next(same, None)
        if match is None:
            log.get_logger().warning(
                "the checkpoint has no group of the parameters of group %d, whose hyper-parameters stay as configured",
                index,
            )
            continue
        for key, value in match.items():
            old = live.get(key)
            is_number = _is_number(old) or (torch.is_tensor(old) and old.numel() == 1)
            if is_number and not (_is_number(value) and math.isfinite(value)):
                raise CorruptCheckpointError(f"{source.root}: {key} of parameter group {index} cannot be {value!r}")
        settings.options[index] = {key: decode_in_json(value) for key, value in match.items()}
    return settings


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
