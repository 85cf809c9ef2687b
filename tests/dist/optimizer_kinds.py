"""Optimizers whose states differ from Adam's: by group, in number, in when they appear, in what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import schedulefree
import torch


def _with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, dict[str, Any], dict[str, Any]]]:
    """Yield each parameter that has a gradient, with its group and its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, group, optimizer.state[parameter]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023), with one state."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, group, state in _with_gradients(self):
            mean = state.setdefault("exp_avg", torch.zeros_like(p))
            first, second = group["betas"]
            p.add_(torch.sign(mean * first + p.grad * (1 - first)), alpha=-group["lr"])
            mean.lerp_(p.grad, 1 - second)


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020), whose step count is a number."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, group, state in _with_gradients(self):
            state["step"] = state.get("step", 0) + 1
            mean = state.setdefault("exp_avg", torch.zeros_like(p))
            squares = state.setdefault("exp_avg_sq", torch.zeros_like(p))
            first, second = group["betas"]
            mean.lerp_(p.grad, 1 - first)
            squares.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
            unbiased = mean / (1 - first ** state["step"]), squares / (1 - second ** state["step"])
            change = unbiased[0] / (unbiased[1].sqrt() + 1e-6)
            p.sub_(change, alpha=group["lr"] * float(p.norm() / change.norm().clamp(min=1e-6)))


class Peculiar(torch.optim.Optimizer):
    """Has states that are numbers and lists, of other sizes than the parameter, and that appear late."""

    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, group, state in _with_gradients(self):
            state["count"] = state.get("count", 0) + 1
            state["norms"] = [*state.get("norms", []), float(p.grad.norm())][-3:]
            state.setdefault("scale", torch.ones(2)).mul_(0.9)
            if state["count"] > 1:
                state.setdefault("late", torch.zeros_like(p)).add_(p.grad)
            change = p.grad * float(state["scale"].sum()) + state.get("late", 0) * sum(state["norms"])
            p.sub_(change, alpha=group["lr"])


def half_with_momentum(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups, of which the first has momentum."""
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "momentum": 0.9}, {"params": parameters[2:], "momentum": 0.0}]


def schedule_free(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Return schedule-free AdamW (Defazio et al., 2024) in its mode for training."""
    optimizer = schedulefree.AdamWScheduleFree(parameters, warmup_steps=3, **options)
    optimizer.train()
    return optimizer


def deepspeed_cpu_adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """Return DeepSpeed's Adam for CPUs, which DeepSpeed compiles at its first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, **options)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "centered": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "lion": (Lion, {}),
    "lamb": (Lamb, {}),
    "schedule_free": (schedule_free, {}),
    "half_momentum": (torch.optim.SGD, {"groups": half_with_momentum}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
    "nadam": (torch.optim.NAdam, {}),
    "tensor_lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
}
"""The class and the options of :func:`checkpoint_engines.made`, by name."""
BY_DEEPSPEED: dict[str, tuple[Any, dict[str, Any]]] = {"muon": ("Muon", {})}
"""Optimizers that DeepSpeed makes by their name."""
COMPILED: dict[str, tuple[Any, dict[str, Any]]] = {"cpu_adam": (deepspeed_cpu_adam, {})}
"""Optimizers that DeepSpeed compiles at their first use, which takes a minute."""
BY_SHARD = frozenset({"lamb", "adafactor"})
"""Optimizers whose step depends on how ZeRO divides the parameters."""
