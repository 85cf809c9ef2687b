"""Which states an optimizer keeps of a parameter, known before its first step. Torch 2.13 and DeepSpeed 0.19."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

_DEEPSPEEDS = {
    "DeepSpeedCPUAdam": {"exp_avg", "exp_avg_sq"},
    "FusedAdam": {"exp_avg", "exp_avg_sq"},
    "DeepSpeedCPULion": {"exp_avg"},
    "FusedLion": {"exp_avg"},
    "DeepSpeedCPUAdagrad": {"exp_avg_sq"},
    "FusedLamb": {"exp_avg", "exp_avg_sq"},
}
"""States with one value per element that DeepSpeed's own optimizers make in their first step."""
_ELEMENTS = 2
"""Elements of the parameter that is tried: a state with as many has one value per element."""


class OptimizerStates(NamedTuple):
    """The states that an optimizer keeps of a parameter."""

    elementwise: set[str]
    """Names of those with one value per element."""
    numbers: set[str]
    """Names of those with one value, such as ``step``."""


def states_after_a_step(optimizer: Any, device: torch.device) -> OptimizerStates | None:
    """Return the states that `optimizer` keeps once it has made a step; it is not changed.

    One of torch's classes makes a step with a parameter of its own for each parameter group, apart from `optimizer`.

    Args:
        optimizer: the optimizer inside of ZeRO's, or the engine's.
        device: device of its parameters.

    Returns:
        The states, or None for a class that is not known: a step of it may do more than change parameters.
    """
    kind = type(optimizer)
    if kind.__name__ in _DEEPSPEEDS and kind.__module__.startswith("deepspeed."):
        return OptimizerStates(_DEEPSPEEDS[kind.__name__], {"step"})
    if not kind.__module__.startswith("torch.optim."):
        return None
    tried = object.__new__(kind)
    vars(tried).update(vars(optimizer))
    tried.state = defaultdict(dict)
    tried.param_groups = [{**group, "params": [_parameter(device)]} for group in optimizer.param_groups]
    step = getattr(kind.step, "__wrapped__", kind.step)  # without the hooks of the user
    try:
        step(tried)
    except Exception:  # LBFGS wants a closure, SparseAdam other gradients
        return None
    found = OptimizerStates(set(), set())
    for state in tried.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and value.numel() == _ELEMENTS:
                found.elementwise.add(name)
            elif isinstance(value, (int, float)) or torch.is_tensor(value):
                found.numbers.add(name)
    return found


def _parameter(device: torch.device) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(_ELEMENTS, device=device))
    parameter.grad = torch.zeros(_ELEMENTS, device=device)
    return parameter
