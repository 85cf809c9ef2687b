"""Subscribe to a model, wrapped or not, and show tensors inside a ``forward`` to subscribers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch.nn import Module
from torch.utils.weak import WeakIdKeyDictionary

from ort_zero.compat import deepspeed as ds_compat
from ort_zero.compat.torch_modules import inside_of_compiled
from ort_zero.statistics.collect import subscribed_model
from ort_zero.statistics.collect.graph_capture import capture_inspected
from ort_zero.statistics.collect.subscribed_model import SubscribedModel, running
from ort_zero.statistics.collect.subscriber_base import SubscriberBase

_facts: MutableMapping[Module, dict[str, Any]] = WeakIdKeyDictionary()
inspect_in_trace: list[Callable[[str, torch.Tensor], torch.Tensor]] = []
"""The function that :func:`inspect_activation` calls while :mod:`ort_zero.ortmodule.statistics` traces; else empty."""


class GlobalSubscriberManager:
    """The entry point to subscribe to a whole model, wrapped or not."""

    @staticmethod
    def subscribe(model: Module, subscribers: Iterable[SubscriberBase]) -> SubscribedModel:
        """Call `subscribers` in every step of `model` from now on. Each rank whose values are wanted must call.

        Args:
            model: a module, or an ORTModule, DistributedDataParallel or DeepSpeed engine around a module. A second call
                for the same module adds subscribers.
            subscribers: instances of :class:`SubscriberBase`, each for one model only.

        Returns:
            The model with its subscribers; :meth:`SubscribedModel.remove` removes all subscribers.
        """
        root = unwrapped(model)
        kinds = {base.__name__ for base in type(model).__mro__}
        if "DistributedDataParallel" in kinds:
            remember(root, data_parallel=True)
        if "DeepSpeedEngine" in kinds:
            remember(root, ds_config=ds_compat.config_dict(model))
        return subscribed_model.subscribe(root, tuple(subscribers))


def unwrapped(model: Any) -> Module:
    """Return the user's module inside of ORTModule, DistributedDataParallel, DeepSpeed's engine, ``torch.compile``."""
    while True:
        kind = {base.__name__ for base in type(model).__mro__}
        if kind & {"ORTModule", "DistributedDataParallel", "DeepSpeedEngine", "DataParallel"}:
            model = model.module
        elif "OptimizedModule" in kind:
            model = inside_of_compiled(model)
        else:
            return model


def remember(model: Module, **facts: Any) -> None:
    """Remember facts about a model for the manifests of its runs.

    Args:
        model: a module, wrapped or not.
        facts: `zero_stage` of the engine around the model, `data_parallel` if all ranks are replicas, its `ds_config`,
            `backend`.
    """
    _facts.setdefault(unwrapped(model), {}).update(facts)


def remembered(root: Module) -> dict[str, Any]:
    """Return what :func:`remember` was told about a user's module."""
    return _facts.get(root, {})


def inspect_activation(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Show a tensor inside a ``forward`` to subscribers; the code must use the returned tensor from there on.

    Args:
        name: name of the tensor in the records; use the same name in all runs that are compared.
        tensor: any tensor; its gradient is shown too, if backward computes one.
    """
    if inspect_in_trace:
        return inspect_in_trace[-1](name, tensor)
    if torch.compiler.is_dynamo_compiling() and capture_inspected(name, tensor):
        return tensor
    if not running:
        return tensor
    return running[-1].inspect(name, tensor)
