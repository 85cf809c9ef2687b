"""Check that an engine can continue with the optimizer state and the scheduler state of a checkpoint."""

from __future__ import annotations

import re
from typing import Any

from ort_zero import log
from ort_zero.checkpoint.reads.training_state import TrainingState
from ort_zero.checkpoint.records import Source
from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.compat.optimizer_states import OptimizerStates, states_after_a_step
from ort_zero.errors import CheckpointError

_STEP = "step"
_VARIANT = re.compile(r"^(mu(?=adam|sgd))?(deepspeed)?(cpu|fused|torch)?")
"""Matches a prefix of a class name in lower case that tells implementations of one optimizer apart."""


def refuse_other_optimizer(state: EngineState, source: Source, saved: TrainingState) -> None:
    """Raise if the engine's optimizer has other states than the checkpoint's; warn if only the class differs.

    Args:
        state: state of the engine.
        source: the checkpoint.
        saved: training state of the checkpoint, with checked counters.

    Raises:
        CheckpointError: the checkpoint's optimizer has other states than the engine's.
    """
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
        lacking = live.numbers - numbers - stored - {_STEP}  # states of a parameter with one element count as numbers
        # a state that other groups get at their first step, such as Muon's moments, is not live yet
        misfits = live.elementwise - stored if _has_groups_without_state(state) else live.elementwise ^ stored
        if misfits or lacking:
            raise CheckpointError(
                f"{source.root} holds the optimizer states {sorted(stored | numbers)} of "
                f"{source.optimizer.class_name}, the engine's {engine_class} has "
                f"{sorted(live.elementwise | live.numbers)}; use the same optimizer, or {way_out}"
            )
    if _is_other_optimizer(source.optimizer.class_name, engine_class):
        log.get_logger().warning(
            "%s was saved with the optimizer %s, whose states %s continues with",
            source.root,
            source.optimizer.class_name,
            engine_class,
        )


def _has_groups_without_state(state: EngineState) -> bool:
    """Return True if the optimizer has states of some flat buffers, and none yet of others."""
    return len({bool(state.existing_state_of(flat)) for flat in state.flats() if flat.spans}) > 1


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
    """Raise if the engine's scheduler cannot load the saved scheduler state; warn if the classes differ.

    Args:
        state: state of the engine.
        saved: training state of the checkpoint.
        root: folder or URL of the checkpoint, for messages.

    Raises:
        CheckpointError: the classes differ, and their states have different keys.
    """
    scheduler, stored = state.engine.lr_scheduler, saved.lr_scheduler
    stored_class = saved.lr_scheduler_class
    if not hasattr(scheduler, "load_state_dict"):
        if stored is not None:
            log.get_logger().warning(
                "%s holds the state of %s, and the engine has no scheduler of the learning rate: the state is left out",
                root,
                stored_class or "a scheduler",
            )
        return
    name = type(scheduler).__name__
    if stored is None:
        log.get_logger().warning("%s holds no state of a scheduler: the engine's %s starts anew", root, name)
        return
    if stored_class is None or stored_class == name:
        return
    if stored.keys() != _keys(scheduler):
        raise CheckpointError(
            f"{root} holds the state of the scheduler {stored_class}, the engine has a {name}; use the same, or "
            "load_lr_scheduler_states=False to start it anew"
        )
    log.get_logger().warning(
        "%s was saved with the scheduler %s, whose state %s continues with", root, stored_class, name
    )


def _keys(scheduler: Any) -> set[str]:
    return set(scheduler.state_dict())
