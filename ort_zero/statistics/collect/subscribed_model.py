"""Subscribe to models, count the steps of a model, and call the subscribers' actions on modules and tensors.

In PyTorch, module hooks call the actions. Within a compiled unit Dynamo captures operators in place of the hooks' code
(:mod:`.graph_operators`).
"""

from __future__ import annotations

import atexit
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ort_zero.compat import deepspeed as ds_compat
from ort_zero.compat.torch_modules import inside_of_compiled, modules_of
from ort_zero.log import get_logger
from ort_zero.statistics.collect.module_calls import CallTracker, TensorSlot
from ort_zero.statistics.collect.subscriber_base import SubscriberBase
from ort_zero.utils.tree_map import map_arguments, map_slots

_by_root: MutableMapping[Module, SubscribedModel] = WeakIdKeyDictionary()
_facts: MutableMapping[Module, dict[str, Any]] = WeakIdKeyDictionary()
running: list[SubscribedModel] = []
"""Models whose forward is running in PyTorch, innermost last."""
running_again: list[RunAgain] = []
"""Runs of compiled units by activation checkpointing, innermost last."""
hooks_changed: list[Callable[[Module], None]] = []
"""Functions to call with a user's module whose hooks were added or removed: compiled graphs hold the hooks' code."""
PLACE = "_ort_zero_place"
"""Attribute of modules within a compiled unit: the path from the unit, empty for the unit. An attribute, since layers
with equal attributes share Dynamo's graph."""
_marked = [False]
"""Whether units are marked."""
_KEPT_STEPS = 8
"""Number of steps whose slots are kept for gradients that arrive later."""
_numbers = itertools.count()
_to_close: weakref.WeakSet[SubscriberBase] = weakref.WeakSet()


class GlobalSubscriberManager:
    """The entry point to subscribe to a whole model, wrapped or not."""

    @staticmethod
    def subscribe(model: Module, subscribers: Iterable[SubscriberBase]) -> SubscribedModel:
        """Call `subscribers` in every step of `model` from now on. Each rank whose values are wanted must call.

        Args:
            model: a module, or an ORTModule, DistributedDataParallel or DeepSpeed engine around a module. A second call
                for the same module adds subscribers.
            subscribers: instances of :class:`SubscriberBase`, each for one model only.

        Returns:
            The model with its subscribers; :meth:`SubscribedModel.remove` removes all subscribers.
        """
        root = unwrapped(model)
        kinds = {base.__name__ for base in type(model).__mro__}
        if "DistributedDataParallel" in kinds:
            remember(root, data_parallel=True)
        if "DeepSpeedEngine" in kinds:
            remember(root, ds_config=ds_compat.config_dict(model))
        if root not in _by_root:
            _by_root[root] = SubscribedModel(root)
        _by_root[root].add(tuple(subscribers))
        return _by_root[root]


def unwrapped(model: Any) -> Module:
    """Return the user's module inside of ORTModule, DistributedDataParallel, DeepSpeed's engine, ``torch.compile``."""
    while True:
        kind = {base.__name__ for base in type(model).__mro__}
        if kind & {"ORTModule", "DistributedDataParallel", "DeepSpeedEngine", "DataParallel"}:
            model = model.module
        elif "OptimizedModule" in kind:
            model = inside_of_compiled(model)
        else:
            return model


def remember(model: Module, **facts: Any) -> None:
    """Remember facts about a model, wrapped or not, for the manifests of its runs.

    The facts are the `zero_stage` of the engine around it, `data_parallel` if all ranks are replicas, its `ds_config`,
    and its `backend`.
    """
    _facts.setdefault(unwrapped(model), {}).update(facts)


def remembered(root: Module) -> dict[str, Any]:
    """Return what :func:`remember` was told about a user's module."""
    return _facts.get(root, {})


def inspect_activation(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Show a tensor inside a ``forward`` to subscribers; the code must use the returned tensor from there on.

    Args:
        name: name of the tensor in the records; use the same name in all runs that are compared.
        tensor: any tensor; its gradient is shown too, if backward computes one.
    """
    if torch.compiler.is_dynamo_compiling() and _capture_inspected(name, tensor):
        return tensor
    return running[-1].inspect(name, tensor) if running else tensor


def subscribed_model_of(root: Module) -> SubscribedModel | None:
    """Return a user's module with its subscribers, None if it has no subscribers."""
    return _by_root.get(root)


def subscribed_models_in(module: Module) -> list[SubscribedModel]:
    """Return each module with subscribers among `module` and its submodules."""
    if not _by_root:
        return []
    return [model for part in modules_of(module) if (model := _by_root.get(part)) is not None]


@dataclass
class RunAgain:
    """A run of a compiled unit within a backward."""

    model: SubscribedModel
    unit: Module
    slots: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of tensors so far, by path of the module, kind and name."""


class SubscribedModel:
    """The subscribers of one model, the user's module `root`, and the number of the model's step."""

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
        self.calls = CallTracker(root)
        self._slots: dict[int, tuple[list[TensorSlot], tuple[SubscriberBase, ...]]] = {}
        """The slots of the last steps, and the subscribers that act on gradients in them, by the number of the step."""
        self._handles: list[RemovableHandle] = []

    @property
    def root(self) -> Module | None:
        """The user's module; None after the module was deleted."""
        return self._root()

    def add(self, subscribers: tuple[SubscriberBase, ...]) -> None:
        """Add subscribers, and hook the modules if these are the first subscribers."""
        self.subscribers += subscribers
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

    def _begin_step(self) -> None:
        """Begin a step; close subscribers whose `end_step` is reached."""
        self.step += 1
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
        self._slots[self.step] = self.calls.slots, self._for_gradients
        self._slots.pop(self.step - _KEPT_STEPS, None)
        for subscriber in self.active:
            subscriber.pre_forward_model_apply(self.step, self.root)

    def show_tensor(self, slot: TensorSlot, tensor: torch.Tensor, *, gradient: bool = True) -> torch.Tensor | None:
        """Show the active subscribers a tensor, and, unless `gradient` is False, later the tensor's gradient.

        Returns:
            The tensor that subscribers returned as a replacement, None if no subscriber replaced the tensor.
        """
        shown = tensor
        for subscriber in self.active:
            new = subscriber.forward_slot_apply(self.step, slot, shown)
            shown = shown if new is None else new
        if gradient and slot.source < 0 and self._for_gradients and shown.requires_grad and torch.is_grad_enabled():
            self._expect_gradient(slot, shown)
        return None if shown is tensor else shown

    def show_gradient_of(self, step: int, order: int, gradient: torch.Tensor) -> None:
        """Show the gradient of a slot to the subscribers that were active in `step`; a step long past is left out."""
        slots, subscribers = self._slots.get(step, ([], ()))
        for subscriber in subscribers:
            subscriber.gradient_slot_apply(step, slots[order], gradient)

    def _expect_gradient(self, slot: TensorSlot, tensor: torch.Tensor) -> None:
        step, subscribers = self.step, self._for_gradients

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
            if _is_captured(module):
                return _capture(module, "input", _slots_in((args, kwargs)))
            here = reference()
            return None if here is None else here._before(module, args, kwargs)

        def after(module: Module, args: tuple, kwargs: dict, outputs: Any) -> Any:
            if _is_captured(module):
                return _capture(module, "output", _slots_in((outputs,)))
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
            self._begin_step()
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
            for subscriber in self.active:
                subscriber.post_forward_model_apply(self.step, self.root, outputs)
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
                self._expect_gradient(slots[-1], tensor)

        map_slots(expect, outputs)


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


# --- operators that Dynamo captures in place of the hooks' Python code ------------------------------------------------


def mark_places(unit: Module) -> None:
    """Mark the modules of a compiled unit: Dynamo captures their hooks when it traces the unit the next time."""
    for path, module in unit.named_modules():
        setattr(module, PLACE, path)
    _marked[0] = True


def _is_captured(module: Any) -> bool:
    """Return True within Dynamo's trace of a marked unit, for the modules in the unit."""
    return torch.compiler.is_dynamo_compiling() and bool(getattr(module, PLACE, None))


def _capture_inspected(name: str, tensor: torch.Tensor) -> bool:
    """Add a tensor of ``inspect_activation`` to the graph; return False if no unit is marked. Dynamo traces this."""
    if not _marked[0]:
        return False
    torch.ops.ort_zero.observe.default(tensor, "", "inspect", name, False, False)
    return True


def _capture(module: Module, kind: str, slots: list[tuple[str, torch.Tensor]]) -> None:
    """Add the tensors of a module call to the graph that Dynamo captures; to be traced by Dynamo."""
    place = getattr(module, PLACE)
    last = len(slots) - 1
    for index, (name, tensor) in enumerate(slots):
        begins, ends = kind == "input" and index == 0, kind == "output" and index == last
        torch.ops.ort_zero.observe.default(tensor, place, kind, name, begins, ends)


def _slots_in(values: tuple) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in each of the values with their slots; Dynamo traces the function."""
    slots: list[tuple[str, torch.Tensor]] = []
    for value in values:
        map_slots(lambda name, tensor: slots.append((name, tensor)), value)
    return slots
