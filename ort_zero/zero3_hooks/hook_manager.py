"""Register the actions of subscribers as hooks on a tree of modules, and remove the hooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ort_zero.zero3_hooks.subscriber_base import ModuleSubscriber


@dataclass(slots=True)
class Handles:
    """The handles of registered hooks, in the order of registration."""

    module: list[RemovableHandle] = field(default_factory=list)
    tensor: list[RemovableHandle] = field(default_factory=list)

    def remove(self) -> None:
        """Remove the hooks of all handles."""
        for handle in (*self.module, *self.tensor):
            handle.remove()


class SubscriberManager:
    """A manager that registers subscribers on root modules and keeps the handles of their hooks.

    Children come before their parent. On one module the order is: module action before forward, module action after
    forward, tensor action after forward, tensor action before forward. This is DeepSpeed's order, so that hooks of the
    manager and hooks of DeepSpeed see the same values.
    """

    def __init__(self, subscribers: Iterable[ModuleSubscriber]):
        self.subscribers = tuple(subscribers)
        self.handles: list[Handles] = []

    def register(self, root: Module) -> Handles:
        """Register the hooks of every subscriber on `root` and the modules below; after an error, none.

        A module that is reachable on two paths gets its hooks twice, as in DeepSpeed.
        """
        handles = Handles()
        try:
            for subscriber in self.subscribers:
                _register(subscriber, root, handles)
        except BaseException:
            handles.remove()
            raise
        self.handles.append(handles)
        return handles

    def remove(self) -> None:
        """Remove every hook that this manager has registered."""
        for handles in self.handles:
            handles.remove()
        self.handles.clear()


def _register(subscriber: ModuleSubscriber, module: Module, handles: Handles) -> None:
    for child in subscriber.children(module):
        _register(subscriber, child, handles)
    subscriber.prepare(module)

    # Functions, not bound methods: deepcopy of a hooked module would copy a bound method's subscriber with its process
    # groups and streams, but it does not copy functions.
    def before_module(module: Module, args: tuple) -> Any:
        return subscriber.pre_forward_module_apply(module, args)

    def after_module(module: Module, args: tuple, outputs: Any) -> Any:
        return subscriber.post_forward_module_apply(module, args, outputs)

    def after_tensors(module: Module, args: tuple, outputs: Any) -> Any:
        return subscriber.post_forward_tensors(module, args, outputs)

    def before_tensors(module: Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return subscriber.pre_forward_tensors(module, args, kwargs)

    handles.module.append(module.register_forward_pre_hook(before_module))
    handles.module.append(module.register_forward_hook(after_module))
    handles.tensor.append(module.register_forward_hook(after_tensors))
    handles.tensor.append(module.register_forward_pre_hook(before_tensors, with_kwargs=True))
