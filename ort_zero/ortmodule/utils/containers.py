"""What lists, dicts and deques hold, whatever their classes make of reading and writing.

A class of dicts may load or build what it is asked for (``ACT2FN`` of transformers holds classes and returns modules):
what its methods return must not be put in the place of what it holds.
"""

from __future__ import annotations

import array
import collections
from typing import Any

UNORDERED = (set, bytearray, array.array)
"""Types of containers that change in place, and whose items have no places that a graph could read."""


def items_held(container: Any) -> Any:
    """Return a copy of what a container holds: a dict of a dict, in its order, a list of a list or deque.

    Of a set, a bytearray or an array it is one of the same kind.
    """
    if isinstance(container, UNORDERED):
        return container.copy() if not isinstance(container, array.array) else container[:]
    if isinstance(container, dict):
        return dict(_kind(container).items(container))
    return list(_kind(container).__iter__(container))


def holds(container: Any, items: Any) -> bool:
    """Return whether a container holds the very items of a copy that :func:`items_held` has made."""
    now = items_held(container)
    if len(now) != len(items):
        return False
    if isinstance(container, UNORDERED):
        return bool(now == items)
    if isinstance(now, dict):
        return list(now) == list(items) and all(now[key] is value for key, value in items.items())
    return all(a is b for a, b in zip(now, items, strict=True))


def put_back(container: Any, items: Any) -> None:
    """Make a container hold the items of a copy again, if it does not."""
    if holds(container, items):
        return
    if isinstance(container, set):
        container.clear()
        container.update(items)
        return
    if isinstance(container, (bytearray, array.array)):
        container[:] = items
        return
    kind = _kind(container)
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in items.items():
            kind.__setitem__(container, key, value)
    else:
        kind.extend(container, items)


def _kind(container: Any) -> Any:
    kinds = collections.OrderedDict, dict, list, collections.deque
    return next(kind for kind in kinds if isinstance(container, kind))
