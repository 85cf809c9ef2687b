"""Notices what a traced forward changes in containers and objects among its arguments: the caller sees it in PyTorch.

A batch from which the forward pops an item, a list that it appends to, an object whose attributes it sets. Each run of
the graph carries out the same on the caller's own.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ort_zero.ortmodule.runtime.export import attribute_writes, plain_objects
from ort_zero.ortmodule.runtime.export.attribute_paths import ARGUMENT, ATTRIBUTE, ITEM, MISSING, Place
from ort_zero.ortmodule.utils.containers import items_held

_CONTAINERS = (list, dict, collections.deque)


class ArgumentChanges:
    """The arguments of a traced call, with copies of what their containers and objects hold before it.

    Args:
        args: positional arguments, as they are handed to the module.
        kwargs: keyword arguments.
        objects: ``id()`` of the objects among them that stand for objects of the caller's.
        drop_caches: whether changes of caches of keys and values do not count.
    """

    def __init__(self, args: tuple, kwargs: dict, objects: Collection[int], *, drop_caches: bool):
        self._objects = objects
        self._drop_caches = drop_caches
        self._containers: list[tuple[Place, Any, Any]] = []
        self._attributes: list[tuple[Place, Any, dict[str, Any]]] = []
        self.paths: dict[int, tuple] = {}
        """Path from ``(args, kwargs)`` by the ``id()`` of each container and tensor."""
        self.shared = False
        """Whether a container is found at more than one place."""
        self._seen: set[int] = set()
        root = Place((ARGUMENT, ""))
        for side, group in ((0, enumerate(args)), (1, kwargs.items())):
            for key, value in group:
                self._look(value, root.then(ITEM, side).then(ITEM, key), (side, key))

    def _look(self, value: Any, place: Place, path: tuple | None) -> None:
        if isinstance(value, torch.Tensor) and path is not None:
            self.paths.setdefault(id(value), path)
        if id(value) in self._seen:
            self.shared |= isinstance(value, _CONTAINERS)
            return
        if self._drop_caches and plain_objects.is_cache(value):
            return
        if isinstance(value, (*_CONTAINERS, tuple, Mapping)):
            self._seen.add(id(value))
            if isinstance(value, _CONTAINERS):
                self._containers.append((place, value, items_held(value)))
                if path is not None:
                    self.paths[id(value)] = path
            for key, part in list(value.items()) if isinstance(value, Mapping) else list(enumerate(value)):
                self._look(part, place.then(ITEM, key), None if path is None else (*path, key))
        elif id(value) in self._objects:
            self._seen.add(id(value))
            attributes = dict(plain_objects.attributes_in(value))
            self._attributes.append((place, value, attributes))
            for name, part in attributes.items():
                self._look(part, place.then(ATTRIBUTE, name), None)

    def holders(self) -> Iterator[tuple[Place, Any]]:
        """Yield each container and object that a forward may change, with its place."""
        yield from ((place, container) for place, container, _ in self._containers)
        yield from ((place, value) for place, value, _ in self._attributes)

    def found(self) -> Iterator[attribute_writes.Change]:
        """Yield the changes since."""
        for place, container, before in self._containers:
            if not attribute_writes.same_items(container, before):
                yield attribute_writes.Change(place, *attribute_writes.container_change(place, container, before))
        for place, value, before in self._attributes:
            here = dict(plain_objects.attributes_in(value))
            for name in before.keys() - here.keys():
                yield attribute_writes.Change(place.then(ATTRIBUTE, name), attribute_writes.DELETE, None)
            for name, now in here.items():
                if before.get(name, MISSING) is not now:
                    yield attribute_writes.Change(place.then(ATTRIBUTE, name), attribute_writes.SET, now)
