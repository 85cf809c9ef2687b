"""Tell which backend runs the model whose ZeRO-3 hooks are being set up.

``None``: no ``"ort_zero"`` section, DeepSpeed's own code runs unchanged. ``"torch"``: PyTorch, with the subscriber of
ort_zero. ``"ort"``: ONNX Runtime; the user's module still gets the hooks, for direct calls. DeepSpeed sets hooks up
deep inside ``deepspeed.initialize``, hence a context variable and not an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

BACKENDS = (None, "torch", "ort")

_backend: ContextVar[str | None] = ContextVar("ort_zero_backend", default=None)


def current_backend() -> str | None:
    """Return the backend for which ZeRO-3 hooks are set up at the moment."""
    return _backend.get()


@contextmanager
def running_in(backend: str | None) -> Iterator[None]:
    """Set up ZeRO-3 hooks for a model that runs in `backend` within the ``with`` block.

    Raises:
        ValueError: `backend` is not one of :data:`BACKENDS`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: must be one of {', '.join(map(repr, BACKENDS))}")
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)
