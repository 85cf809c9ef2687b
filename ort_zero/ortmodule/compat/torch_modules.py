"""What torch and others keep of modules and tensors under names that are not public."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ort_zero.compat.torch_modules import version_of
from ort_zero.utils.patching import replaced

BOOKKEEPING = re.compile(
    r"_?ds_|_external_params$|_original_parameters$|applied_pre_backward_ref_cnt$"  # what DeepSpeed has done so far
    r"|_?name_or_path$|_commit_hash$|transformers_version$"  # where the weights come from
    r"|_is_hf_initialized$|_original_object_hash$"
)
"""Matches attributes of modules and configurations that change nothing in what a module computes."""


def submodule_table(module: Any) -> dict[str, Any]:
    """Return the very dict in which `module` keeps its submodules by name; values may be None.

    A copy for a module that TorchScript made, which has no such dict and never changes.
    """
    return dict(module._modules.items()) if is_scripted(module) else module._modules


def parameter_table(module: Any) -> dict[str, Any]:
    """Return the very dict in which `module` keeps its parameters by name; values may be None.

    DeepSpeed's ZeRO-3 puts a subclass of dict there, whose look-up gathers the parameter: read it with dict's methods.
    A copy for a module that TorchScript made.
    """
    return dict(module._parameters.items()) if is_scripted(module) else module._parameters


def buffer_table(module: Any) -> dict[str, Any]:
    """Return the very dict in which `module` keeps its buffers by name; values may be None.

    A copy for a module that TorchScript made.
    """
    return dict(module._buffers.items()) if is_scripted(module) else module._buffers


BUFFER_TABLE = "_buffers"
"""Attribute in which a module keeps the dict of its buffers."""


class _NotPersistent(set):
    """Names of buffers that the exporter takes for constants; names that a forward adds are for later."""

    def __init__(self, names: Iterable[str]):
        super().__init__(names)
        self.later: set[str] = set()

    def add(self, name: str) -> None:
        self.later.add(name)


@contextlib.contextmanager
def buffers_as_inputs(module: Any) -> Iterator[None]:
    """Let torch's exporter take every buffer of `module` for an input of the graph, in the block.

    It does so for persistent buffers only; the others are constants for it, which keep their values for ever. Complex
    buffers are constants, since no graph has such inputs: whoever reads one has to look whether it has changed.
    """
    changed = []
    for child in module.modules():
        if is_scripted(child) or not child._buffers:
            continue
        changed.append((child, child._non_persistent_buffers_set))
        constants = _NotPersistent(name for name, value in child._buffers.items() if is_complex(value))
        vars(child)["_non_persistent_buffers_set"] = constants
    try:
        yield
    finally:
        for child, names in changed:
            names.update(vars(child)["_non_persistent_buffers_set"].later)
            vars(child)["_non_persistent_buffers_set"] = names


@contextlib.contextmanager
def registrations_put_back(module: Any) -> Iterator[None]:
    """Undo what the block registers in, and removes from, `module` and the modules in it, if it raises.

    A forward that is given up on its way cannot undo it itself: PEFT parametrizes weights for the time of a forward,
    before the ``try`` whose end takes that back. A parametrization changes the module's class as well.
    """
    before = [
        (child, type(child), [(table, list(table.items())) for table in _registrations(child)])
        for child in module.modules()
        if not is_scripted(child)
    ]
    try:
        yield
    except BaseException:
        for child, kind, tables in before:
            if type(child) is not kind:
                child.__class__ = kind
            for table, items in tables:
                now = list(table.items())
                if len(now) != len(items) or any(
                    name != other or value is not then for (name, value), (other, then) in zip(now, items)
                ):
                    table.clear()
                    table.update(items)
        raise


def _registrations(module: Any) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def is_complex(buffer: Any) -> bool:
    """Return whether a buffer, which may be None, holds complex numbers."""
    return buffer is not None and buffer.is_complex()


def attributes_held(module: Any) -> dict[str, Any]:
    """Return the attributes of a module without those that torch keeps about it; its buffers and submodules count."""
    return {name: value for name, value in vars(module).items() if name not in _kept_by_torch()}


@functools.cache
def _kept_by_torch() -> frozenset[str]:
    import torch

    return frozenset(vars(torch.nn.Module())) - {BUFFER_TABLE, "_modules", "training"}


def forward_hooks(module: Any) -> Mapping[str, list[Callable]]:
    """Return the hooks around the forward of `module`, in their order, by the name of torch's table.

    The keys of the tables are left out: they count up in the process.
    """
    return {name: list(getattr(module, name).values()) for name in ("_forward_hooks", "_forward_pre_hooks")}


def forward_hook_tables(module: Any) -> list[Any]:
    """Return torch's own tables of the hooks around the forward of `module`."""
    return [getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks")]


def global_forward_hooks() -> list[Callable]:
    """Return the hooks around the forward of every module of the process."""
    from torch.nn.modules import module

    return [*module._global_forward_hooks.values(), *module._global_forward_pre_hooks.values()]


def hook_tables(module: Any) -> tuple[dict[int, Callable], ...]:
    """Return the very dicts in which `module` keeps the hooks around its forward and its backward."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def has_backward_hooks(module: Any) -> bool:
    """Return True if the user's hooks of `module` see, or change, the gradients of its arguments and results."""
    hooks = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
    return not all(map(is_infrastructure, hooks))


@contextlib.contextmanager
def without_infrastructure_hooks(module: Any) -> Iterator[None]:
    """Take away DeepSpeed's hooks on gradients of `module` and the modules in it, for a call in the block.

    Those of leaf modules reduce the gradients of partitioned weights, which an ONNX graph does by itself.
    """
    taken = []
    for child in module.modules():
        for table in (child._backward_hooks, child._backward_pre_hooks):
            taken += [(table, dict(table))] if any(map(is_infrastructure, table.values())) else []
    try:
        for table, hooks in taken:
            for key, hook in hooks.items():
                if is_infrastructure(hook):
                    del table[key]
        yield
    finally:
        for table, hooks in taken:
            table.clear()
            table.update(hooks)


def is_infrastructure(hook: Any) -> bool:
    """Return whether a hook is DeepSpeed's or ours: an export runs without these."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).partition(".")[0] in ("deepspeed", "ort_zero")


def is_batch_norm(module: Any) -> bool:
    """Return True for a normalisation module that keeps running statistics."""
    import torch

    return isinstance(module, torch.nn.modules.batchnorm._NormBase)


def is_scripted(module: Any) -> bool:
    """Return True for a module that TorchScript made: it has no Python code, and tables of its own kind."""
    import torch

    return isinstance(module, torch.jit.ScriptModule)


CALL = "_compiled_call_impl"
"""The attribute of a module that is called in place of its hooks and its forward, if it has it."""


def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what `module` returns with its hooks and its forward, whatever stands in :data:`CALL`."""
    return module._call_impl(*args, **kwargs)


@contextlib.contextmanager
def scripted_weights(module: Any, tensors: Mapping[str, Any]) -> Iterator[None]:
    """Let a module that TorchScript made compute with `tensors` in place of its parameters, by their names."""
    saved = []
    try:
        for name, tensor in tensors.items():
            path, _, key = name.rpartition(".")
            owner = functools.reduce(getattr, path.split(".") if path else [], module)._c
            saved.append((owner, key, owner.getattr(key)))
            owner.setattr(key, tensor)
        yield
    finally:
        for owner, key, tensor in saved:
            owner.setattr(key, tensor)


@contextlib.contextmanager
def on_scripted_functions(run: Callable[[Any, tuple, dict], Any]) -> Iterator[None]:
    """Call ``run(function, args, kwargs)`` for functions of TorchScript with branches or loops that are traced."""
    import torch

    kind: Any = torch.jit.ScriptFunction

    def call(original: Callable) -> Callable:
        def called(function: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.jit.is_tracing() and _has_control_flow(function.graph):
                return run(function, args, kwargs)
            return original(function, *args, **kwargs)

        return called

    with replaced(kind, "__call__", call):
        yield


def _has_control_flow(graph: Any) -> bool:
    torch_graph = graph.copy()
    _inline(torch_graph)
    return any(node.kind() in ("prim::If", "prim::Loop") for node in torch_graph.nodes())


def _inline(graph: Any) -> None:
    import torch

    torch._C._jit_pass_inline(graph)


def is_compiled(module: Any) -> bool:
    """Return True for a module that ``torch.compile`` has put around another one."""
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in submodule_table(module)


def is_view(tensor: Any) -> bool:
    """Return whether `tensor` is a view of another tensor for autograd."""
    return tensor._is_view()


def change_in_place(tensor: Any, change: Callable, *args: Any) -> None:
    """Call a method that changes `tensor` in place, also one that was made under ``torch.inference_mode()``."""
    import torch

    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        change(tensor, *args)


def is_zero_tensor(tensor: Any) -> bool:
    """Return True for a gradient of zeros that autograd did not put into memory."""
    return tensor._is_zerotensor()


@contextlib.contextmanager
def traceable_parametrizations() -> Iterator[None]:
    """Let a forward register parametrizations of its own in the block, which is traced.

    ``torch.nn.utils.parametrize`` sets the parameter that it moves to its own values, which a trace would hold as a
    change in place, and refuses to be traced while it caches.
    """
    from torch.nn.utils import parametrize

    def set_to_another(original: Callable) -> Callable:
        def set_to(target: Any, source: Any) -> None:
            if target is not source:
                original(target, source)

        return set_to

    with replaced(parametrize, "_maybe_set", set_to_another):
        with replaced(parametrize, "cached", lambda original: contextlib.nullcontext), uncached_parametrizations():
            yield


@contextlib.contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Let parametrized weights be computed at each use in the block, inside of ``parametrize.cached()`` as well.

    A weight that one run of a graph has cached has no gradient in the next one.
    """
    from torch.nn.utils import parametrize

    with replaced(parametrize, "_cache_enabled", lambda original: 0):
        yield


def versions_of(tensors: Sequence[Any]) -> list[int]:
    """Return how often the values of each tensor were changed in place; 50 ns a tensor."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]  # some were made under torch.inference_mode()
