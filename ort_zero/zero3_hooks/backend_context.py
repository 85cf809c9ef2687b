"""Tell whether ZeRO-3 hooks are set up for an engine with an enabled section.

Without one DeepSpeed's own code runs unchanged. DeepSpeed sets hooks up deep inside ``deepspeed.initialize``, hence a
context variable and not an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_has_section: ContextVar[bool] = ContextVar("ort_zero_has_section", default=False)


def has_section() -> bool:
    """Return True while ZeRO-3 hooks are set up for an engine with a section."""
    return _has_section.get()


@contextmanager
def with_section() -> Iterator[None]:
    """Set up ZeRO-3 hooks through the subscriber of ort_zero within the ``with`` block."""
    token = _has_section.set(True)
    try:
        yield
    finally:
        _has_section.reset(token)
