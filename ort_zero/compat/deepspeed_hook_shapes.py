"""Check that DeepSpeed's ZeRO-3 hooks have the shape of a supported release: names, arguments and closures."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any, NamedTuple

from ort_zero.compat import versions
from ort_zero.errors import PatchError

MODULE = "deepspeed.runtime.zero.parameter_offload"
WORKING = "DeepSpeed 0.16.9 to 0.19"
_METHODS = ({"forward", "setup_context", "backward"}, {"forward", "backward"})
"""Methods of DeepSpeed's autograd Functions; before some releases of 0.19 forward counted the uses."""


class _Expectation(NamedTuple):
    arguments: tuple[str, ...]
    functions: Mapping[str, tuple[str, str | None]]
    """Nested functions that must exist: arguments, and the decorator, ``"compile"`` (torch.compiler.disable) or
    ``"nvtx"``."""
    names: str
    """Globals and attributes that the outer function itself may use."""
    classes: Mapping[str, tuple[str, str]] = {}
    """Nested autograd Functions to replace: the free variables and the names that their methods may use."""
    unused: frozenset[str] = frozenset()
    """Nested functions that may exist and are never called."""


_REGISTER = _Expectation(
    arguments=("self", "module", "count"),
    functions={
        "_pre_forward_module_hook": ("module *args", "compile"),
        "_post_forward_module_hook": ("module input output", "nvtx"),
        "_bwd_hook_unexpected_inputs_msg": ("value", None),
        "_pre_backward_module_hook": ("module inputs output", None),
        "_post_backward_module_hook": ("module inputs", "compile"),
        "_run_before_backward_function": ("sub_module", "nvtx"),
        "_run_after_backward_function": ("sub_module", "nvtx"),
    },
    classes={
        "PreBackwardFunctionForModule": (
            "module _run_before_backward_function",
            "module pre_backward_function __dict__ hasattr applied_pre_backward_ref_cnt detach",
        ),
        "PostBackwardFunctionModule": (
            "module _run_after_backward_function",
            "module post_backward_function requires_grad ds_grads_remaining detach",
        ),
    },
    unused=frozenset({"_alternate_post_backward_module_hook"}),
    names="module id get_param_coordinator is_invalid_trace _invalidate_trace ds_id set ds_recompute_parameters "
    "z3_leaf_module parameters ds_z3_leaf_module children _register_deepspeed_module "
    "torch compiler disable instrument_w_nvtx forward_hooks append "
    "register_forward_pre_hook register_forward_hook __dict__ hasattr autograd Function "
    "pre_bwd_fn backward_hooks post_bwd_fn",
)
_SETUP = _Expectation(
    arguments=("self",),
    functions={"_start_of_forward_hook": ("module *args", "nvtx")},
    names="hierarchy instrument_w_nvtx module register_forward_pre_hook fwd_pre_hook _register_deepspeed_module "
    "register_forward_hook FWD_MODULE_STACK append",
)


class HookShape(NamedTuple):
    """The code objects of DeepSpeed's hooks that are safe to bind to new closures, and their decorators, by name."""

    function: Any
    codes: Mapping[str, CodeType]
    wrappers: Mapping[str, str | None]


def probe(function: Any) -> HookShape:
    """Return the shape of ``_register_deepspeed_module``, or of the function ``setup_zero_stage3_hooks``.

    Raises:
        PatchError: a part is unknown; the message names the part, the installed version, and the supported versions.
    """
    expected = _SETUP if getattr(function, "__name__", "") == "setup_zero_stage3_hooks" else _REGISTER
    for what in _deviations(function, expected):
        cure = next(r.cure for r in versions.REQUIREMENTS if r.distribution == "deepspeed")
        where = f"{MODULE}.{getattr(function, '__qualname__', function)} of DeepSpeed {versions.installed('deepspeed')}"
        raise PatchError(
            f"{where} has an unknown shape: {what}. DeepSpeed was left as it is; ort_zero's ZeRO-3 hooks work with "
            f"{WORKING}: {cure}"
        )
    codes = _nested(function.__code__)
    wrappers = {name: wrapper for name, (_, wrapper) in expected.functions.items()}
    return HookShape(function, {name: codes[name] for name in wrappers}, wrappers)


def _deviations(function: Any, expected: _Expectation) -> Iterable[str]:
    """Yield in words how a function of DeepSpeed differs from what is expected."""
    code = getattr(function, "__code__", None)
    if code is None:
        yield "it is no Python function"
        return
    if _arguments(code) != expected.arguments:
        yield f"its arguments are {_joined(_arguments(code))}, not {_joined(expected.arguments)}"
    default = (function.__defaults__ or [None])[-1]
    if "count" in expected.arguments and not (isinstance(default, list) and len(default) == 1):
        yield f"the default of its argument count is {default!r}, not a list of one number"
    nested = _nested(code)
    for name in [name for name in (*expected.functions, *expected.classes) if name not in nested]:
        yield f"nothing named {name} is nested in it (it has {_joined(nested)})"
    for name in sorted(nested.keys() - expected.functions.keys() - expected.classes.keys() - expected.unused):
        yield f"{name} is nested in it"  # a comprehension or lambda has a name in angle brackets
    for name in sorted(set(code.co_names) - set(expected.names.split())):
        yield f"it uses the name {name}"
    for name, (arguments, _) in expected.functions.items():
        if _arguments(nested[name]) != tuple(arguments.split()):
            yield f"the arguments of nested {name} are {_joined(_arguments(nested[name]))}, not {arguments}"
        # a new closure can only contain the rebound functions and the offload object
        for free in sorted(set(nested[name].co_freevars) - {"self", *expected.functions}):
            yield f"nested {name} has the free variable {free}"
    for name, (free_allowed, names_allowed) in expected.classes.items():
        methods = _nested(nested[name])
        if set(methods) not in _METHODS:
            yield f"nested class {name} has the methods {_joined(methods)}"
        for key, method in methods.items():
            for free in sorted(set(method.co_freevars) - set(free_allowed.split())):
                yield f"nested {name}.{key} has the free variable {free}"
            for used in sorted(set(method.co_names) - set(names_allowed.split())):
                yield f"nested {name}.{key} uses the name {used}"


def _nested(code: CodeType) -> dict[str, CodeType]:
    """Return the code of the functions and classes inside a function, by name."""
    return {const.co_name: const for const in code.co_consts if isinstance(const, CodeType)}


def _arguments(code: CodeType) -> tuple[str, ...]:
    names, variadic, named = inspect.getargs(code)
    return (*names, *(f"*{name}" for name in (variadic,) if name), *(f"**{name}" for name in (named,) if name))


def _joined(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
