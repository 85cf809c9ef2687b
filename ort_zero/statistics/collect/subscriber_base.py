"""The base class of users' subscribers: override the actions that matter, leave the others."""

from __future__ import annotations

from typing import Any


class SubscriberBase:
    """Actions in each step of a model that was subscribed to; every one does nothing until it is overridden.

    ``GlobalSubscriberManager`` calls the actions in the steps from :attr:`start_step` on and before :attr:`end_step`; a
    step is one call of the whole model. Module actions see a module's whole inputs or outputs. Tensor actions see one
    tensor of them at a time. An action that returns None changes nothing.

    Where PyTorch runs the model, all actions are called, and what a module or tensor action returns takes the place of
    what it was given. Where ONNX Runtime runs it, no module is called: the actions on the model are called, and those
    on tensors and gradients with the values of the graph, which they may look at and not replace.
    """

    start_step: int = 0
    """The first step in which the actions run; the first step of a model is 0."""
    end_step: int | None = None
    """The step before which the actions stop; None for never."""

    def is_active(self, step: int) -> bool:
        """Return True if the actions run in `step`."""
        return self.start_step <= step and (self.end_step is None or step < self.end_step)

    def close(self) -> None:
        """Finish; called when the subscriber is removed, when its last step is over and at exit. May come twice."""

    # -- actions ----------------------------------------------------------------------------------------------------

    def pre_forward_model_apply(self, step: int, model: Any) -> None:
        """Act before the forward of the whole model, the user's own module without wrappers."""

    def post_forward_model_apply(self, step: int, model: Any, outputs: Any) -> None:
        """Act after the forward of the whole model, with what it returned."""

    def pre_forward_module_apply(self, module: Any, args: tuple) -> Any:
        """Act before the forward of `module`; a value that is not None replaces `args`, its positional arguments."""

    def post_forward_module_apply(self, module: Any, args: tuple, outputs: Any) -> Any:
        """Act after the forward of `module`; a value that is not None replaces `outputs`.

        Args:
            module: the module that was called.
            args: the positional arguments that its forward was called with.
            outputs: what it returned.
        """

    def pre_forward_tensor_apply(self, module: Any, tensor: Any) -> Any:
        """Act on one input tensor of `module`; a value that is not None replaces it."""

    def post_forward_tensor_apply(self, module: Any, tensor: Any) -> Any:
        """Act on one output tensor of `module`; a value that is not None replaces it."""

    def gradient_tensor_apply(self, module: Any, gradient: Any) -> None:
        """Look at the gradient of one input or output tensor of `module`, when backward has computed it."""

    def forward_slot_apply(self, step: int, slot: Any, tensor: Any) -> Any:
        """Act on one tensor, with its ``TensorSlot``; by default by the tensor action on inputs or outputs."""
        if slot.kind == "input":
            return self.pre_forward_tensor_apply(slot.module, tensor)
        if slot.kind == "output":
            return self.post_forward_tensor_apply(slot.module, tensor)
        return None

    def gradient_slot_apply(self, step: int, slot: Any, gradient: Any) -> None:
        """Look at the gradient of the tensor in a ``TensorSlot``; by default by :meth:`gradient_tensor_apply`."""
        self.gradient_tensor_apply(slot.module, gradient)

    # -- which actions there are ------------------------------------------------------------------------------------

    def acts_on_gradients(self) -> bool:
        """Return True if an action on gradients was overridden."""
        return self._overrides("gradient_tensor_apply", "gradient_slot_apply")

    def acts_on_tensors(self) -> bool:
        """Return True if an action on tensors or gradients was overridden, so that a graph needs readers at all."""
        names = ("pre_forward_tensor_apply", "post_forward_tensor_apply", "forward_slot_apply")
        return self._overrides(*names) or self.acts_on_gradients()

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(SubscriberBase, name) for name in names)
