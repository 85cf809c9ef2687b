"""DeepSpeed's ZeRO-3 hook functions, taken out of the code that defines them.

DeepSpeed defines its hooks as functions nested in ``DeepSpeedZeRoOffload._register_deepspeed_module``, out of reach.
Their code objects are constants of the outer function; bound to new closures they are DeepSpeed's own hooks, without a
copy of them here. What the outer function does around them (numbering modules, registering hooks) has no function of
its own and is done by :func:`number_modules` and :mod:`ort_zero.zero3_hooks`. Hence two checks before anything is
replaced: the nested functions have names, arguments and free variables that can be served, and the code around them
uses no name that is not accounted for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from ort_zero.compat import versions
from ort_zero.errors import PatchError

MODULE = "deepspeed.runtime.zero.parameter_offload"
SETUP_TARGET = f"{MODULE}:DeepSpeedZeRoOffload.setup_zero_stage3_hooks"
DESTROY_TARGET = f"{MODULE}:DeepSpeedZeRoOffload.destroy"
CONVERT_TARGET = f"{MODULE}:DeepSpeedZeRoOffload._convert_to_zero_parameters"
REGISTER_TARGET = f"{MODULE}:DeepSpeedZeRoOffload._register_deepspeed_module"
WORKING = "DeepSpeed 0.19.x"
BEFORE_BACKWARD = "pre_bwd_fn"
"""Attribute of a module through whose ``apply`` DeepSpeed's hook passes each output."""
AFTER_BACKWARD = "post_bwd_fn"
"""Attribute of a module through whose ``apply`` DeepSpeed's hook passes each input."""

_CO_VARARGS, _CO_VARKEYWORDS = 0x04, 0x08


@dataclass(frozen=True, kw_only=True, slots=True)
class _Function:
    """A nested function that gets rebound."""

    arguments: tuple[str, ...]
    """Names of the parameters as the source has them, ``*name`` for the variadic one."""
    wrapper: str | None = None
    """The decorator DeepSpeed puts on it: ``"compile"`` (torch.compiler.disable), ``"nvtx"`` or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expectation:
    functions: Mapping[str, _Function]
    """Nested functions that must be there."""
    classes: Mapping[str, tuple[frozenset[str], frozenset[str]]]
    """Nested autograd Functions that ours replace: by name, the free variables and names that their methods may use."""
    unused: frozenset[str]
    """Nested functions that may be there and that nothing calls."""
    names: frozenset[str]
    """Globals and attributes that the outer function itself may use."""
    arguments: tuple[str, ...]


_METHODS = frozenset({"forward", "setup_context", "backward"})

_REGISTER = _Expectation(
    arguments=("self", "module", "count"),
    functions={
        "_pre_forward_module_hook": _Function(arguments=("module", "*args"), wrapper="compile"),
        "_post_forward_module_hook": _Function(arguments=("module", "input", "output"), wrapper="nvtx"),
        "_bwd_hook_unexpected_inputs_msg": _Function(arguments=("value",)),
        "_pre_backward_module_hook": _Function(arguments=("module", "inputs", "output")),
        "_post_backward_module_hook": _Function(arguments=("module", "inputs"), wrapper="compile"),
        "_run_before_backward_function": _Function(arguments=("sub_module",), wrapper="nvtx"),
        "_run_after_backward_function": _Function(arguments=("sub_module",), wrapper="nvtx"),
    },
    classes={
        "PreBackwardFunctionForModule": (
            frozenset({"module", "_run_before_backward_function"}),
            frozenset("module pre_backward_function __dict__ hasattr applied_pre_backward_ref_cnt detach".split()),
        ),
        "PostBackwardFunctionModule": (
            frozenset({"module", "_run_after_backward_function"}),
            frozenset("module post_backward_function requires_grad ds_grads_remaining detach".split()),
        ),
    },
    unused=frozenset({"_alternate_post_backward_module_hook"}),
    names=frozenset(
        "module get_param_coordinator is_invalid_trace _invalidate_trace ds_id set ds_recompute_parameters "
        "z3_leaf_module parameters ds_z3_leaf_module children _register_deepspeed_module torch compiler disable "
        "instrument_w_nvtx forward_hooks append register_forward_pre_hook register_forward_hook __dict__ hasattr "
        "autograd Function pre_bwd_fn backward_hooks post_bwd_fn".split()
    ),
)

_SETUP = _Expectation(
    arguments=("self",),
    functions={"_start_of_forward_hook": _Function(arguments=("module", "*args"), wrapper="nvtx")},
    classes={},
    unused=frozenset(),
    names=frozenset(
        "hierarchy instrument_w_nvtx module register_forward_pre_hook fwd_pre_hook _register_deepspeed_module "
        "FWD_MODULE_STACK append".split()
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HookShape:
    """The result of a probe: code objects that are safe to rebind."""

    function: FunctionType
    codes: Mapping[str, CodeType]
    """Code of each nested function that gets rebound, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RebindedHooks:
    """DeepSpeed's hook functions, bound to one ``DeepSpeedZeRoOffload``."""

    start_of_forward: Callable[..., None]
    pre_forward: Callable[..., None]
    post_forward: Callable[[Any, Any, Any], None]
    pre_backward: Callable[[Any, Any, Any], Any]
    """Forward hook: passes each output through ``module.pre_bwd_fn.apply``."""
    post_backward: Callable[[Any, Any], Any]
    """Forward pre-hook: passes each input through ``module.post_bwd_fn.apply``."""
    run_before_backward: Callable[[Any], None]
    run_after_backward: Callable[[Any], None]


def probe(registering_function: Callable) -> HookShape:
    """Return the shape of ``_register_deepspeed_module`` if every part of it is known.

    Raises:
        PatchError: names the part that is not, the installed version, and the versions that work.
    """
    return _probe(registering_function, _REGISTER)


def probe_setup(setup_function: Callable) -> HookShape:
    """Return the shape of ``setup_zero_stage3_hooks`` if every part of it is known.

    Raises:
        PatchError: names the part that is not, the installed version, and the versions that work.
    """
    return _probe(setup_function, _SETUP)


def rebind(offload: Any) -> RebindedHooks:
    """Return DeepSpeed's hook functions bound to `offload`, whether or not its class is patched at the moment.

    Raises:
        PatchError: the shape is unknown.
    """
    cls = type(offload)
    register = _bind(probe(_original(cls._register_deepspeed_module)), offload, _REGISTER)
    setup = _bind(probe_setup(_original(cls.setup_zero_stage3_hooks)), offload, _SETUP)
    return RebindedHooks(
        start_of_forward=setup["_start_of_forward_hook"],
        pre_forward=register["_pre_forward_module_hook"],
        post_forward=register["_post_forward_module_hook"],
        pre_backward=register["_pre_backward_module_hook"],
        post_backward=register["_post_backward_module_hook"],
        run_before_backward=register["_run_before_backward_function"],
        run_after_backward=register["_run_after_backward_function"],
    )


def invalidate_trace(offload: Any) -> None:
    """Make DeepSpeed record its fetch trace anew; it does so when the root is registered again."""
    coordinator = offload.get_param_coordinator()
    if coordinator is not None and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def number_modules(module: Any, count: list[int]) -> None:
    """Give `module` and those below their ``ds_id``.

    Numbers and marks are those that ``_register_deepspeed_module`` gives: depth first, parent before child, the inside
    of a leaf module left out, `count` carrying the last number over to the next call.
    """
    module.ds_id = count[0]
    module.ds_recompute_parameters = set()
    if is_leaf(module):
        for parameter in module.parameters():
            parameter.ds_z3_leaf_module = module
        return
    for child in module.children():
        count[0] += 1
        number_modules(child, count)


def is_leaf(module: Any) -> bool:
    """Return True if DeepSpeed treats `module` as one unit, with no hooks inside."""
    from deepspeed.utils import z3_leaf_module

    return z3_leaf_module(module)


def shared_count(registering_function: Callable) -> list[int]:
    """Return the list in which ``_register_deepspeed_module`` keeps the last ``ds_id`` of the whole process."""
    return _original(registering_function).__defaults__[0]


def register_root(offload: Any) -> None:
    """Register hooks on the whole model of `offload`, by whatever implementation its class has at the moment."""
    offload._register_deepspeed_module(offload.module)


def set_root_hook(offload: Any, handle: Any) -> None:
    """Let `offload` begin with a new set of hooks, and remove the hook behind `handle` when it is destroyed."""
    offload.hierarchy = 0
    offload.fwd_pre_hook = handle


def hand_over(offload: Any, forward: Iterable[Any], backward: Iterable[Any]) -> None:
    """Let `offload` remove the hooks behind these handles when it removes its own."""
    offload.forward_hooks.extend(forward)
    offload.backward_hooks.extend(backward)


def count_use(module: Any) -> None:
    """Count one more use of `module` for which a backward may come; DeepSpeed's hooks count down."""
    # In its own __dict__: wrappers that delegate attributes would show the counter of the wrapped module.
    if "applied_pre_backward_ref_cnt" not in module.__dict__:
        module.applied_pre_backward_ref_cnt = 0
    module.applied_pre_backward_ref_cnt += 1


def count_awaited_gradient(module: Any) -> None:
    """Count one more gradient of the inputs of `module` that its backward will have to compute."""
    module.ds_grads_remaining += 1


def gradient_arrived(module: Any) -> bool:
    """Count one gradient of the inputs of `module` as computed; return True if it was the last one awaited."""
    module.ds_grads_remaining = module.ds_grads_remaining - 1
    return module.ds_grads_remaining == 0


def push_root(root: Any) -> None:
    """Put `root` at the bottom of DeepSpeed's stack of modules in forward."""
    sys.modules[MODULE].FWD_MODULE_STACK.append(root)


def pop_root(root: Any) -> None:
    """Take `root` off that stack again; DeepSpeed 0.19 leaves it there and so keeps it alive."""
    stack = sys.modules[MODULE].FWD_MODULE_STACK
    stack[:] = [module for module in stack if module is not root]


def forget_released(offload: Any) -> None:
    """Empty the cache of what to release after which module; DeepSpeed 0.19 never does, and it holds the modules."""
    pending = [vars(type(offload.get_param_coordinator())).get("_PartitionedParameterCoordinator__params_to_release")]
    for function in pending:  # the cache lies below decorators that do not all say what they wrap
        if hasattr(function, "cache_clear"):
            function.cache_clear()
            return
        pending += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _original(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _probe(function: Any, expected: _Expectation) -> HookShape:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    if code is None:
        raise _unknown(name, "it is no Python function")
    if _arguments(code) != expected.arguments:
        raise _unknown(name, f"its arguments are {_joined(_arguments(code))}, not {_joined(expected.arguments)}")
    if "count" in expected.arguments:
        defaults = function.__defaults__
        if not (defaults and len(defaults) == 1 and isinstance(defaults[0], list) and len(defaults[0]) == 1):
            raise _unknown(name, f"the default of its argument count is {defaults!r}, not a list of one number")
    nested = {const.co_name: const for const in code.co_consts if isinstance(const, CodeType)}
    anonymous = {key for key in nested if key.startswith("<")}
    for missing in (key for key in (*expected.functions, *expected.classes) if key not in nested):
        raise _unknown(name, f"nothing named {missing} is nested in it (it has {_joined(nested)})")
    for extra in sorted(set(nested) - set(expected.functions) - set(expected.classes) - expected.unused):
        raise _unknown(name, f"{extra} is nested in it" + (", a comprehension or lambda" if extra in anonymous else ""))
    for extra in sorted(set(code.co_names) - expected.names):
        raise _unknown(name, f"it uses the name {extra}")
    # Only what itself gets rebound can be supplied, and the object that all hooks belong to.
    supplied = {"self", *expected.functions}
    for key, wanted in expected.functions.items():
        if _arguments(nested[key]) != wanted.arguments:
            found = _joined(_arguments(nested[key]))
            raise _unknown(name, f"the arguments of nested {key} are {found}, not {_joined(wanted.arguments)}")
        for free in nested[key].co_freevars:
            if free not in supplied:
                raise _unknown(name, f"nested {key} has the free variable {free}")
    for key, (free_allowed, names_allowed) in expected.classes.items():
        _probe_class(name, key, nested[key], free_allowed, names_allowed)
    return HookShape(function=function, codes={key: nested[key] for key in expected.functions})


def _probe_class(
    outer: str, name: str, code: CodeType, free_allowed: frozenset[str], names_allowed: frozenset[str]
) -> None:
    methods = {const.co_name: const for const in code.co_consts if isinstance(const, CodeType)}
    # setup_context came within 0.19; before, forward itself kept the count.
    if set(methods) not in (_METHODS, _METHODS - {"setup_context"}):
        raise _unknown(outer, f"nested class {name} has the methods {_joined(methods)}")
    for key, method in methods.items():
        for free in sorted(set(method.co_freevars) - free_allowed):
            raise _unknown(outer, f"nested {name}.{key} has the free variable {free}")
        for used in sorted(set(method.co_names) - names_allowed):
            raise _unknown(outer, f"nested {name}.{key} uses the name {used}")


def _arguments(code: CodeType) -> tuple[str, ...]:
    plain = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames)
    found = names[:plain]
    if code.co_flags & _CO_VARARGS:
        found.append("*" + names[plain])
        plain += 1
    if code.co_flags & _CO_VARKEYWORDS:
        found.append("**" + names[plain])
    return tuple(found)


def _bind(shape: HookShape, offload: Any, expected: _Expectation) -> dict[str, Callable]:
    # A cell for each name first, content after: functions may refer to each other in any order.
    cells = {name: CellType() for name in shape.codes}
    cells["self"] = CellType(offload)
    for name, code in shape.codes.items():
        function = FunctionType(
            code, shape.function.__globals__, name, None, tuple(cells[free] for free in code.co_freevars)
        )
        function.__module__ = shape.function.__module__
        function.__qualname__ = f"{shape.function.__qualname__}.<locals>.{name}"
        cells[name].cell_contents = _decorated(function, expected.functions[name].wrapper)
    return {name: cells[name].cell_contents for name in shape.codes}


def _decorated(function: FunctionType, wrapper: str | None) -> Callable:
    if wrapper == "compile":
        import torch

        return torch.compiler.disable(function)
    if wrapper == "nvtx":
        return function.__globals__["instrument_w_nvtx"](function)
    return function


def _unknown(function: str, what: str) -> PatchError:
    installed = versions.installed("deepspeed")
    version = f"DeepSpeed {installed}" if installed else "DeepSpeed (not installed)"
    cure = next(r.cure for r in versions.REQUIREMENTS if r.distribution == "deepspeed")
    return PatchError(
        f"{MODULE}.{function} of {version} has an unknown shape: {what}. DeepSpeed was left as it is; "
        f"ort_zero's ZeRO-3 hooks work with {WORKING}: {cure}"
    )


def _joined(names: Any) -> str:
    return ", ".join(names) or "nothing"
