"""What can be done around the forward of each module: override the actions that matter, leave the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class SubscriberBase:
    """Actions around the forward of every module below a root; every one does nothing until overridden.

    Module actions see a module's whole inputs or outputs. Tensor actions see one tensor of them at a time and may
    return another in its place. An action that returns None changes nothing.
    """

    def children(self, module: Any) -> Iterable[Any]:
        """Return the submodules to descend into; an empty iterable makes `module` a leaf."""
        return module.children()

    def prepare(self, module: Any) -> None:
        """Get `module` ready, once per registration, before any hook of ours is on it."""

    def pre_forward_module_apply(self, module: Any, args: tuple) -> Any:
        """Act before the forward of `module`; a value that is not None replaces `args`."""

    def post_forward_module_apply(self, module: Any, args: tuple, outputs: Any) -> Any:
        """Act after the forward of `module`; a value that is not None replaces `outputs`."""

    def pre_forward_tensor_apply(self, module: Any, tensor: Any) -> Any:
        """Act on one input tensor of `module`; a value that is not None replaces it."""

    def post_forward_tensor_apply(self, module: Any, tensor: Any) -> Any:
        """Act on one output tensor of `module`; a value that is not None replaces it."""

    def pre_forward_tensors(self, module: Any, args: tuple) -> Any:
        """Apply the tensor action to each tensor in `args`; runs after the module action."""
        return map_tensors(lambda tensor: self.pre_forward_tensor_apply(module, tensor), args)

    def post_forward_tensors(self, module: Any, args: tuple, outputs: Any) -> Any:
        """Apply the tensor action to each tensor in `outputs`; runs after the module action."""
        return map_tensors(lambda tensor: self.post_forward_tensor_apply(module, tensor), outputs)

    def acts_on_inputs(self) -> bool:
        """Return True if a tensor action on inputs was overridden, so that tensors need to be visited at all."""
        return self._overrides("pre_forward_tensor_apply", "pre_forward_tensors")

    def acts_on_outputs(self) -> bool:
        """Return True if a tensor action on outputs was overridden, so that tensors need to be visited at all."""
        return self._overrides("post_forward_tensor_apply", "post_forward_tensors")

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(SubscriberBase, name) for name in names)


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with every tensor in its tuples, lists and dicts replaced by what `function` returned for it.

    None keeps the tensor. Containers keep their type; anything else is passed through.
    """
    if isinstance(value, (tuple, list)):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        # In place: dict subclasses, such as transformers' ModelOutput, cannot be rebuilt from items alone.
        for key in value:
            value[key] = map_tensors(function, value[key])
        return value
    if hasattr(value, "requires_grad") and hasattr(value, "detach"):
        result = function(value)
        return value if result is None else result
    return value
