"""Run DeepSpeed's own ZeRO-3 hook functions around each module.

DeepSpeed makes two autograd Functions for each module. Here two serve all modules, whose argument names the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ort_zero.compat import deepspeed_hooks, deepspeed_units
from ort_zero.distributed.lone_failures import ended_unless_shared
from ort_zero.utils.tree_map import map_attributes


class BackwardAction(NamedTuple):
    """An action before or after the backward of one module, stored in place of DeepSpeed's autograd Function."""

    function: type[torch.autograd.Function]
    module: torch.nn.Module
    run: Callable[[Any], None]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as it passes through the autograd Function."""
        return self.function.apply(tensor, self)


class BeforeBackward(torch.autograd.Function):
    """The identity function for a module's outputs, whose backward first gathers the module's parameters."""

    @staticmethod
    def forward(tensor: torch.Tensor, action: BackwardAction) -> torch.Tensor:
        """Return `tensor` as a new node of the graph."""
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        """Count one more use of the module for which a backward may come."""
        _, ctx.action = inputs
        deepspeed_hooks.count_use(ctx.action.module)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        """Run DeepSpeed's action before the module's backward."""
        ctx.action.run(ctx.action.module)
        return (*grads, None)


class AfterBackward(torch.autograd.Function):
    """The identity function for a module's inputs, whose last backward releases the module's parameters."""

    @staticmethod
    def forward(tensor: torch.Tensor, action: BackwardAction) -> torch.Tensor:
        """Return `tensor` as a new node of the graph."""
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        """Count one more awaited gradient of the module's inputs."""
        tensor, ctx.action = inputs
        if tensor.requires_grad:
            ctx.action.module.ds_grads_remaining += 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        """Run DeepSpeed's action after the module's backward, once the last gradient of its inputs is computed."""
        module = ctx.action.module
        module.ds_grads_remaining -= 1
        if module.ds_grads_remaining == 0:
            ctx.action.run(module)
        return (*grads, None)


_PASSED = f"{BeforeBackward.__name__}Backward"
"""Name of the autograd nodes of outputs that have passed through an action."""


class _ActionsHandle:
    """The handle that removes actions from their modules, so that a later engine does not run them."""

    def __init__(self, actions: list[tuple[torch.nn.Module, str, BackwardAction]]):
        self._actions = actions

    def remove(self) -> None:
        """Remove every action that no other registration has replaced."""
        for module, name, action in self._actions:
            if module.__dict__.get(name) is action:
                delattr(module, name)
        self._actions = []


class ZeROOffloadSubscriber:
    """The subscriber that gathers and releases the parameters of one ``DeepSpeedZeRoOffload`` around each module."""

    def __init__(self, offload: Any):
        """Bind DeepSpeed's hook functions to `offload`.

        Raises:
            PatchError: the installed DeepSpeed has hook code of an unknown shape.
        """
        self.offload = offload
        self.hooks = deepspeed_hooks.rebind(offload)
        self._actions: list[tuple[torch.nn.Module, str, BackwardAction]] = []

    def register(self, root: torch.nn.Module) -> None:
        """Register the hooks on `root` and below, and pass their handles to the offload, which removes them."""
        self._actions = []
        self._register(root)
        self.offload.backward_hooks.append(_ActionsHandle(self._actions))

    def _register(self, module: torch.nn.Module) -> None:
        """Register the hooks in DeepSpeed's order: children before their parent, and none inside of a leaf module."""
        from deepspeed.utils import z3_leaf_module

        if not z3_leaf_module(module):
            for child in module.children():
                self._register(child)
        self._store_actions(module)

        hooks, offload = self.hooks, self.offload

        # functions, not bound methods, whose subscriber a deepcopy of the module would copy with its process groups
        def gather(module: torch.nn.Module, args: tuple) -> Any:
            with ended_unless_shared():
                return hooks["_pre_forward_module_hook"](module, args)

        def release(module: torch.nn.Module, args: tuple, outputs: Any) -> Any:
            # DeepSpeed looks for parameters among outputs, and cannot look into objects with slots
            can_be_read = isinstance(outputs, (torch.Tensor, list, tuple, dict)) or hasattr(outputs, "__dict__")
            return hooks["_post_forward_module_hook"](module, args, outputs if can_be_read else None)

        def pass_outputs(module: torch.nn.Module, args: tuple, outputs: Any) -> Any:
            """Pass each output through :class:`BeforeBackward`, for units also those in attributes of objects.

            DeepSpeed looks into tuples, lists and dicts alone. But the modules inside of a unit have no hooks.
            """
            outputs = hooks["_pre_backward_module_hook"](module, args, outputs)
            if deepspeed_units.is_unit(module):
                map_attributes(lambda _, tensor: _before_backward(module, tensor), outputs)
            return outputs

        def pass_inputs(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
            """Pass each input through :class:`AfterBackward`, a named one only for units.

            DeepSpeed leaves named inputs out. But a unit, with no hooks inside, would then keep its weights in a step.
            """
            named = {}
            if deepspeed_units.is_unit(module):
                named = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
            args, named = hooks["_post_backward_module_hook"](module, (args, named))
            return args, {**kwargs, **named}

        offload.forward_hooks.append(module.register_forward_pre_hook(gather))
        offload.forward_hooks.append(module.register_forward_hook(release))
        offload.backward_hooks.append(module.register_forward_hook(pass_outputs))
        offload.backward_hooks.append(module.register_forward_pre_hook(pass_inputs, with_kwargs=True))

    def _store_actions(self, module: torch.nn.Module) -> None:
        """Store the two actions of `module`, in place of the actions of an earlier registration."""
        gather = self.hooks["_run_before_backward_function"]

        def gather_before_backward(module: torch.nn.Module) -> None:  # not a method: copies of a module share it
            with ended_unless_shared():
                gather(module)

        for name, function, run in (
            (deepspeed_hooks.BEFORE_BACKWARD, BeforeBackward, gather_before_backward),
            (deepspeed_hooks.AFTER_BACKWARD, AfterBackward, self.hooks["_run_after_backward_function"]),
        ):
            action = BackwardAction(function, module, run)
            setattr(module, name, action)
            self._actions.append((module, name, action))


def _before_backward(module: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor of an object as it passes through the module's action; None for what another unit made."""
    if tensor.grad_fn is None or tensor.grad_fn.name() == _PASSED:
        return None
    return getattr(module, deepspeed_hooks.BEFORE_BACKWARD).apply(tensor)
