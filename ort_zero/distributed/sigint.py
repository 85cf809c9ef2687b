"""Hold SIGINT back while ranks exchange values: an interrupted rank would leave where the others wait for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _DeferredInterrupt:
    """The handler that defers SIGINT and stores whether the signal came."""

    current: _DeferredInterrupt | None = None
    pending = False

    def __init__(self, previous: Any):
        self.previous = previous

    def __call__(self, number: int, frame: Any) -> None:
        self.pending = True


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer SIGINT to the end of the block, but in :func:`interrupts_delivered`; do nothing outside the main thread."""
    main = threading.current_thread() is threading.main_thread()
    if not main or _DeferredInterrupt.current is not None or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    hold = _DeferredInterrupt.current = _DeferredInterrupt(signal.getsignal(signal.SIGINT))
    try:
        signal.signal(signal.SIGINT, hold)
        yield
    finally:
        _DeferredInterrupt.current = None
        signal.signal(signal.SIGINT, hold.previous)
        if hold.pending:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupts_delivered() -> Iterator[None]:
    """Deliver SIGINT again inside of :func:`interrupts_deferred`, a pending signal at once."""
    hold = _DeferredInterrupt.current
    if hold is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, hold.previous)
    try:
        if hold.pending:
            hold.pending = False
            signal.raise_signal(signal.SIGINT)
        yield
    finally:
        signal.signal(signal.SIGINT, hold)
