"""The calls by which users subscribe to a model, wrapped or not, and show subscribers tensors of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module

from ort_zero.compat.torch_modules import inside_of_compiled
from ort_zero.statistics.collect import subscribed_model
from ort_zero.statistics.collect.subscribed_model import SubscribedModel
from ort_zero.statistics.collect.subscriber_base import SubscriberBase
from ort_zero.zero3_hooks.hook_manager import is_paused

_zero_stages: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
inspect_in_trace: list[Callable[[str, torch.Tensor], torch.Tensor]] = []
"""What :func:`inspect_activation` does while a graph is traced; :mod:`.reader_marks` puts a function here."""


class GlobalSubscriberManager:
    """Subscribes to the modules of a whole model, wrapped or not."""

    @staticmethod
    def subscribe(model: Module, subscribers: Iterable[SubscriberBase]) -> SubscribedModel:
        """Have `subscribers` act in every step of `model` from now on. Every rank that wants to be seen must call.

        Args:
            model: a module, an ORTModule, DistributedDataParallel or DeepSpeed engine around one; the module inside is
                meant. A second call adds to the first.
            subscribers: what acts; each for one model.

        Returns:
            The model with its subscribers; :meth:`SubscribedModel.remove` removes all of them again.
        """
        return subscribed_model.subscribe(unwrapped(model), tuple(subscribers))


def unwrapped(model: Any) -> Module:
    """Return the user's own module inside the wrappers of ORTModule, DDP, DeepSpeed and ``torch.compile``."""
    while True:
        kind = {base.__name__ for base in type(model).__mro__}
        if kind & {"ORTModule", "DistributedDataParallel", "DeepSpeedEngine", "DataParallel"}:
            model = model.module
        elif "OptimizedModule" in kind:
            model = inside_of_compiled(model)
        else:
            return model


def remember_zero_stage(model: Module, stage: int) -> None:
    """Remember the ZeRO stage of the engine around a model, for those who subscribe to the model alone."""
    _zero_stages[unwrapped(model)] = stage


def zero_stage_of(root: Module) -> int:
    """Return the ZeRO stage under which a user's module trains; 0 without DeepSpeed."""
    return _zero_stages.get(root, 0)


def inspect_activation(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Show subscribers a tensor within a ``forward``; use the returned one from there on, it is the same.

    Args:
        name: what it is called in the records, the same in every run that is to be compared.
        tensor: any tensor; its gradient is shown too if it has one.
    """
    if inspect_in_trace:
        return inspect_in_trace[-1](name, tensor)
    if is_paused() or not subscribed_model.running:
        return tensor
    return subscribed_model.running[-1].inspect(name, tensor)
