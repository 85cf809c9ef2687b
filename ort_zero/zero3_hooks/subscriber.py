"""ZeRO-3 under PyTorch execution: DeepSpeed's own hook functions, run through a subscriber.

DeepSpeed makes two autograd Functions for each module, classes local to a closure that all carry the same qualified
name. Here there is one for each side of the backward, and what differs by module travels as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ort_zero.compat import deepspeed_hooks
from ort_zero.zero3_hooks.hook_manager import SubscriberManager
from ort_zero.zero3_hooks.subscriber_base import SubscriberBase


class Side:
    """Takes the place of a module's autograd Function in DeepSpeed's tables: something with ``apply(tensor)``."""

    __slots__ = ("action", "function", "module")

    def __init__(self, function: type[torch.autograd.Function], module: torch.nn.Module, action: Callable[[Any], None]):
        self.function = function
        self.module = module
        self.action = action

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as it passes through the autograd Function of this side."""
        return self.function.apply(tensor, self)


class BeforeBackward(torch.autograd.Function):
    """Passes an output through; in backward, first has the module's parameters gathered."""

    @staticmethod
    def forward(tensor: torch.Tensor, side: Side) -> torch.Tensor:
        """Return `tensor` as a new node of the graph."""
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        """Count one more use of the module for which a backward may come."""
        _, ctx.side = inputs
        deepspeed_hooks.count_use(ctx.side.module)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        """Run DeepSpeed's action before the module's backward."""
        ctx.side.action(ctx.side.module)
        return (*grads, None)


class AfterBackward(torch.autograd.Function):
    """Passes an input through; after the last gradient of the inputs, has the module's parameters released."""

    @staticmethod
    def forward(tensor: torch.Tensor, side: Side) -> torch.Tensor:
        """Return `tensor` as a new node of the graph."""
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        """Count one more gradient to wait for."""
        tensor, ctx.side = inputs
        if tensor.requires_grad:
            deepspeed_hooks.count_awaited_gradient(ctx.side.module)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        """Run DeepSpeed's action after the module's backward, once its last gradient is there."""
        module = ctx.side.module
        if deepspeed_hooks.gradient_arrived(module):
            ctx.side.action(module)
        return (*grads, None)


class _SidesHandle:
    """Takes the sides off their modules: left there, they would serve an engine made later with this one's hooks."""

    def __init__(self, sides: list[tuple[torch.nn.Module, str, Side]]):
        self._sides = sides

    def remove(self) -> None:
        """Take off every side that is still in place."""
        for module, name, side in self._sides:
            if module.__dict__.get(name) is side:
                delattr(module, name)
        self._sides = []


class ZeROOffloadSubscriber(SubscriberBase):
    """Gathers and releases the parameters of one ``DeepSpeedZeRoOffload`` around forward and backward."""

    def __init__(self, offload: Any):
        """Take DeepSpeed's hook functions for `offload`.

        Raises:
            PatchError: the installed DeepSpeed has hook code of an unknown shape.
        """
        self.offload = offload
        self.hooks = deepspeed_hooks.rebind(offload)
        self._sides: list[tuple[torch.nn.Module, str, Side]] = []

    def register(self, module: torch.nn.Module) -> None:
        """Put the hooks on `module` and below, and hand their handles to the offload, which removes them."""
        self._sides = []
        handles = SubscriberManager([self]).register(module)
        deepspeed_hooks.hand_over(self.offload, handles.module, [*handles.tensor, _SidesHandle(self._sides)])

    def children(self, module: torch.nn.Module) -> Iterable[torch.nn.Module]:
        """Return the children, none for a leaf module of DeepSpeed."""
        return () if deepspeed_hooks.is_leaf(module) else module.children()

    def prepare(self, module: torch.nn.Module) -> None:
        """Give `module` the autograd Functions of its two sides, in place of any of an earlier registration."""
        for name, function, action in (
            (deepspeed_hooks.BEFORE_BACKWARD, BeforeBackward, self.hooks.run_before_backward),
            (deepspeed_hooks.AFTER_BACKWARD, AfterBackward, self.hooks.run_after_backward),
        ):
            side = Side(function, module, action)
            setattr(module, name, side)
            self._sides.append((module, name, side))

    def pre_forward_module_apply(self, module: torch.nn.Module, args: tuple) -> Any:
        """Gather the module's parameters."""
        return self.hooks.pre_forward(module, args)

    def post_forward_module_apply(self, module: torch.nn.Module, args: tuple, outputs: Any) -> Any:
        """Release the module's parameters."""
        return self.hooks.post_forward(module, args, outputs)

    def pre_forward_tensors(self, module: torch.nn.Module, args: tuple) -> Any:
        """Pass each input through :class:`AfterBackward`."""
        return self.hooks.post_backward(module, args)

    def post_forward_tensors(self, module: torch.nn.Module, args: tuple, outputs: Any) -> Any:
        """Pass each output through :class:`BeforeBackward`."""
        return self.hooks.pre_backward(module, args, outputs)
