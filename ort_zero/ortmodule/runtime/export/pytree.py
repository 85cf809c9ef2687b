"""Flattens arguments and results of any type into tensors and a structure, and builds the very types again.

An ONNX graph takes and returns a flat list of tensors; modules take and return nested containers, dataclasses, caches
of keys and values, and any object that merely passes through. ``torch.utils._pytree`` knows types that were registered;
this flattens those that nobody registered too. Called at each forward call (:func:`flatten_call`), in each export, and
where the runtime returns the result.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ort_zero.errors import LayoutError
from ort_zero.ortmodule.runtime.export.plain_objects import (
    PLAIN,
    attributes_in,
    bare,
    holds_tensors,
    is_cache,
    is_plain,
)
from ort_zero.ortmodule.runtime.export.structures import (
    ConstantLeaf,
    GivenLeaf,
    HeldLeaf,
    MappingNode,
    NumberLeaf,
    ObjectNode,
    Reference,
    SequenceNode,
    SizeLeaf,
    Structure,
    TensorLeaf,
    is_number,
    named_arguments,
    positional_names,
)

_MOST_LEVELS = 12
"""Maximum depth of nested containers and objects that are flattened; what lies deeper is one constant."""


class SizesAsNumbers(Protocol):
    """Knows which tensors of a trace are Python numbers outside of it."""

    def includes(self, value: Any) -> bool:
        """Return whether a value is such a tensor."""

    def kind_of(self, tensor: torch.Tensor) -> type:
        """Return the type of the number."""

    def plain(self, key: Any) -> Any:
        """Return a key of a mapping with Python numbers in the place of such tensors."""


def flatten(
    value: Any,
    *,
    drop_caches: bool,
    known: Mapping[int, int] | None = None,
    constants: Collection[int] = (),
    sizes: SizesAsNumbers | None = None,
    given: Mapping[int, tuple] | None = None,
    held: Mapping[int, str] | None = None,
) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors in a module's result and the structure to put it together again.

    A tensor that occurs twice is one tensor.

    Args:
        value: what the module returned.
        drop_caches: leave caches of keys and values out (they come back as None). Training ignores them, and as graph
            outputs they would keep every layer's keys and values alive.
        known: number by ``id()`` of the objects among the module's arguments.
        constants: ``id()`` of the tensors that are returned as the very objects they are.
        sizes: tells which tensors are numbers; None for none.
        given: path by ``id()`` of the tensors and containers that come back as the caller's own.
        held: name by ``id()`` of the parameters and buffers that come back as the module's own.

    Raises:
        TypeError: a tensor hides in an object that cannot be taken apart.
    """
    flattener = _Flattener(
        drop_caches=drop_caches, known=known or {}, constants=constants, sizes=sizes, given=given or {}, held=held or {}
    )
    return flattener.tensors, flattener(value, "")


def unflatten(
    tensors: Sequence[Any],
    structure: Structure,
    originals: Sequence[Any] = (),
    call: tuple[tuple, dict] = ((), {}),
    held: Callable[[str], torch.Tensor | None] = lambda name: None,
) -> Any:
    """Return the value that `structure` describes, of the very types that the module returned.

    Args:
        tensors: the tensors in the order of :func:`flatten`.
        structure: from :func:`flatten`.
        originals: the caller's objects by number; a result that is one of them is that object, with new attributes.
        call: positional and keyword arguments of the call.
        held: returns a parameter or buffer by its name; None where its value stands among `tensors` only.
    """
    return _Unflattener(tensors, originals, numbers=True, call=call, held=held)(structure)


def value_in_call(call: tuple[tuple, dict], path: tuple) -> Any:
    """Return what the keys of `path` lead to from ``(args, kwargs)``."""
    value: Any = call
    for key in path:
        value = value[key]
    return value


@dataclasses.dataclass(slots=True)
class Call:
    """One call of a module, flattened."""

    tensors: list[torch.Tensor]
    names: list[str]
    """Name of each tensor: ``"input_ids"``, ``"states_0_hidden"``."""
    structure: tuple
    """Compares equal for calls that differ in their tensors only. Shapes and dtypes are no part of it."""
    objects: list[Any]
    """The caller's own objects by number."""


def flatten_call(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Sequence[inspect.Parameter],
    numbers: Collection[str] = (),
    as_tensor: Callable[[int | float], torch.Tensor] = torch.tensor,
) -> Call:
    """Return the tensors in the arguments of a call, their names, and the structure of everything else.

    A tensor that is given twice is one tensor of the result.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        parameters: parameters of the module's ``forward``; they name the positional arguments.
        numbers: names of arguments whose numbers are tensors of the result instead of constants.
        as_tensor: makes a tensor of a number.

    Raises:
        TypeError: an argument has a type whose contents cannot be guarded; names the argument.
    """
    flattener = _Flattener(inputs=True)

    def flattened(value: Any, name: str) -> Structure:
        if name not in numbers or not is_number(value):
            return flattener(value, name)
        flattener.tensors.append(as_tensor(value))
        flattener.names.append(name)
        return NumberLeaf(len(flattener.tensors) - 1, type(value))

    positional = tuple(flattened(value, name) for name, value in zip(positional_names(len(args), parameters), args))
    keyword = tuple((name, flattened(value, name)) for name, value in kwargs.items())
    return Call(flattener.tensors, flattener.names, (positional, keyword), flattener.objects)


def unflatten_call(tensors: Sequence[Any], structure: tuple) -> tuple[tuple, dict[str, Any], dict[int, int]]:
    """Return args, kwargs, and the numbers of the objects that were built for them, by ``id()``."""
    unflattener = _Unflattener(tensors, ())
    positional, keyword = structure
    args = tuple(unflattener(item) for item in positional)
    kwargs = {name: unflattener(item) for name, item in keyword}
    return args, kwargs, {id(built): number for number, built in unflattener.built.items()}


def first_tensor(value: Any, depth: int = 4) -> torch.Tensor | None:
    """Return the first tensor with an axis in nested containers; None if there is none."""
    if isinstance(value, torch.Tensor):
        return value if value.dim() else None
    if depth and isinstance(value, (list, tuple, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            found = first_tensor(part, depth - 1)
            if found is not None:
                return found
    return None


def number_arguments(structure: tuple, parameters: Sequence[inspect.Parameter]) -> dict[str, int]:
    """Return the index of the tensor of each argument whose number is a tensor, by the argument's name."""
    named = named_arguments(structure, parameters)
    return {name: item.index for name, item in named if isinstance(item, NumberLeaf)}


class _Flattener:
    """Flattens one value; calling it returns the structure, and collects the tensors."""

    def __init__(
        self,
        *,
        inputs: bool = False,
        drop_caches: bool = False,
        known: Mapping[int, int] | None = None,
        constants: Collection[int] = (),
        sizes: SizesAsNumbers | None = None,
        given: Mapping[int, tuple] | None = None,
        held: Mapping[int, str] | None = None,
    ):
        self._constants = constants
        self._sizes = sizes
        self._given = given or {}
        self._held = held or {}
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.objects: list[Any] = []
        self._inputs = inputs
        self._drop_caches = drop_caches
        self._known = known or {}
        self._tensors: dict[int, TensorLeaf] = {}
        self._numbers: dict[int, int] = {}

    def __call__(self, item: Any, name: str, depth: int = 0) -> Structure:
        if id(item) in self._given:
            return GivenLeaf(self._given[id(item)])
        if isinstance(item, torch.Tensor):
            return ConstantLeaf(item) if id(item) in self._constants else self._tensor(item, name)
        if isinstance(item, PLAIN):
            return ConstantLeaf(item)
        if isinstance(item, torch.Size):
            return self._size(item)
        if is_cache(item) and self._drop_caches:
            return ConstantLeaf(None)
        if depth > _MOST_LEVELS:
            return self._opaque(item, name)
        if isinstance(item, Mapping):
            plain = ((self._sizes.plain(key) if self._sizes else key, val) for key, val in item.items())
            pairs = tuple((key, self(val, f"{name}_{key}", depth + 1)) for key, val in plain)
            return MappingNode(type(item), pairs, getattr(item, "default_factory", None))
        if isinstance(item, (list, tuple, collections.deque)):
            items = tuple(self(val, f"{name}_{i}", depth + 1) for i, val in enumerate(item))
            return SequenceNode(type(item), items, getattr(item, "maxlen", None))
        if id(item) in self._numbers:
            return Reference(self._numbers[id(item)])
        if not is_plain(type(item)) or not (self._inputs or holds_tensors(item, set())):
            return self._opaque(item, name)
        number = self._numbers[id(item)] = len(self.objects)
        self.objects.append(item)
        attributes: list[tuple[str, Structure]] = []
        for attribute, value in attributes_in(item):
            if isinstance(value, torch.nn.Parameter) and not self._inputs:
                attributes.append((attribute, ConstantLeaf(value)))  # it belongs to the module and is no result
            else:
                attributes.append((attribute, self(value, f"{name}_{attribute}", depth + 1)))
        return ObjectNode(type(item), tuple(attributes), number, self._known.get(id(item)))

    def _result(self, item: torch.Tensor) -> Structure:
        leaf = self._tensors.get(id(item))
        if leaf is None:
            leaf = self._tensors[id(item)] = TensorLeaf(len(self.tensors))
            self.tensors.append(item)
        if self._sizes is not None and self._sizes.includes(item):
            return NumberLeaf(leaf.index, self._sizes.kind_of(item))
        return HeldLeaf(leaf.index, self._held[id(item)]) if id(item) in self._held else leaf

    def _tensor(self, item: torch.Tensor, name: str) -> Structure:
        if not self._inputs:
            return self._result(item)
        leaf = self._tensors.get(id(item))
        if leaf is None:
            if item.layout != torch.strided or item.is_nested or item.is_quantized:
                kind = f"{item.layout}" if item.layout != torch.strided else "nested" if item.is_nested else "quantized"
                raise LayoutError(f"argument {name} is a {kind} tensor; ONNX graphs take dense ones")
            leaf = self._tensors[id(item)] = TensorLeaf(len(self.tensors))
            self.tensors.append(item)
            # two paths may spell one name, as "a_b"[0] and "a"["b_0"] do
            self.names.append(name if name not in self.names else f"{name}__{leaf.index}")
        return leaf

    def _size(self, item: torch.Size) -> Structure:
        if self._inputs or not item:
            return ConstantLeaf(item)
        # the tracer's sizes are tensors, and another batch has others
        sizes = [size if isinstance(size, torch.Tensor) else torch.tensor(size) for size in item]
        self.tensors.append(torch.stack(sizes))
        return SizeLeaf(len(self.tensors) - 1)

    def _opaque(self, item: Any, name: str) -> ConstantLeaf:
        if self._inputs:
            _refuse_unguardable(item, name)
        elif holds_tensors(item, set()):
            raise TypeError(
                f"the module returns a {type(item).__module__}.{type(item).__qualname__}, which holds tensors and "
                "cannot be taken apart; return a tuple, list, dict or dataclass"
            )
        return ConstantLeaf(item)


class _Unflattener:
    """Builds one value from tensors and a structure."""

    def __init__(
        self,
        tensors: Sequence[Any],
        originals: Sequence[Any],
        *,
        numbers: bool = False,
        call: tuple[tuple, dict] = ((), {}),
        held: Callable[[str], torch.Tensor | None] = lambda name: None,
    ):
        self._call = call
        self._held = held
        self._tensors = tensors
        self._originals = originals
        self._numbers = numbers
        self.built: dict[int, Any] = {}

    def __call__(self, item: Structure) -> Any:
        if isinstance(item, TensorLeaf):
            return self._tensors[item.index]
        if isinstance(item, NumberLeaf):
            return item.kind(self._tensors[item.index].item()) if self._numbers else self._tensors[item.index]
        if isinstance(item, ConstantLeaf):
            return item.value
        if isinstance(item, GivenLeaf):
            return value_in_call(self._call, item.path)
        if isinstance(item, HeldLeaf):
            own = self._held(item.name)
            return self._tensors[item.index] if own is None else own
        if isinstance(item, SizeLeaf):
            return torch.Size(self._tensors[item.index].tolist())
        if isinstance(item, SequenceNode):
            items = [self(part) for part in item.items]
            if issubclass(item.kind, collections.deque):
                return item.kind(items, item.maxlen)
            return item.kind._make(items) if hasattr(item.kind, "_make") else item.kind(items)
        if isinstance(item, MappingNode):
            return self._mapping(item)
        if isinstance(item, Reference):
            return self.built[item.number]
        if item.origin is not None:
            result = self._originals[item.origin]
        else:
            result = bare(item.kind)
        self.built[item.number] = result
        for name, part in item.items:
            object.__setattr__(result, name, self(part))
        return result

    def _mapping(self, item: MappingNode) -> Any:
        items = {key: self(part) for key, part in item.items}
        if dataclasses.is_dataclass(item.kind):  # transformers' ModelOutput
            return item.kind(**items)
        if issubclass(item.kind, defaultdict):
            return item.kind(item.default, items)
        return item.kind(items)


def _refuse_unguardable(item: Any, name: str) -> None:
    """Raise for an argument whose contents may change without our seeing it: the graph would keep the first ones."""
    kind = f"{type(item).__module__}.{type(item).__qualname__}"
    if isinstance(item, Iterator):
        raise TypeError(f"argument {name} is a {kind}, which can be read only once; pass a list")
    if hasattr(item, "__array_interface__"):
        raise TypeError(f"argument {name} is a {kind}, which the graph would keep as a constant; pass a torch.Tensor")
    if isinstance(item, (set, frozenset)) and any(holds_tensors(part, set()) for part in item):
        raise TypeError(f"argument {name} is a {kind} of tensors, which have no order in it; pass a list")
    if isinstance(item, (bytearray, set)):
        raise TypeError(f"argument {name} is a {kind}, whose changes the graph would not notice; pass a tuple")


def parameters_of(function: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a module's ``forward``."""
    return list(inspect.signature(function).parameters.values())
