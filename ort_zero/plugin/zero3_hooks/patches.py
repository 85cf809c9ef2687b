"""Patch how DeepSpeed sets ZeRO-3's hooks up: for engines with an enabled section, by a subscriber.

DeepSpeed does that deep inside ``deepspeed.initialize``, so a context variable tells whether the engine has a section.
A DeepSpeedZeRoOffload notes the answer, since TRL and ``unwrap_model_for_generation`` register hooks again later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ort_zero.compat import deepspeed_hooks, deepspeed_units
from ort_zero.utils.patching import Patch, around, defined_in

_SUBSCRIBER = "_ort_zero_subscriber"
"""The attribute of offloads with a section."""
_in_section: ContextVar[bool] = ContextVar("ort_zero_in_section", default=False)


@contextmanager
def with_section() -> Iterator[None]:
    """Set up ZeRO-3 hooks through the subscriber of ort_zero within the ``with`` block."""
    token = _in_section.set(True)
    try:
        yield
    finally:
        _in_section.reset(token)


def has_section(offload: Any) -> bool:
    """Return True if the hooks of `offload` were set up for an engine with a section."""
    return _SUBSCRIBER in vars(offload)


def _setup(original: Any, self: Any) -> None:
    """Register the ZeRO-3 hooks of a module: DeepSpeed's, or with an ``"ort_zero"`` section the subscriber's."""
    if not _in_section.get():
        vars(self).pop(_SUBSCRIBER, None)
        original(self)
        return
    from ort_zero.plugin.zero3_hooks.subscriber import ZeROOffloadSubscriber

    subscriber = vars(self).setdefault(_SUBSCRIBER, ZeROOffloadSubscriber(self))
    self.hierarchy = 0
    self.fwd_pre_hook = self.module.register_forward_pre_hook(subscriber.hooks["_start_of_forward_hook"])
    self._register_deepspeed_module(self.module)  # with the method that the class has now, patched or not
    deepspeed_hooks.modules_in_forward().append(self.module)
    deepspeed_units.hand_gradients_on(self.module)


def _register(original: Any, self: Any, module: Any, count: list[int] | None = None) -> None:
    """Register hooks on `module` and below, as this offload was set up."""
    if count is None:
        count = deepspeed_hooks.shared_count(original)
    if not has_section(self):
        original(self, module, count)
        return
    coordinator = self.get_param_coordinator()
    if module is self.module and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()  # DeepSpeed records which weights are fetched in which order again
    deepspeed_hooks.number_modules(module, count)
    getattr(self, _SUBSCRIBER).register(module)


def _destroy(original: Any, self: Any) -> None:
    """Remove the hooks, and for an engine with the section all references that keep its model alive."""
    original(self)
    if has_section(self):
        deepspeed_hooks.forget(self)


def _guard(original: Any) -> None:
    defined_in(deepspeed_hooks.MODULE)(original)
    deepspeed_hooks.probe(original)


PATCHES = tuple(
    Patch(target=f"{deepspeed_hooks.OFFLOAD}.{name}", build=around(function), why=why, guard=guard)
    for name, function, why, guard in (
        ("setup_zero_stage3_hooks", _setup, "ZeRO-3 hooks fit the engine that runs the model", _guard),
        ("_register_deepspeed_module", _register, "hooks that are registered again stay with it", _guard),
        ("destroy", _destroy, "a destroyed engine keeps no model alive", defined_in(deepspeed_hooks.MODULE)),
    )
)
