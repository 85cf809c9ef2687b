"""Predict the states that an optimizer keeps of a parameter before its first step. Torch 2.13 and DeepSpeed 0.19."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

_DEEPSPEED_STATES = {
    "DeepSpeedCPUAdam": {"exp_avg", "exp_avg_sq"},
    "FusedAdam": {"exp_avg", "exp_avg_sq"},
    "DeepSpeedCPULion": {"exp_avg"},
    "FusedLion": {"exp_avg"},
    "DeepSpeedCPUAdagrad": {"exp_avg_sq"},
    "FusedLamb": {"exp_avg", "exp_avg_sq"},
}
"""States with one value per element that DeepSpeed's own optimizers make in their first step."""
_ELEMENTS = 2
"""Elements of the trial parameter: a state with as many elements has one value per element."""


class OptimizerStates(NamedTuple):
    """The names of the states of a parameter: with one value per element, and with one, such as ``step``."""

    elementwise: set[str]
    numbers: set[str]


def states_after_a_step(optimizer: Any, device: torch.device) -> OptimizerStates | None:
    """Return the states that `optimizer` keeps after a step, without changing it; None for an unknown class.

    For a class of torch, a copy of the optimizer makes a step with one trial parameter for each parameter group.
    """
    kind = type(optimizer)
    if kind.__name__ in _DEEPSPEED_STATES and kind.__module__.startswith("deepspeed."):
        return OptimizerStates(_DEEPSPEED_STATES[kind.__name__], {"step"})
    if not kind.__module__.startswith("torch.optim."):
        return None
    trial = object.__new__(kind)
    vars(trial).update(vars(optimizer))
    trial.state = defaultdict(dict)
    trial.param_groups = []
    for group in optimizer.param_groups:
        parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS, device=device))
        parameter.grad = torch.zeros_like(parameter)
        trial.param_groups.append({**group, "params": [parameter]})
    step = getattr(kind.step, "__wrapped__", kind.step)  # without the hooks of the user
    try:
        step(trial)
    except Exception:  # LBFGS wants a closure, SparseAdam other gradients
        return None
    states = OptimizerStates(set(), set())
    for state in trial.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and value.numel() == _ELEMENTS:
                states.elementwise.add(name)
            elif isinstance(value, (int, float)) or torch.is_tensor(value):
                states.numbers.add(name)
    return states
