"""Silence warnings of dependencies about their own internals, which no user can act on.

Each warning is selected by category, text and module; no other warning is silenced. Filters for the whole run are put
behind all others, so that a user who asks for a warning (``-W``, ``filterwarnings``) gets it.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

_AROUND_OUR_WORK = (
    # a CPU build of onnxruntime says that it has no CUDA version
    (UserWarning, r"WARNING: failed to get cudart_version", r"onnxruntime\.capi\.onnxruntime_validation"),
    # ORT's own ZeRO-3 subscriber, which is not used, misses names in current DeepSpeed
    (UserWarning, r"DeepSpeed import error", r"onnxruntime\.training\.utils\.hooks\."),
    # ORTModule reads every attribute of a model, deprecated properties among them
    ((FutureWarning, DeprecationWarning), r"", r"transformers\."),
    ((FutureWarning, DeprecationWarning), r"", r"onnxruntime\."),
)
_WHILE_ENABLED = (
    # the collectives that DeepSpeed calls; torch attributes the warning to its own wrapper, not to the caller
    (
        FutureWarning,
        r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
        r"torch\.distributed\.c10d_logger",
    ),
)
_installed: list[tuple] = []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings from imports and attributes of dependencies in the block, which must not run user code."""
    with warnings.catch_warnings():
        _ignore(_AROUND_OUR_WORK)
        yield


def _ignore(table: tuple, append: bool = False) -> None:
    for categories, message, module in table:
        for category in categories if isinstance(categories, tuple) else (categories,):
            warnings.filterwarnings("ignore", message, category, module, append=append)


@contextlib.contextmanager
def root_logger_kept() -> Iterator[None]:
    """Restore handlers and level of the root logger after the block, in which an import may change them.

    If a handler stayed, a later ``logging.basicConfig`` of the user's program would do nothing.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in list(root.handlers):
            if handler not in handlers:
                root.removeHandler(handler)
        root.setLevel(level)


def silence() -> None:
    """Silence warnings about DeepSpeed's use of torch until :func:`unsilence`."""
    before = list(warnings.filters)
    _ignore(_WHILE_ENABLED, append=True)
    _installed.extend(entry for entry in warnings.filters if entry not in before)


def unsilence() -> None:
    """Remove the filters of :func:`silence`."""
    filters: Any = warnings.filters  # declared as a sequence, documented as a list
    for entry in _installed:
        with contextlib.suppress(ValueError):
            filters.remove(entry)
    _installed.clear()
    # Python remembers decisions of the filters for each line of code; catch_warnings makes it forget them
    with warnings.catch_warnings():
        pass
