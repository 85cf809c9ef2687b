"""Subscribes to whole models: counts their steps, and shows subscribers each tensor at its place in the step.

Where PyTorch runs the model, module hooks do it. Where ONNX Runtime does, the graph has nodes that show the values
(see :mod:`ort_zero.statistics.collect.graph_readers`), and the runtime tells when a step begins and ends.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ort_zero.compat.torch_modules import inside_of_compiled
from ort_zero.log import get_logger
from ort_zero.statistics.collect.module_calls import Place, Walk
from ort_zero.utils.tree_map import map_arguments, map_slots
from ort_zero.zero3_hooks.hook_manager import is_paused
from ort_zero.zero3_hooks.subscriber_base import SubscriberBase

_sessions: weakref.WeakKeyDictionary[Module, Session] = weakref.WeakKeyDictionary()
_stages: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()
_running: list[Session] = []
"""Models whose forward runs at the moment, innermost last."""
tracer: list[Callable[[str, torch.Tensor], torch.Tensor]] = []
"""What :func:`inspect_activation` does while a graph is made; put here by the layer that makes graphs."""


class GlobalSubscriberManager:
    """Subscribes to the modules of a whole model, wrapped or not."""

    @staticmethod
    def subscribe(model: Module, subscribers: Iterable[SubscriberBase]) -> Session:
        """Have `subscribers` act in every step of `model` from now on. Every rank that wants to be seen must call.

        Args:
            model: a module, an ORTModule, DistributedDataParallel or DeepSpeed engine around one; the module inside is
                meant. A second call adds to the first.
            subscribers: what acts; each for one model.

        Returns:
            The session; its :meth:`Session.remove` takes everything off again.
        """
        root = unwrapped(model)
        session = _sessions.get(root)
        if session is None:
            session = _sessions[root] = Session(root)
        session.add(tuple(subscribers))
        return session


def unwrapped(model: Any) -> Module:
    """Return the user's own module inside the wrappers of ORTModule, DDP, DeepSpeed and ``torch.compile``."""
    while True:
        kind = {base.__name__ for base in type(model).__mro__}
        if kind & {"ORTModule", "DistributedDataParallel", "DeepSpeedEngine", "DataParallel"}:
            model = model.module
        elif "OptimizedModule" in kind:
            model = inside_of_compiled(model)
        else:
            return model


def sessions_of(module: Module) -> list[Session]:
    """Return the sessions of a module and of those below it."""
    if not _sessions:
        return []
    return [session for part in module.modules() if (session := _sessions.get(part)) is not None]


def session_of(root: Module) -> Session | None:
    """Return the session of a user's module."""
    return _sessions.get(root)


def note_stage(model: Module, stage: int) -> None:
    """Remember the ZeRO stage of the engine around a model, for those who subscribe to the model alone."""
    _stages[unwrapped(model)] = stage


def stage_of(session: Session) -> int:
    """Return the ZeRO stage under which the session's model trains; 0 without DeepSpeed."""
    return _stages.get(session.root, 0)


def inspect_activation(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Show subscribers a tensor within a ``forward``; use the returned one from there on, it is the same.

    Args:
        name: what it is called in the records, the same in every run that is to be compared.
        tensor: any tensor; its gradient is shown too if it has one.
    """
    if tracer:
        return tracer[-1](name, tensor)
    if is_paused() or not _running:
        return tensor
    return _running[-1].inspect(name, tensor)


class Session:
    """The subscribers of one model.

    Args:
        root: the user's module.
    """

    def __init__(self, root: Module):
        # weakly, and hooks hold the session weakly: neither keeps the other alive
        self._root = weakref.ref(root)
        self.subscribers: tuple[SubscriberBase, ...] = ()
        self.active: tuple[SubscriberBase, ...] = ()
        """Those that act in the step that runs."""
        self._to_gradients: tuple[SubscriberBase, ...] = ()
        """Those of them that act on gradients."""
        self.step = -1
        """The step that runs, or that ran last."""
        self.backend = "torch"
        self.walk = Walk(root)
        self._handles: list[RemovableHandle] = []

    @property
    def root(self) -> Module:
        """The user's module."""
        return self._root()

    def add(self, subscribers: Sequence[SubscriberBase]) -> None:
        """Add subscribers; hooks come with the first."""
        self.subscribers += tuple(subscribers)
        _closing.update(subscribers)
        if not self._handles:
            self._register()

    def remove(self) -> None:
        """Take every hook off and close the subscribers. May come twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        subscribers, self.subscribers, self.active = self.subscribers, (), ()
        for subscriber in subscribers:
            subscriber.close()
        if self.root is not None and _sessions.get(self.root) is self:
            del _sessions[self.root]

    # -- a step -----------------------------------------------------------------------------------------------------

    def begin(self, backend: str = "torch") -> None:
        """Begin a step."""
        self.step += 1
        self.backend = backend
        self.active = tuple(s for s in self.subscribers if s.is_active(self.step))
        over = [s for s in self.subscribers if s.end_step is not None and s.end_step <= self.step]
        for subscriber in over:
            subscriber.close()
        if over and len(over) == len(self.subscribers):
            self.remove()
            return
        self._to_gradients = tuple(s for s in self.active if s.acts_on_gradients())
        if not self.active:
            return
        self.walk.begin()
        for subscriber in self.active:
            subscriber.pre_forward_model_apply(self.step, self.root)

    def end(self, outputs: Any) -> None:
        """End the forward of a step."""
        for subscriber in self.active:
            subscriber.post_forward_model_apply(self.step, self.root, outputs)

    def show(self, place: Place, tensor: torch.Tensor, *, gradient: bool = True) -> torch.Tensor | None:
        """Show the active subscribers a tensor; return what they put in its place."""
        shown = tensor
        for subscriber in self.active:
            new = subscriber.forward_place(self.step, place, shown)
            shown = shown if new is None else new
        if gradient and place.source < 0 and self._to_gradients and shown.requires_grad and torch.is_grad_enabled():
            self._expect_gradient(self.step, place, shown)
        return None if shown is tensor else shown

    def show_gradient(self, step: int, place: Place, gradient: torch.Tensor) -> None:
        """Show those that were active in `step` a gradient."""
        if step == self.step:
            subscribers = self._to_gradients
        else:
            subscribers = tuple(s for s in self.subscribers if s.is_active(step) and s.acts_on_gradients())
        for subscriber in subscribers:
            subscriber.backward_place(step, place, gradient)

    def _expect_gradient(self, step: int, place: Place, tensor: torch.Tensor) -> None:
        subscribers = self._to_gradients

        # not the session: it holds the model, and the hook lives as long as the graph
        def arrived(gradient: torch.Tensor) -> None:
            for subscriber in subscribers:
                subscriber.backward_place(step, place, gradient)

        tensor.register_hook(arrived)

    def inspect(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Show a tensor that the code of a module names itself."""
        call = self.walk.running
        if not self.active or call is None:
            return tensor
        result = self.show(self.walk.place(tensor, call, "inspect", name), tensor)
        return tensor if result is None else result

    # -- hooks for PyTorch ------------------------------------------------------------------------------------------

    def _register(self) -> None:
        session = weakref.ref(self)

        # functions that hold the session weakly: a copy of the module must not copy it
        def before(module: Module, args: tuple, kwargs: dict) -> Any:
            here = session()
            return None if here is None or is_paused() else here._before(module, args, kwargs)

        def after(module: Module, args: tuple, kwargs: dict, outputs: Any) -> Any:
            here = session()
            return None if here is None or is_paused() else here._after(module, outputs)

        for module in self.root.modules():
            # before the hooks of others: ZeRO-3 sends inputs through a Function of its own, and what flows back there
            # is only what the module itself gives back
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        # a forward that raises leaves nothing open that the next one would take for its caller
        self._handles.append(self.root.register_forward_hook(functools.partial(_ended, session), always_call=True))

    def _before(self, module: Module, args: tuple, kwargs: dict) -> Any:
        if module is self.root:
            self.begin()
            if not self._handles:
                return None  # the last step of all subscribers was the one before
            _running.append(self)
        if not self.active or not (module is self.root or self.walk.running):
            return None
        call = self.walk.enter(module)
        given = args, kwargs
        for subscriber in self.active:
            result = subscriber.pre_forward_module_apply(module, args)
            args = args if result is None else result
        args, kwargs = map_arguments(
            lambda slot, tensor: self.show(self.walk.place(tensor, call, "input", slot), tensor), args, kwargs
        )
        same = args is given[0] and all(kwargs[key] is given[1][key] for key in kwargs)
        return None if same else (args, kwargs)

    def _after(self, module: Module, outputs: Any) -> Any:
        if not self.active:
            return None
        call = self.walk.leave(module)
        if call is None:
            self._recomputing(module, outputs)
            return None
        given = outputs
        for subscriber in self.active:
            result = subscriber.post_forward_module_apply(module, (), outputs)
            outputs = outputs if result is None else result
        outputs = map_slots(
            lambda slot, tensor: self.show(self.walk.place(tensor, call, "output", slot), tensor), outputs
        )
        if module is self.root:
            self.end(outputs)
        return None if outputs is given else outputs

    def _recomputing(self, module: Module, outputs: Any) -> None:
        """Await the gradients of a module that activation checkpointing runs again within the backward.

        Where the first run kept no graph, as in reentrant checkpointing, gradients flow through these tensors.
        """
        if not torch.is_grad_enabled():
            return
        path = self.walk.path_of(module)
        first = {p.slot: p for p in self.walk.places if p.call.path == path and p.kind == "output"}

        def expect(slot: str, tensor: torch.Tensor) -> None:
            if tensor.requires_grad and slot in first and first[slot].source < 0:
                self._expect_gradient(self.step, first[slot], tensor)

        map_slots(expect, outputs)


def _ended(session: weakref.ref, module: Module, args: tuple, outputs: Any) -> None:
    here = session()
    if here is not None and not is_paused() and here in _running:
        while _running.pop() is not here:
            pass


_closing: weakref.WeakSet[SubscriberBase] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for subscriber in list(_closing):
        try:
            subscriber.close()
        except Exception as error:
            get_logger().warning("%s was not closed: %s", type(subscriber).__name__, error)


def places_shown(walk: Walk) -> dict[int, list[Place]]:
    """Return all places of each tensor, by the order of the first of them."""
    own = {place.order: [place] for place in walk.places if place.source < 0}
    for place in walk.places:
        if place.source >= 0:
            own[place.source].append(place)
    return own
