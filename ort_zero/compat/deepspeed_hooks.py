"""Bind DeepSpeed's own ZeRO-3 hook functions to new closures, without a copy of their code.

DeepSpeed nests its hooks in the method that registers them, so no import reaches them. Their code objects are constants
of that method, and work with new closures. What else the method does, :func:`number_modules` and
:mod:`ort_zero.plugin.zero3_hooks` do instead; :mod:`~ort_zero.compat.deepspeed_hook_shapes` checks that it is all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from ort_zero.compat.deepspeed_hook_shapes import MODULE, HookShape, probe

OFFLOAD = f"{MODULE}:DeepSpeedZeRoOffload"
BEFORE_BACKWARD, AFTER_BACKWARD = "pre_bwd_fn", "post_bwd_fn"
"""Attributes of a module through whose ``apply`` DeepSpeed's hooks pass each output, and each input."""


def rebind(offload: Any) -> dict[str, Callable[..., Any]]:
    """Return DeepSpeed's hook functions, by their names, bound to `offload`, whether or not its class is patched.

    Raises:
        PatchError: the shape is unknown.
    """
    cls = type(offload)
    register = _bind(probe(_original(cls._register_deepspeed_module)), offload)
    return register | _bind(probe(_original(cls.setup_zero_stage3_hooks)), offload)


def number_modules(module: Any, count: list[int]) -> None:
    """Give `module` and all below it numbers and marks as ``_register_deepspeed_module``; `count` has the last number.

    Depth first, parent before child, and not within a leaf module.
    """
    from deepspeed.utils import z3_leaf_module

    module.ds_id = count[0]
    module.ds_recompute_parameters = set()
    if z3_leaf_module(module):
        for parameter in module.parameters():
            parameter.ds_z3_leaf_module = module
        return
    for child in module.children():
        count[0] += 1
        number_modules(child, count)


def shared_count(registering_function: Callable) -> list[int]:
    """Return the list with which ``_register_deepspeed_module`` counts the ``ds_id`` of the whole process."""
    return _original(registering_function).__defaults__[0]


def count_use(module: Any) -> None:
    """Count one more use of `module` for which a backward may come; DeepSpeed's hooks count down."""
    # __dict__, not hasattr: wrappers that delegate attributes would show the counter of the wrapped module
    if "applied_pre_backward_ref_cnt" not in module.__dict__:
        module.applied_pre_backward_ref_cnt = 0
    module.applied_pre_backward_ref_cnt += 1


def modules_in_forward() -> list[Any]:
    """Return DeepSpeed's stack of modules in forward."""
    return sys.modules[MODULE].FWD_MODULE_STACK


def forget(offload: Any) -> None:
    """Take a destroyed engine's model off what DeepSpeed 0.19 keeps for ever: its stack, and a cache."""
    stack = modules_in_forward()
    stack[:] = [module for module in stack if module is not offload.module]
    coordinator = type(offload.get_param_coordinator())
    pending = [vars(coordinator).get("_PartitionedParameterCoordinator__params_to_release")]
    for function in pending:  # the cache is inside of decorators, of which some set no __wrapped__
        if hasattr(function, "cache_clear"):
            function.cache_clear()
            continue
        pending += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _original(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _bind(shape: HookShape, offload: Any) -> dict[str, Callable]:
    # make all cells before filling them: the functions may refer to each other in any order
    cells = {"self": CellType(offload), **{name: CellType() for name in shape.codes}}
    for name, code in shape.codes.items():
        closure = tuple(cells[free] for free in code.co_freevars)
        function = FunctionType(code, shape.function.__globals__, name, None, closure)
        function.__module__ = shape.function.__module__
        function.__qualname__ = f"{shape.function.__qualname__}.<locals>.{name}"
        cells[name].cell_contents = _decorated(function, shape.wrappers[name])
    return {name: cells[name].cell_contents for name in shape.codes}


def _decorated(function: FunctionType, wrapper: str | None) -> Callable:
    if wrapper == "compile":
        import torch

        return torch.compiler.disable(function)
    if wrapper == "nvtx":
        return function.__globals__["instrument_w_nvtx"](function)
    return function
