"""Check that DeepSpeed's ZeRO-3 hooks have the shape of a supported release.

The shape lists the nested functions with their arguments, the names that the code around them may use, and the
variables that they close over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from ort_zero.compat import versions
from ort_zero.errors import PatchError

MODULE = "deepspeed.runtime.zero.parameter_offload"
WORKING = "DeepSpeed 0.16.9 to 0.19"

_CO_VARARGS, _CO_VARKEYWORDS = 0x04, 0x08


@dataclass(frozen=True, kw_only=True, slots=True)
class _Function:
    """A nested function of DeepSpeed that ort_zero binds to a new closure."""

    arguments: tuple[str, ...]
    """Names of the parameters as in the source, ``*name`` for the variadic one."""
    wrapper: str | None = None
    """DeepSpeed's decorator of the function: ``"compile"`` (torch.compiler.disable), ``"nvtx"`` or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Expectation:
    functions: Mapping[str, _Function]
    """Nested functions that must exist."""
    classes: Mapping[str, tuple[frozenset[str], frozenset[str]]]
    """Nested autograd Functions to replace: by name, the free variables and names that their methods may use."""
    unused: frozenset[str]
    """Nested functions that may exist and are never called."""
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
        "module id get_param_coordinator is_invalid_trace _invalidate_trace ds_id set ds_recompute_parameters "
        "z3_leaf_module parameters ds_z3_leaf_module children _register_deepspeed_module "
        "torch compiler disable instrument_w_nvtx forward_hooks append "
        "register_forward_pre_hook register_forward_hook __dict__ hasattr autograd Function "
        "pre_bwd_fn backward_hooks post_bwd_fn".split()
    ),
)

_SETUP = _Expectation(
    arguments=("self",),
    functions={"_start_of_forward_hook": _Function(arguments=("module", "*args"), wrapper="nvtx")},
    classes={},
    unused=frozenset(),
    names=frozenset(
        "hierarchy instrument_w_nvtx module register_forward_pre_hook fwd_pre_hook _register_deepspeed_module "
        "register_forward_hook FWD_MODULE_STACK append".split()
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HookShape:
    """The result of a probe: the code objects of DeepSpeed's hooks that are safe to bind to new closures."""

    function: FunctionType
    codes: Mapping[str, CodeType]
    """Code of each nested function, by name."""
    wrappers: Mapping[str, str | None]
    """DeepSpeed's decorator of each nested function, by name: ``"compile"``, ``"nvtx"`` or None."""


def probe(registering_function: Callable) -> HookShape:
    """Return the shape of the function that registers the hooks.

    Raises:
        PatchError: a part is unknown; the message names the part, the installed version, and the supported versions.
    """
    return _probe(registering_function, _REGISTER)


def probe_setup(setup_function: Callable) -> HookShape:
    """Return the shape of ``setup_zero_stage3_hooks``.

    Raises:
        PatchError: a part is unknown; the message names the part, the installed version, and the supported versions.
    """
    return _probe(setup_function, _SETUP)


def _nested(code: CodeType | None) -> dict[str, CodeType]:
    """Return the code of the functions and classes inside a function, by name; empty without code."""
    return {const.co_name: const for const in code.co_consts if isinstance(const, CodeType)} if code else {}


def _probe(function: Any, expected: _Expectation) -> HookShape:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    if code is None:
        raise unknown_shape(name, "it is no Python function")
    if _arguments(code) != expected.arguments:
        raise unknown_shape(name, f"its arguments are {_joined(_arguments(code))}, not {_joined(expected.arguments)}")
    if "count" in expected.arguments:
        defaults = function.__defaults__
        if not (defaults and len(defaults) == 1 and isinstance(defaults[0], list) and len(defaults[0]) == 1):
            raise unknown_shape(name, f"the default of its argument count is {defaults!r}, not a list of one number")
    nested = _nested(code)
    anonymous = {key for key in nested if key.startswith("<")}
    for missing in (key for key in (*expected.functions, *expected.classes) if key not in nested):
        raise unknown_shape(name, f"nothing named {missing} is nested in it (it has {_joined(nested)})")
    for extra in sorted(set(nested) - set(expected.functions) - set(expected.classes) - expected.unused):
        raise unknown_shape(
            name, f"{extra} is nested in it" + (", a comprehension or lambda" if extra in anonymous else "")
        )
    for extra in sorted(set(code.co_names) - expected.names):
        raise unknown_shape(name, f"it uses the name {extra}")
    # a new closure can only contain the rebound functions and the offload object
    supplied = {"self", *expected.functions}
    for key, wanted in expected.functions.items():
        if _arguments(nested[key]) != wanted.arguments:
            actual = _joined(_arguments(nested[key]))
            raise unknown_shape(name, f"the arguments of nested {key} are {actual}, not {_joined(wanted.arguments)}")
        for free in nested[key].co_freevars:
            if free not in supplied:
                raise unknown_shape(name, f"nested {key} has the free variable {free}")
    for key, (free_allowed, names_allowed) in expected.classes.items():
        _probe_class(name, key, nested[key], free_allowed, names_allowed)
    return HookShape(
        function=function,
        codes={key: nested[key] for key in expected.functions},
        wrappers={key: wanted.wrapper for key, wanted in expected.functions.items()},
    )


def _probe_class(
    outer: str, name: str, code: CodeType, free_allowed: frozenset[str], names_allowed: frozenset[str]
) -> None:
    methods = _nested(code)
    # setup_context was added within 0.19; before, forward counted the uses
    if set(methods) not in (_METHODS, _METHODS - {"setup_context"}):
        raise unknown_shape(outer, f"nested class {name} has the methods {_joined(methods)}")
    for key, method in methods.items():
        for free in sorted(set(method.co_freevars) - free_allowed):
            raise unknown_shape(outer, f"nested {name}.{key} has the free variable {free}")
        for used in sorted(set(method.co_names) - names_allowed):
            raise unknown_shape(outer, f"nested {name}.{key} uses the name {used}")


def _arguments(code: CodeType) -> tuple[str, ...]:
    plain = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames)
    arguments = names[:plain]
    if code.co_flags & _CO_VARARGS:
        arguments.append("*" + names[plain])
        plain += 1
    if code.co_flags & _CO_VARKEYWORDS:
        arguments.append("**" + names[plain])
    return tuple(arguments)


def unknown_shape(function: str, what: str) -> PatchError:
    """Return the error for an unknown part of DeepSpeed's hooks, with its version and the supported versions."""
    installed = versions.installed("deepspeed")
    version = f"DeepSpeed {installed}" if installed else "DeepSpeed (not installed)"
    cure = next(r.cure for r in versions.REQUIREMENTS if r.distribution == "deepspeed")
    return PatchError(
        f"{MODULE}.{function} of {version} has an unknown shape: {what}. DeepSpeed was left as it is; "
        f"ort_zero's ZeRO-3 hooks work with {WORKING}: {cure}"
    )


def _joined(names: Any) -> str:
    return ", ".join(names) or "nothing"
