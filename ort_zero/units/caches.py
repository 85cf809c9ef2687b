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
    for module in modules_of(model):
        if getattr(getattr(module, "config", None), "use_cache", False) is True:
            if "use_cache" in inspect.signature(module.forward).parameters:
                replace_forward(module, _WithoutCache())
                return


class _WithoutCache(UnitRunner):
    """Calls a module without its cache in training."""

    def compile(self, unit: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def without_cache(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module.training and torch.is_grad_enabled() and not kwargs.keys() & {"use_cache", "past_key_values"}:
                kwargs["use_cache"] = False
            return function(module, *args, **kwargs)

        return without_cache
