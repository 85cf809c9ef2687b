"""Define the patches by which ort_zero sets up ZeRO-3's hooks, for a :class:`~ort_zero.utils.patching.PatchSet`.

A DeepSpeedZeRoOffload (`offload`) stores the backend that it was set up for, see :mod:`.backend_context`. TRL and
``deepspeed.runtime.zero.unwrap_model_for_generation`` register the hooks again later: then for the same backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ort_zero.compat import deepspeed_hooks, deepspeed_units
from ort_zero.compat.torch_modules import inside_of_ortmodule
from ort_zero.utils.patching import Patch, defined_in
from ort_zero.zero3_hooks import backend_context

_BACKEND = "_ort_zero_backend"
_SUBSCRIBER = "_ort_zero_subscriber"


def backend_of(offload: Any) -> str | None:
    """Return the backend for which the hooks of `offload` were set up."""
    return vars(offload).get(_BACKEND)


def hooked_root(offload: Any) -> Any:
    """Return the module that gets the hooks: the user's module, also if it is inside of an ORTModule.

    ONNX Runtime runs the graph, not the module, so the hooks are for direct calls: HF Trainer evaluates the user's
    module, and a fallback runs it in PyTorch. The hooks are paused while the module is traced.
    """
    module = offload.module
    return inside_of_ortmodule(module)


def _subscriber(offload: Any) -> Any:
    subscriber = vars(offload).get(_SUBSCRIBER)
    if subscriber is None:
        from ort_zero.zero3_hooks.subscriber import ZeROOffloadSubscriber

        subscriber = ZeROOffloadSubscriber(offload)
        setattr(offload, _SUBSCRIBER, subscriber)
    return subscriber


def _build_setup(original: Callable) -> Callable:
    def setup_zero_stage3_hooks(self: Any) -> None:
        """Set the hooks up for the backend that will run the model."""
        current = backend_context.current_backend()
        setattr(self, _BACKEND, current)
        if current is None:
            original(self)
            return
        from ort_zero.zero3_hooks.hook_manager import is_paused

        root = hooked_root(self)
        deepspeed_hooks.register_with_root(self, root, _subscriber(self).hooks, is_paused)
        deepspeed_hooks.push_root(root)
        deepspeed_units.hand_gradients_on(root)

    return setup_zero_stage3_hooks


def _build_register(original: Callable) -> Callable:
    @functools.wraps(original)
    def register_hooks(self: Any, module: Any, count: list[int] | None = None) -> None:
        """Register hooks on `module` and below, for the backend that this offload was set up for."""
        if count is None:
            count = deepspeed_hooks.shared_count(original)
        if backend_of(self) is None:
            original(self, module, count)
            return
        if module is self.module:
            module = hooked_root(self)
            deepspeed_hooks.invalidate_trace(self)
        deepspeed_hooks.number_modules(module, count)
        _subscriber(self).register(module)

    return register_hooks


def _build_destroy(original: Callable) -> Callable:
    def destroy(self: Any) -> None:
        """Remove the hooks, and for an engine with the section all references that keep its model alive."""
        original(self)
        if backend_of(self) is not None:
            deepspeed_hooks.pop_root(hooked_root(self))
            deepspeed_hooks.forget_released(self)

    return destroy


def _build_convert(original: Callable) -> Callable:
    def _convert_to_zero_parameters(self: Any, ds_config: Any, module: Any, mpu: Any) -> None:
        """Partition the parameters; each refers to the user's module, not to the ORTModule of one engine."""
        original(self, ds_config, inside_of_ortmodule(module), mpu)

    return _convert_to_zero_parameters


def _guard(probe: Callable[[Callable], Any]) -> Callable[[Any], None]:
    require_home = defined_in(deepspeed_hooks.MODULE)

    def guard(original: Any) -> None:
        require_home(original)
        probe(original)

    return guard


def patches() -> tuple[Patch, ...]:
    """Return the patches; imports DeepSpeed, since the names of the targets differ between its releases.

    Raises:
        PatchError: DeepSpeed's method that registers the hooks has an unknown name.
    """
    return (
        Patch(
            target=deepspeed_hooks.SETUP_TARGET,
            build=_build_setup,
            why="ZeRO-3 hooks fit the engine that runs the model",
            guard=_guard(deepspeed_hooks.probe_setup),
        ),
        Patch(
            target=deepspeed_hooks.register_target(),
            build=_build_register,
            why="ZeRO-3 hooks that are registered again stay with that engine",
            guard=_guard(deepspeed_hooks.probe),
        ),
        Patch(
            target=deepspeed_hooks.DESTROY_TARGET,
            build=_build_destroy,
            why="a destroyed engine does not keep its model alive",
            guard=defined_in(deepspeed_hooks.MODULE),
        ),
        Patch(
            target=deepspeed_hooks.CONVERT_TARGET,
            build=_build_convert,
            why="a model does not keep a destroyed engine alive",
            guard=defined_in(deepspeed_hooks.MODULE),
        ),
    )
