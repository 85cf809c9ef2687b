"""Leave out the cache of keys and values in training: Dynamo would compile each layer for the layer's number in it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ort_zero.compat.torch_modules import modules_of
from ort_zero.units.unit_forward import UnitRunner, replace_forward


def leave_out_caches(model: nn.Module) -> None:
    """Have the outermost module with a cache (``config.use_cache``) called without it while it trains.

    A call that says ``use_cache`` itself keeps its choice, and so does every call without gradients, such as those of
    ``generate``. The results of training calls have no ``past_key_values`` then.
    """
    outermost = next(filter(has_cache, modules_of(model)), None)
    if outermost is not None:
        replace_forward(outermost, _WithoutCache())


def has_cache(module: nn.Module) -> bool:
    """Return True for a module that returns a cache of keys and values unless a call says otherwise."""
    uses_cache = getattr(getattr(module, "config", None), "use_cache", False) is True
    return uses_cache and "use_cache" in inspect.signature(module.forward).parameters


@functools.cache
def without_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a module and its arguments that leaves out the cache in training."""

    @functools.wraps(function)
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module.training and torch.is_grad_enabled() and not ("use_cache" in kwargs or "past_key_values" in kwargs):
            kwargs["use_cache"] = False
        return function(module, *args, **kwargs)

    return call


class _WithoutCache(UnitRunner):
    """Calls a module without its cache in training."""

    def form(self, unit: nn.Module, function: Callable[..., Any], runner: Any = None) -> Callable[..., Any]:
        return without_cache(function)
