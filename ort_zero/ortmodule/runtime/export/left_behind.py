"""Finds the tensors with a gradient that a submodule in PyTorch leaves behind in its attributes.

Such a submodule is one node of the graph, and autograd knows the tensors that it computes inside of the node only. They
become further results of the node, and of the graph; after each run the graph's own tensors take their place.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ort_zero.ortmodule.compat.torch_modules import buffer_table, parameter_table
from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.runtime.export.attribute_paths import attributes_of
from ort_zero.ortmodule.runtime.export.attribute_records import MOST_ITEMS
from ort_zero.ortmodule.runtime.export.functions_with_values import has_readable_attributes
from ort_zero.ortmodule.utils.containers import items_held

_INTERNAL = frozenset(vars(torch.nn.Module()))
_DEPTH = 4
"""Number of containers and objects through which tensors are looked for, from an attribute of a module on."""


class Slot:
    """A place in a container, or an attribute, that holds tensors with a gradient.

    Args:
        container: a dict or list.
        key: into the container.
        value: what is there: a tensor, or a tuple that holds some.
    """

    def __init__(self, container: Any, key: Any, value: Any):
        self._container, self._key = container, key
        self.value = value

    def fill(self, value: Any) -> None:
        """Put another value in the place of this one, if this one is still there."""
        with contextlib.suppress(LookupError):
            if self._container[self._key] is self.value:
                self._container[self._key] = value


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None


def slots_of(module: torch.nn.Module, wanted: Callable[[torch.Tensor], bool] = _has_gradient) -> list[Slot]:
    """Return the places below `module` that hold tensors that are `wanted`, besides its parameters and buffers."""
    slots: list[Slot] = []
    seen: set[int] = set()
    for child in module.modules():
        own = vars(child)
        for name in own.keys() - _INTERNAL:
            _look(own, name, own[name], 0, seen, slots, wanted)
    return slots


def slots_in(value: Any, wanted: Callable[[torch.Tensor], bool]) -> list[Slot]:
    """Return the attributes of an object, and the places below them, that hold tensors that are `wanted`."""
    slots: list[Slot] = []
    own = attributes_of(value) or {}
    for name in list(own):
        _look(own, name, own[name], 0, {id(value)}, slots, wanted)
    return slots


def put_back_weights(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Put the parameters of `module` in the places where a run with other `weights` has left those behind.

    The recurrent layers of torch keep lists of their weights.
    """
    names = {id(tensor): name for name, tensor in weights.items()}
    own: dict[str, torch.Tensor] = {}
    for slot in slots_of(module, lambda tensor: id(tensor) in names):
        own = own or dict(module.named_parameters(remove_duplicate=False))
        if isinstance(slot.value, torch.Tensor) and names[id(slot.value)] in own:
            slot.fill(own[names[id(slot.value)]])


@contextlib.contextmanager
def parameters_stay_registered(module: torch.nn.Module) -> Iterator[None]:
    """Register as parameters after the block what the forward has registered again as buffers.

    That is what becomes of a parameter in the place of which a plain tensor stands in the block, where the forward
    takes it away and brings it back, as ``torch.nn.utils.parametrize`` does.
    """
    before = [(child, items_held(parameter_table(child))) for child in module.modules()]
    try:
        yield
    finally:
        for child, parameters in before:
            now, buffers = parameter_table(child), buffer_table(child)
            for name in [name for name in buffers if name in parameters and name not in now]:
                del buffers[name]
                now[name] = parameters[name]


def put_in_place(module: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> None:
    """Put other tensors into the places where a run has left some.

    Args:
        module: the module that has run.
        tensors: what is put there, by the ``id()`` of what may be there.
    """
    for slot in slots_of(module, lambda tensor: id(tensor) in tensors) if tensors else ():
        if isinstance(slot.value, torch.Tensor):
            slot.fill(tensors[id(slot.value)])


def _look(
    container: Any,
    key: Any,
    value: Any,
    depth: int,
    seen: set[int],
    slots: list[Slot],
    wanted: Callable[[torch.Tensor], bool],
) -> None:
    if isinstance(value, torch.Tensor):
        if wanted(value):
            slots.append(Slot(container, key, value))
        return
    if isinstance(value, (str, int, float, torch.nn.Module)) or value is None or depth > _DEPTH or id(value) in seen:
        return
    if isinstance(value, tuple):
        if any(map(wanted, _tensors_in(value))):
            slots.append(Slot(container, key, value))
        return
    seen.add(id(value))
    if isinstance(value, (list, dict, collections.deque)):
        if len(value) <= MOST_ITEMS:
            for inner in list(value) if isinstance(value, dict) else range(len(value)):
                _look(value, inner, value[inner], depth + 1, seen, slots, wanted)
    elif isinstance(value, SimpleNamespace) or (not isinstance(value, type) and has_readable_attributes(value)):
        own = attributes_of(value)
        for name in list(own or ()):
            assert own is not None
            _look(own, name, own[name], depth + 1, seen, slots, wanted)


def _tensors_in(value: tuple) -> Sequence[torch.Tensor]:
    try:
        return pytree.flatten(value, drop_caches=True)[0]
    except TypeError:
        return []


class LeftBehind:
    """What one run of a submodule has left behind.

    Args:
        module: the submodule, before it runs.
    """

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._before = slots_of(module)  # holds the tensors, so that no other one has the id() of one of them

    def slots(self) -> list[Slot]:
        """Return the places that hold other tensors with a gradient now."""
        known = {id(slot.value) for slot in self._before}
        return [slot for slot in slots_of(self._module) if id(slot.value) not in known]


_collected: list[list[tuple[int, list[torch.Tensor]]]] = []


@contextlib.contextmanager
def collected() -> Iterator[list[tuple[int, list[torch.Tensor]]]]:
    """Collect what nodes leave behind in the trace that is made in the block: number of the call, and tensors."""
    found: list[tuple[int, list[torch.Tensor]]] = []
    _collected.append(found)
    try:
        yield found
    finally:
        _collected.pop()


def collect(call: int, tensors: list[torch.Tensor]) -> None:
    """Note what the node of a call leaves behind in the trace that is being made."""
    if _collected and tensors:
        _collected[-1].append((call, tensors))


def fill(
    left: Sequence[tuple[int, int]],
    outputs: Sequence[torch.Tensor],
    take: Callable[[int], list[tuple[list[Slot], Any]]],
) -> None:
    """Put the graph's own tensors in the place of those that nodes have left behind.

    Args:
        left: number of the call of each node, and number of its tensors.
        outputs: the tensors, node by node.
        take: returns the places that the runs of a call have filled, and the structure of their values.
    """
    runs: dict[int, Iterator[tuple[list[Slot], Any]]] = {}
    first = 0
    for call, count in left:
        tensors = outputs[first : first + count]
        first += count
        run = next(runs.setdefault(call, iter(take(call))), None)
        if run is not None and run[0]:
            slots, structure = run
            for slot, value in zip(slots, pytree.unflatten(tensors, structure), strict=True):
                slot.fill(value)
