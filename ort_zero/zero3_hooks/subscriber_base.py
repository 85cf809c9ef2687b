"""Define the base class of actions around the forward of each module, for :class:`~.hook_manager.SubscriberManager`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ModuleSubscriber:
    """The actions around the forward of every module below a root; none does anything until it is overridden.

    An action that returns None changes nothing. Users' subscribers have a base class of their own,
    :class:`ort_zero.statistics.collect.subscriber_base.SubscriberBase`.
    """

    def children(self, module: Any) -> Iterable[Any]:
        """Return the submodules to descend into; an empty iterable makes `module` a leaf."""
        return module.children()

    def prepare(self, module: Any) -> None:
        """Prepare `module`, once per registration, before its hooks are registered."""

    def pre_forward_module_apply(self, module: Any, args: tuple) -> Any:
        """Act before the forward of `module`; a value that is not None replaces `args`."""

    def post_forward_module_apply(self, module: Any, args: tuple, outputs: Any) -> Any:
        """Act after the forward of `module`; a value that is not None replaces `outputs`."""

    def pre_forward_tensors(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Act on the tensors in the arguments, after the module action; a value that is not None replaces both."""

    def post_forward_tensors(self, module: Any, args: tuple, outputs: Any) -> Any:
        """Act on the tensors in `outputs`, after the module action; a value that is not None replaces `outputs`."""
