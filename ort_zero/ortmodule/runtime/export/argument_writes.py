"""Carries what a submodule in PyTorch writes into the containers and objects among its arguments to its caller.

Such a submodule is one node of the graph, and each of its runs is given containers and objects of its own. What it
writes there becomes further results of the node, which the caller's trace applies to the caller's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.compat.torch_modules import is_view
from ort_zero.ortmodule.runtime.export import attribute_writes, left_behind, pytree, structures
from ort_zero.ortmodule.runtime.export.argument_changes import ArgumentChanges
from ort_zero.ortmodule.runtime.export.attribute_paths import ATTRIBUTE, Place, attributes_of, step_into
from ort_zero.ortmodule.runtime.export.attribute_writes import DELETE, SET


class ResultAndChanges(NamedTuple):
    """What a node returns whose code writes into its arguments."""

    result: Any
    changes: dict[tuple[Place, str], Any]
    """The values that are written, by the place and how they are written."""
    tensors: dict[int, torch.Tensor]
    """New values of the tensors among the arguments that are changed in place, by their index."""


class NotCarried(Exception):
    """A submodule writes into an argument in a way that is no result of its node."""


def has_changes(structure: structures.Structure) -> bool:
    """Return whether a node with results of this structure writes into its arguments."""
    return getattr(structure, "kind", None) is ResultAndChanges


class ArgumentWrites:
    """The arguments of one run of a node, before it.

    Args:
        args: positional arguments, built for this run.
        kwargs: keyword arguments.
        objects: ``id()`` of the objects that were built for this run.
        tensors: the tensors among the arguments.
        opaque: the caller's own objects among the arguments, which cannot be taken apart.
        drop_caches: whether changes of caches of keys and values do not count.
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict,
        objects: Iterable[int],
        tensors: Sequence[torch.Tensor],
        opaque: Iterable[Any],
        *,
        drop_caches: bool,
    ):
        self._drop_caches = drop_caches
        self._changes = ArgumentChanges(args, kwargs, frozenset(objects), drop_caches=drop_caches)
        self._tensors = tensors
        self._versions = [version_of(tensor) for tensor in tensors]
        self._opaque = [value for value in opaque if attributes_of(value) is not None and not isinstance(value, type)]
        self._before = self._tensors_in_opaque()  # keeps them alive, so that no other one has the id() of one of them

    def flatten(self, result: Any) -> tuple[list[torch.Tensor], structures.Structure]:
        """Return the tensors of a result and of what was written since, and the structure of both.

        Raises:
            NotCarried: a tensor was written into an object that cannot be taken apart.
        """
        known = {id(tensor) for tensor in self._before}
        if any(id(tensor) not in known for tensor in self._tensors_in_opaque()):
            raise NotCarried("writes a tensor into an object among its arguments")
        changes = {(change.place, change.how): change.value for change in self._changes.found()}
        changed = self.changed()
        if changes and changed:
            raise NotCarried("writes into its arguments, and changes tensors among them in place")
        if changes or changed:
            result = ResultAndChanges(result, changes, {i: self._tensors[i] for i in changed})
        given = {id(holder): (place,) for place, holder in self._changes.holders()}
        try:
            found = pytree.flatten(result, drop_caches=self._drop_caches, given=given)
        except TypeError as error:
            if changes or changed:
                raise NotCarried(f"writes into its arguments, and {error}") from None
            raise
        # a node without outputs would not run
        return found if found[0] or changes or changed else pytree.flatten(result, drop_caches=self._drop_caches)

    def changed(self) -> list[int]:
        """Return the indices of the tensors that were changed in place since."""
        pairs = enumerate(zip(self._tensors, self._versions, strict=True))
        return [i for i, (tensor, version) in pairs if version_of(tensor) != version]

    def _tensors_in_opaque(self) -> list[torch.Tensor]:
        return [
            slot.value
            for value in self._opaque
            for slot in (
                left_behind.slots_of(value)
                if isinstance(value, torch.nn.Module)
                else left_behind.slots_in(value, lambda tensor: not isinstance(tensor, torch.nn.Parameter))
            )
        ]


def unflatten(
    tensors: Sequence[torch.Tensor], structure: Any, given: pytree.Call, args: tuple, kwargs: dict, drop_caches: bool
) -> Any:
    """Return the result of a node, and apply to the caller's arguments what the node has written into its own.

    Args:
        tensors: outputs of the node.
        structure: from :meth:`ArgumentWrites.flatten`.
        given: the flattened call.
        args: the caller's positional arguments.
        kwargs: its keyword arguments.
        drop_caches: as for :class:`ArgumentWrites`.

    Raises:
        NotCarried: one of the containers is given twice, and so would be two of them for the node.
    """
    values: Any = _ValuesAt((args, kwargs))
    value = pytree.unflatten(tensors, structure, given.objects, call=values)
    if not isinstance(value, ResultAndChanges):
        return value
    for i, changed in value.tensors.items():
        if is_view(given.tensors[i]):
            raise NotCarried("changes a view of a tensor in place")
        given.tensors[i].copy_(changed)
    if not value.changes:
        return value.result
    if ArgumentChanges(args, kwargs, {id(value) for value in given.objects}, drop_caches=drop_caches).shared:
        raise NotCarried("writes into its arguments, of which one container is given twice")
    targets = [(values[place.holder if how in (SET, DELETE) else place], place, how) for place, how in value.changes]
    for (holder, place, how), written in zip(targets, value.changes.values(), strict=True):
        _write(holder, place, how, written)
    return value.result


class _ValuesAt:
    """Looks up the values at places of a call's arguments as items.

    Args:
        call: positional and keyword arguments.
    """

    def __init__(self, call: tuple[tuple, dict]):
        self._call = call

    def __getitem__(self, place: Place) -> Any:
        value: Any = self._call
        for kind, key in place.steps:
            value = step_into(value, kind, key)[0]
        return value


def _write(holder: Any, place: Place, how: str, value: Any) -> None:
    """Apply one change; attributes are set as code does it, which a trace that records the caller's writes notices."""
    kind, name = place.steps[-1]
    if kind == ATTRIBUTE and how in (SET, DELETE):
        try:
            setattr(holder, name, value) if how == SET else delattr(holder, name)
        except AttributeError:  # one that is frozen, whose own methods may set it anyway
            attribute_writes.write(holder, place, how, value)
    else:
        attribute_writes.write(holder, place, how, value)
