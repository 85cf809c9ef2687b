"""What a forward leaves in attributes and containers, as further outputs of the graph that each run writes again.

The recorder (:mod:`.attribute_reads`) notes in a trace what is written; here it is taken apart into tensors and
structure, as results are. After each run a forward call carries it out. ``self.aux_loss = loss``,
``self.losses.append(loss)`` and ``self.stats["loss"] = loss`` then have PyTorch's effect, gradients included.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from ort_zero.ortmodule.runtime.export import plain_objects, pytree, structures
from ort_zero.ortmodule.runtime.export.attribute_paths import (
    ATTRIBUTE,
    MISSING,
    Place,
    PlaceFinder,
    attributes_of,
    is_slot,
)
from ort_zero.ortmodule.utils.containers import items_held

SET, ADD, DELETE, EXTEND, UPDATE, REFILL = "set", "add", "delete", "extend", "update", "refill"
"""An attribute gets a value; a number is added to it; it is deleted; a list gets more items; a dict gets other items; a
container gets other contents altogether."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A change that a traced forward makes.

    Attributes:
        place: of the attribute, or of the container.
        how: one of :data:`SET`, :data:`ADD`, :data:`DELETE`, :data:`EXTEND`, :data:`UPDATE`, :data:`REFILL`.
        value: what is written, with tensors of the trace.
        module: the innermost module that ran; None if it is not known.
    """

    place: Place
    how: str
    value: Any
    module: torch.nn.Module | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AttributeWrite:
    """A change that a forward call carries out after each run of the graph."""

    place: Place
    how: str
    structure: structures.Structure
    """Structure of the value, whose tensors are numbered by :attr:`tensors`."""
    tensors: tuple[tuple[str, int, bool], ...]
    """Of each tensor of the value: ``"output"`` or ``"argument"``, its index there, and whether it has a gradient."""

    def carry_out(self, finder: PlaceFinder, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """Write the value of a run.

        Args:
            finder: finds places of the model.
            outputs: outputs of the graph.
            given: tensors of the call's arguments.
        """
        tensors = []
        for source, index, with_gradient in self.tensors:
            tensor = outputs[index] if source == OUTPUT else given[index]
            tensors.append(tensor if with_gradient or source == ARGUMENT else tensor.detach())
        holder = finder.value_at(self.place if self.how in (EXTEND, UPDATE, REFILL) else self.place.holder)
        if holder is not MISSING:
            write(holder, self.place, self.how, pytree.unflatten(tensors, self.structure))


def write(holder: Any, place: Place, how: str, value: Any) -> None:
    """Carry out one change.

    Args:
        holder: the container, or the object or container whose attribute or item is written.
        place: of the attribute, item or container.
        how: see :class:`Change`.
        value: what is written; of no account for :data:`DELETE`.
    """
    if how == DELETE:
        with contextlib.suppress(AttributeError, KeyError):  # the caller may have done so since
            _delete(holder, *place.steps[-1])
        return
    if how in (SET, ADD):
        _put(holder, *place.steps[-1], value, add=how == ADD)
        return
    if how == REFILL:
        holder.clear()
    if isinstance(holder, dict):
        for key, item in value.items():  # some classes of dicts forbid update()
            holder[key] = item
    else:
        holder.extend(value)


OUTPUT, ARGUMENT = "output", "argument"


class Numbers(Protocol):
    """Knows which attributes are Python numbers."""

    def number_type(self, place: Place) -> type | None:
        """Return the type of the number, None if the attribute is none."""


class NotWritable(Exception):
    """A value that a forward writes cannot be an output of the graph."""

    def __init__(self, change: Change, why: str):
        super().__init__(why)
        self.change = change


def container_change(place: Place, container: Any, before: Any) -> tuple[str, Any]:
    """Return how a container has changed in a trace, and its new items.

    Args:
        place: of the container.
        container: a list, dict or deque, as it is now.
        before: a copy of what it held, a dict or a list.
    """
    now = items_held(container)
    if isinstance(container, dict):
        if before.keys() <= now.keys():
            return UPDATE, {key: value for key, value in now.items() if before.get(key, MISSING) is not value}
        return REFILL, now
    start = 0
    if isinstance(container, collections.deque) and container.maxlen is not None and len(now) == container.maxlen:
        # what it has dropped at its other end it drops by itself
        start = next(i for i in range(len(before) + 1) if _starts_with(now, before[i:]))
    if _starts_with(now, before[start:]):
        return EXTEND, now[len(before) - start :]
    return REFILL, now


def same_items(one: Any, other: Any, without: Collection[Any] = ()) -> bool:
    """Return whether two containers hold the very same items, those with the keys or indices `without` left out."""
    one, other = items_held(one), items_held(other)
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and (other[key] is value or key in without) for key, value in one.items())
    return all(a is b or i in without for i, (a, b) in enumerate(zip(one, other, strict=True)))


def _starts_with(items: Sequence[Any], start: Sequence[Any]) -> bool:
    return len(items) >= len(start) and all(a is b for a, b in zip(items, start, strict=False))


class Outputs:
    """Takes apart what a traced forward has written, and collects the tensors as outputs of the graph.

    Args:
        results: tensors of the forward's result, the first outputs.
        given: tensors of the arguments.
        constants: ``id()`` of the tensors that are written as the very objects they are: parameters, buffers, and what
            the containers held before.
        numbers: tells which attributes are Python numbers when PyTorch runs the module; None if nobody knows.
        sizes: tells which tensors of the trace are numbers; None for none.
    """

    def __init__(
        self,
        results: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        constants: Collection[int],
        numbers: Numbers | None,
        sizes: pytree.SizesAsNumbers | None = None,
    ):
        self._sizes = sizes
        self._first = len(results)
        self._sources = {id(tensor): (ARGUMENT, i) for i, tensor in enumerate(given)}
        for i, tensor in enumerate(results):
            self._sources.setdefault(id(tensor), (OUTPUT, i))
        self._constants = constants
        self._numbers = numbers
        self.tensors: list[torch.Tensor] = []
        """Tensors that are further outputs, behind the results."""

    def write(self, change: Change, *, drop_caches: bool) -> AttributeWrite:
        """Return what carries out a change after each run.

        Raises:
            NotWritable: the value cannot be taken apart.
        """
        if drop_caches and plain_objects.is_cache(change.value):
            raise NotWritable(change, "caches of keys and values are left out in training")
        try:
            found, structure = pytree.flatten(
                change.value, drop_caches=drop_caches, constants=self._constants, sizes=self._sizes
            )
        except TypeError as error:
            raise NotWritable(change, str(error)) from None
        kind = self._numbers.number_type(change.place) if self._numbers is not None else None
        if kind is not None and isinstance(change.value, torch.Tensor):
            structure = structures.number_of(kind)
        sources = []
        for tensor in found:
            known = self._sources.get(id(tensor))
            if known is None:
                known = self._sources[id(tensor)] = (OUTPUT, self._first + len(self.tensors))
                self.tensors.append(tensor)
            sources.append((*known, tensor.requires_grad))
        return AttributeWrite(change.place, change.how, structure, tuple(sources))


def _delete(holder: Any, kind: str, key: Any) -> None:
    if kind == ATTRIBUTE:
        object.__delattr__(holder, key)
    else:
        del holder[key]


def _put(holder: Any, kind: str, key: Any, value: Any, *, add: bool) -> None:
    """Give an attribute or an item of `holder` a value, or add that to the number that it is."""
    own = attributes_of(holder) if kind == ATTRIBUTE else None
    if kind != ATTRIBUTE:
        holder[key] = holder[key] + value if add else value
        return
    now = getattr(holder, key) + value if add else value
    slot = next((vars(cls)[key] for cls in type(holder).__mro__ if key in vars(cls)), None)
    if own is None or is_slot(slot):
        object.__setattr__(holder, key, now)
    else:
        own[key] = now
