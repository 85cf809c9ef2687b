"""Which engine runs the model whose ZeRO-3 hooks are being set up.

``None``: no ``"ort_zero"`` section, DeepSpeed's own code runs unchanged. ``"torch"``: PyTorch, through our subscriber.
``"ort"``: ONNX Runtime; the hooks are on the user's module all the same, for direct calls. DeepSpeed sets hooks up deep
inside ``deepspeed.initialize``, hence a context variable and not an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MODES = (None, "torch", "ort")

_mode: ContextVar[str | None] = ContextVar("ort_zero_hook_mode", default=None)


def current() -> str | None:
    """Return the mode in which ZeRO-3 hooks are set up at the moment."""
    return _mode.get()


def check(mode: str | None) -> str | None:
    """Return `mode` if it is one of :data:`MODES`.

    Raises:
        ValueError: it is not.
    """
    if mode not in MODES:
        raise ValueError(f"unknown hook mode {mode!r}: must be one of {', '.join(map(repr, MODES))}")
    return mode


@contextmanager
def use(mode: str | None) -> Iterator[None]:
    """Set up ZeRO-3 hooks for `mode` within the ``with`` block.

    Raises:
        ValueError: `mode` is not one of :data:`MODES`.
    """
    token = _mode.set(check(mode))
    try:
        yield
    finally:
        _mode.reset(token)
