"""Define the base class of subscribers: override the actions that a subscriber needs."""

from __future__ import annotations

from typing import Any


class SubscriberBase:
    """Actions in each step of a model; an action does nothing until a subclass overrides it.

    ``GlobalSubscriberManager`` calls the actions in the steps from :attr:`start_step` on and before :attr:`end_step`; a
    step is one call of the whole model. Module actions get all inputs or outputs of a module. Tensor actions get one
    input or output tensor at a time. An action that returns None changes nothing.

    In PyTorch all actions are called, and the return value of a module or tensor action replaces its argument. In ONNX
    Runtime no module is called. Model actions are called as in PyTorch, and tensor and gradient actions with the
    values of the graph, which the actions may read but not replace.
    """

    start_step: int = 0
    """The first step in which the actions run; the first step of a model is 0."""
    end_step: int | None = None
    """The first step in which the actions no longer run; None: the actions run until training ends."""

    def is_active(self, step: int) -> bool:
        """Return True if the actions run in `step`."""
        return self.start_step <= step and (self.end_step is None or step < self.end_step)

    def close(self) -> None:
        """Finish; called when the subscriber is removed, after its last step and at exit. May be called twice."""

    def pre_forward_model_apply(self, step: int, model: Any) -> None:
        """Act before the forward of the whole model; `model` is the user's module without wrappers."""

    def post_forward_model_apply(self, step: int, model: Any, outputs: Any) -> None:
        """Act after the forward of the whole model; `outputs` is its return value."""

    def pre_forward_module_apply(self, module: Any, args: tuple) -> Any:
        """Act before the forward of `module`; a value other than None replaces its positional arguments `args`."""

    def post_forward_module_apply(self, module: Any, args: tuple, outputs: Any) -> Any:
        """Act after the forward of `module`; a value other than None replaces `outputs`.

        Args:
            module: the module that was called.
            args: the positional arguments of its forward.
            outputs: the return value of its forward.
        """

    def pre_forward_tensor_apply(self, module: Any, tensor: Any) -> Any:
        """Act on one input tensor of `module`; a value other than None replaces the tensor."""

    def post_forward_tensor_apply(self, module: Any, tensor: Any) -> Any:
        """Act on one output tensor of `module`; a value other than None replaces the tensor."""

    def gradient_tensor_apply(self, module: Any, gradient: Any) -> None:
        """Read the gradient of one input or output tensor of `module`, when backward has computed it."""

    def forward_slot_apply(self, step: int, slot: Any, tensor: Any) -> Any:
        """Act on one tensor with its ``TensorSlot``; by default call the tensor action on inputs or outputs."""
        if slot.kind == "input":
            return self.pre_forward_tensor_apply(slot.call.module, tensor)
        if slot.kind == "output":
            return self.post_forward_tensor_apply(slot.call.module, tensor)
        return None

    def gradient_slot_apply(self, step: int, slot: Any, gradient: Any) -> None:
        """Read the gradient of the tensor of a ``TensorSlot``; by default call :meth:`gradient_tensor_apply`."""
        self.gradient_tensor_apply(slot.call.module, gradient)

    def acts_on_gradients(self) -> bool:
        """Return True if the subclass overrides an action on gradients."""
        names = "gradient_tensor_apply", "gradient_slot_apply"
        return any(getattr(type(self), name) is not getattr(SubscriberBase, name) for name in names)
