"""What can be done around the forward of each module: override the actions that matter, leave the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ort_zero.utils.tree_map import map_tensors


class SubscriberBase:
    """Actions around the forward of every module below a root; every one does nothing until overridden.

    Module actions see a module's whole inputs or outputs. Tensor actions see one tensor of them at a time and may
    return another in its place. An action that returns None changes nothing.

    Subscribed through ``GlobalSubscriberManager``, the actions run in the steps from
    :attr:`start_step` on and before :attr:`end_step`. Where ONNX Runtime runs the model, no module is called: the
    actions on the model run, and those on tensors with the values of the graph, which they may look at, not replace.
    """

    start_step: int = 0
    """The first step, a call of the whole model, in which the actions run; the first one is 0."""
    end_step: int | None = None
    """The step before which they stop; None: never."""

    def pre_forward_model_apply(self, step: int, model: Any) -> None:
        """Act before the forward of the whole model."""

    def post_forward_model_apply(self, step: int, model: Any, outputs: Any) -> None:
        """Act after the forward of the whole model."""

    def gradient_tensor_apply(self, module: Any, gradient: Any) -> None:
        """Look at the gradient of one input or output tensor of `module`, when backward has it."""

    def forward_place(self, step: int, place: Any, tensor: Any) -> Any:
        """Act on one tensor at its ``Place``; by default by the tensor actions."""
        if place.kind == "input":
            return self.pre_forward_tensor_apply(place.module, tensor)
        if place.kind == "output":
            return self.post_forward_tensor_apply(place.module, tensor)
        return None

    def backward_place(self, step: int, place: Any, gradient: Any) -> None:
        """Act on the gradient at a place; by default by :meth:`gradient_tensor_apply`."""
        self.gradient_tensor_apply(place.module, gradient)

    def acts_on_gradients(self) -> bool:
        """Return True if an action on gradients was overridden."""
        return self._overrides("gradient_tensor_apply", "backward_place")

    def acts_on_places(self) -> bool:
        """Return True if an action on tensors or gradients was overridden."""
        names = ("pre_forward_tensor_apply", "post_forward_tensor_apply", "forward_place")
        return self._overrides(*names) or self.acts_on_gradients()

    def is_active(self, step: int) -> bool:
        """Return True if the actions run in `step`."""
        return self.start_step <= step and (self.end_step is None or step < self.end_step)

    def close(self) -> None:
        """Finish; called when the subscriber is taken off, when its last step is over and at exit. May come twice."""

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
