"""Count the steps of a model that has subscribers, and call the subscribers' actions on modules and tensors.

In PyTorch, module hooks call the actions. Within a compiled unit Dynamo captures operators in place of the hooks' code
(:mod:`.graph_operators`). In ORTModule, extra graph nodes pass the values to the actions (see
:mod:`ort_zero.ortmodule.statistics.graph_readers`), and the runtime calls :meth:`SubscribedModel.begin_step` and
:meth:`SubscribedModel.end_step`.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ort_zero.compat.torch_modules import modules_of
from ort_zero.log import get_logger
from ort_zero.statistics.collect.graph_capture import PLACE, capture, is_captured
from ort_zero.statistics.collect.module_calls import CallTracker, TensorSlot
from ort_zero.statistics.collect.subscriber_base import SubscriberBase
from ort_zero.utils.tree_map import map_arguments, map_slots

_by_root: MutableMapping[Module, SubscribedModel] = WeakIdKeyDictionary()
running: list[SubscribedModel] = []
"""Models whose forward is running in PyTorch, innermost last."""
running_again: list[RunAgain] = []
"""Runs of compiled units by activation checkpointing, innermost last."""
hooks_changed: list[Callable[[Module], None]] = []
"""Functions to call with a user's module whose hooks were added or removed: compiled graphs hold the hooks' code."""
_KEPT_STEPS = 8
"""Number of steps whose slots are kept for gradients that arrive later."""
_numbers = itertools.count()
_to_close: weakref.WeakSet[SubscriberBase] = weakref.WeakSet()


def subscribed_model_of(root: Module) -> SubscribedModel | None:
    """Return a user's module with its subscribers, None if it has no subscribers."""
    return _by_root.get(root)


def subscribed_models_in(module: Module) -> list[SubscribedModel]:
    """Return each module with subscribers among `module` and its submodules."""
    if not _by_root:
        return []
    return [model for part in modules_of(module) if (model := _by_root.get(part)) is not None]


def subscribe(root: Module, subscribers: Sequence[SubscriberBase]) -> SubscribedModel:
    """Add subscribers to a user's module, and return the module with all its subscribers."""
    model = _by_root.get(root)
    if model is None:
        model = _by_root[root] = SubscribedModel(root)
    model.add(subscribers)
    return model


@dataclass
class RunAgain:
    """A run of a compiled unit within a backward."""

    model: SubscribedModel
    unit: Module
    slots: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of tensors so far, by path of the module, kind and name."""


class SubscribedModel:
    """The subscribers of one model, and the number of the model's step.

    Args:
        root: the user's module.
    """

    def __init__(self, root: Module):
        # weak references in both directions: neither the model nor this object keeps the other alive
        self._root = weakref.ref(root)
        self.number = next(_numbers)
        """Number of the model in this process."""
        self.subscribers: tuple[SubscriberBase, ...] = ()
        self.active: tuple[SubscriberBase, ...] = ()
        """The subscribers whose actions run in the current step."""
        self._for_gradients: tuple[SubscriberBase, ...] = ()
        """The active subscribers that act on gradients."""
        self.step = -1
        """Number of the current step, between steps of the last one; -1 before the first."""
        self.backend = "torch"
        """The backend of the step: ``"torch"`` or ``"onnxruntime"``."""
        self.calls = CallTracker(root)
        self._slots: dict[int, list[TensorSlot]] = {}
        """The slots of the last steps, by the number of the step."""
        self._handles: list[RemovableHandle] = []

    @property
    def root(self) -> Module | None:
        """The user's module; None after the module was deleted."""
        return self._root()

    def add(self, subscribers: Sequence[SubscriberBase]) -> None:
        """Add subscribers, and hook the modules if these are the first subscribers."""
        self.subscribers += tuple(subscribers)
        _to_close.update(subscribers)
        if not self._handles:
            self._register_hooks()

    def remove(self) -> None:
        """Remove all hooks and close the subscribers. May be called twice."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        if handles and self.root is not None:
            for changed in hooks_changed:
                changed(self.root)
        subscribers, self.subscribers, self.active = self.subscribers, (), ()
        for subscriber in subscribers:
            subscriber.close()
        if self.root is not None and _by_root.get(self.root) is self:
            del _by_root[self.root]

    # -- a step -----------------------------------------------------------------------------------------------------

    def begin_step(self, backend: str = "torch") -> None:
        """Begin a step in ``"torch"`` or ``"onnxruntime"``; close subscribers whose `end_step` is reached."""
        self.step += 1
        self.backend = backend
        self.active = tuple(s for s in self.subscribers if s.is_active(self.step))
        over = [s for s in self.subscribers if s.end_step is not None and s.end_step <= self.step]
        for subscriber in over:
            subscriber.close()
        if over and len(over) == len(self.subscribers):
            self.remove()
            return
        self._for_gradients = tuple(s for s in self.active if s.acts_on_gradients())
        if not self.active:
            return
        self.calls.begin_step()
        self._slots[self.step] = self.calls.slots
        self._slots.pop(self.step - _KEPT_STEPS, None)
        for subscriber in self.active:
            subscriber.pre_forward_model_apply(self.step, self.root)

    def end_step(self, outputs: Any) -> None:
        """End the forward of a step."""
        for subscriber in self.active:
            subscriber.post_forward_model_apply(self.step, self.root, outputs)

    def show_tensor(self, slot: TensorSlot, tensor: torch.Tensor, *, gradient: bool = True) -> torch.Tensor | None:
        """Show the active subscribers a tensor.

        Args:
            slot: the slot of the tensor.
            tensor: the tensor.
            gradient: also show the tensor's gradient when backward has computed it.

        Returns:
            The tensor that subscribers returned as a replacement, None if no subscriber replaced the tensor.
        """
        shown = tensor
        for subscriber in self.active:
            new = subscriber.forward_slot_apply(self.step, slot, shown)
            shown = shown if new is None else new
        if gradient and slot.source < 0 and self._for_gradients and shown.requires_grad and torch.is_grad_enabled():
            self._expect_gradient(self.step, slot, shown)
        return None if shown is tensor else shown

    def show_gradient(self, step: int, slot: TensorSlot, gradient: torch.Tensor) -> None:
        """Show a gradient to the subscribers that were active in `step`."""
        if step == self.step:
            subscribers = self._for_gradients
        else:
            subscribers = tuple(s for s in self.subscribers if s.is_active(step) and s.acts_on_gradients())
        for subscriber in subscribers:
            subscriber.gradient_slot_apply(step, slot, gradient)

    def show_gradient_of(self, step: int, order: int, gradient: torch.Tensor) -> None:
        """Show the gradient of a slot to the subscribers that were active in `step`; a step long past is left out."""
        if step in self._slots:
            self.show_gradient(step, self._slots[step][order], gradient)

    def _expect_gradient(self, step: int, slot: TensorSlot, tensor: torch.Tensor) -> None:
        subscribers = self._for_gradients

        # the hook lives as long as the autograd graph: it must not refer to self, which refers to the model
        def arrived(gradient: torch.Tensor) -> None:
            for subscriber in subscribers:
                subscriber.gradient_slot_apply(step, slot, gradient)

        tensor.register_hook(arrived)

    def inspect(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Show a tensor passed to ``inspect_activation``, and return the tensor or its replacement."""
        call = self.calls.running
        if not self.active or call is None:
            return tensor
        result = self.show_tensor(self.calls.slot_of(tensor, call, "inspect", name), tensor)
        return tensor if result is None else result

    # -- hooks for PyTorch ------------------------------------------------------------------------------------------

    def _register_hooks(self) -> None:
        reference, root = weakref.ref(self), self.root
        assert root is not None

        # functions with a weak reference to self: a deep copy of the module must not copy this object
        def before(module: Module, args: tuple, kwargs: dict) -> Any:
            if is_captured(module):
                return capture(module, "input", _slots_in((args, kwargs)))
            here = reference()
            return None if here is None else here._before(module, args, kwargs)

        def after(module: Module, args: tuple, kwargs: dict, outputs: Any) -> Any:
            if is_captured(module):
                return capture(module, "output", _slots_in((outputs,)))
            here = reference()
            return None if here is None else here._after(module, args, outputs)

        for module in root.modules():
            # run before all other hooks: ZeRO-3's pre-forward hook wraps inputs in an autograd Function, whose output
            # has only the gradient from this module
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        # after a forward that raised, no call may stay open: the next forward would take that call for its caller
        ended = functools.partial(_forward_ended, reference)
        self._handles.append(root.register_forward_hook(ended, always_call=True))
        for changed in hooks_changed:
            changed(root)

    def _before(self, module: Module, args: tuple, kwargs: dict) -> Any:
        if module is self.root:
            self.begin_step()
            if not self._handles:
                return None  # the last step of all subscribers was the one before
            running.append(self)
        if not self.active:
            return None
        if module is not self.root and not self.calls.running:
            if getattr(module, PLACE, None) == "":
                running_again.append(RunAgain(self, module))
            return None
        call = self.calls.enter(module)
        old_args, old_kwargs = args, kwargs
        for subscriber in self.active:
            result = subscriber.pre_forward_module_apply(module, args)
            args = args if result is None else result
        args, kwargs = map_arguments(
            lambda name, tensor: self.show_tensor(self.calls.slot_of(tensor, call, "input", name), tensor), args, kwargs
        )
        same = args is old_args and all(kwargs[key] is old_kwargs[key] for key in kwargs)
        return None if same else (args, kwargs)

    def _after(self, module: Module, args: tuple, outputs: Any) -> Any:
        if not self.active:
            return None
        call = self.calls.leave(module)
        if call is None:
            if running_again and running_again[-1].unit is module:
                running_again.pop()
            self._expect_recomputed(module, outputs)
            return None
        old_outputs = outputs
        for subscriber in self.active:
            result = subscriber.post_forward_module_apply(module, args, outputs)
            outputs = outputs if result is None else result
        outputs = map_slots(
            lambda name, tensor: self.show_tensor(self.calls.slot_of(tensor, call, "output", name), tensor), outputs
        )
        if module is self.root:
            self.end_step(outputs)
        return None if outputs is old_outputs else outputs

    def _expect_recomputed(self, module: Module, outputs: Any) -> None:
        """Hook the gradients of a module that activation checkpointing runs again within the backward.

        Reentrant checkpointing keeps no autograd graph of the first run, so gradients flow through the new tensors.
        """
        if not torch.is_grad_enabled():
            return
        path = self.calls.path_of(module)

        def expect(name: str, tensor: torch.Tensor) -> None:
            slots = self.calls.earlier_slots(path, "output", name)
            if tensor.requires_grad and slots and slots[-1].source < 0:
                self._expect_gradient(self.step, slots[-1], tensor)

        map_slots(expect, outputs)


def _slots_in(values: tuple) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in each of the values with their slots; Dynamo traces the function."""
    slots: list[tuple[str, torch.Tensor]] = []
    for value in values:
        map_slots(lambda name, tensor: slots.append((name, tensor)), value)
    return slots


def _forward_ended(reference: weakref.ref, module: Module, args: tuple, outputs: Any) -> None:
    here = reference()
    if here is not None and here in running:
        while running.pop() is not here:
            pass


@atexit.register
def _close_all() -> None:
    for subscriber in list(_to_close):
        try:
            subscriber.close()
        except Exception as error:
            get_logger().warning("%s was not closed: %s", type(subscriber).__name__, error)
