"""Flattens arguments and results of any type into tensors and a structure, and builds the very types again.

An ONNX graph takes and returns a flat list of tensors; modules take and return nested containers, dataclasses, caches
of keys and values, and any object that merely passes through. ``torch.utils._pytree`` knows types that were registered;
this flattens those that nobody registered too. Called at each forward call (:func:`flatten_call`), in each export, and
where the runtime returns the result.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import BuiltinMethodType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch

from ort_zero.errors import LayoutError

_MOST_LEVELS = 12
"""Maximum depth of nested containers and objects that are flattened; what lies deeper is one constant."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout, slice)
_COMPARED_BY_VALUE = (*_PLAIN, torch.Size, MethodType, BuiltinMethodType)


@dataclasses.dataclass(frozen=True, slots=True)
class _TensorLeaf:
    """Stands for the i-th tensor of a call or of a result."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Constant:
    """A value that is no tensor. Plain values are compared by type and value, methods by their objects, all others are
    the same or not."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant):
            return NotImplemented
        if self.value is other.value:
            return True
        same = type(self.value) is type(other.value) and isinstance(self.value, _COMPARED_BY_VALUE)
        return same and self.value == other.value


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    """A Python number that the i-th tensor holds, without axes: it changes from call to call."""

    index: int
    kind: type[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """The very tensor or container that the caller has given."""

    path: tuple
    """Keys that lead there from ``(args, kwargs)``."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A parameter or buffer of the module; its value is the i-th tensor too."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    """A ``torch.Size`` whose numbers the i-th tensor holds."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    """A list, tuple, named tuple or deque."""

    kind: type[Any]
    items: tuple
    """The structure of each item, in order."""
    maxlen: int | None = None
    """Maximum number of items of a deque, None for none."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    """A dict, or an object that behaves as one and is built from one."""

    kind: type[Any]
    items: tuple
    """A (key, structure) pair for each entry, in order."""
    default: Any = None
    """The ``default_factory`` of a defaultdict, None for other mappings."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Object:
    """An instance of a class written in Python, by its attributes."""

    kind: type[Any]
    items: tuple
    """An (attribute, structure) pair for each attribute, in order."""
    number: int
    """Counts the objects of one value, so that one that occurs twice, or holds itself, is built once."""
    origin: int | None = None
    """Number of the argument that this result is, changed by the module in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reference:
    """The object that was flattened before under this number."""

    number: int


_NESTED = (_Sequence, _Mapping, _Object)
Structure = _TensorLeaf | _Constant | _Number | _Given | _Held | _Size | _Sequence | _Mapping | _Object | _Reference


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


def with_numbers(structure: Structure, like: Structure) -> Structure:
    """Return the structure of a traced result, in which Python numbers are numbers.

    Args:
        structure: numbers that were computed from sizes are tensors in it.
        like: the structure of the same result when the module runs untraced.
    """
    if isinstance(structure, _TensorLeaf) and isinstance(like, _Constant) and is_number(like.value):
        return _Number(structure.index, type(like.value))
    if isinstance(structure, _NESTED) and isinstance(like, _NESTED) and _same_kind(structure, like):
        if len(structure.items) == len(like.items):
            pairs = zip(structure.items, like.items, strict=True)
            if isinstance(structure, _Sequence):
                return dataclasses.replace(structure, items=tuple(with_numbers(item, other) for item, other in pairs))
            named = tuple(
                (key, with_numbers(item, other[1]) if key == other[0] else item) for (key, item), other in pairs
            )
            return dataclasses.replace(structure, items=named)
    return structure


def number_of(kind: type) -> Structure:
    """Return the structure of a value that is one Python number."""
    return _Number(0, kind)


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
        return _Number(len(flattener.tensors) - 1, type(value))

    positional = tuple(flattened(value, name) for name, value in zip(_positional_names(len(args), parameters), args))
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


def is_number(value: Any) -> bool:
    """Return whether `value` is a Python number, and no bool, which is a switch."""
    return type(value) in (int, float)


def changed_numbers(old: tuple, new: tuple, parameters: Sequence[inspect.Parameter]) -> list[str]:
    """Return the names of the arguments that are numbers in the structures of two calls, and not the same ones."""
    found = []
    for before, after in zip(_named(old, parameters), _named(new, parameters), strict=False):
        (name, one), (other_name, other) = before, after
        if name == other_name and isinstance(one, _Constant) and isinstance(other, _Constant) and one != other:
            found += [name] if is_number(one.value) and type(one.value) is type(other.value) else []
    return found


def number_arguments(structure: tuple, parameters: Sequence[inspect.Parameter]) -> dict[str, int]:
    """Return the index of the tensor of each argument whose number is a tensor, by the argument's name."""
    named = _named(structure, parameters)
    return {name: item.index for name, item in named if isinstance(item, _Number)}


def _named(structure: tuple, parameters: Sequence[inspect.Parameter]) -> list[tuple[str, Structure]]:
    positional, keyword = structure
    return [*zip(_positional_names(len(positional), parameters), positional, strict=False), *keyword]


def differences(old: tuple, new: tuple) -> list[str]:
    """Describe every argument, or part of one, in which the structures of two calls differ."""
    before, after = dict(_arguments(old)), dict(_arguments(new))
    firsts = _first_names(before), _first_names(after)
    found: list[str] = []
    for name in {**before, **after}:
        found += _differences(name, before.get(name), after.get(name), firsts)
    return found


def _arguments(structure: tuple) -> list[tuple[str, Structure]]:
    positional, keyword = structure
    by_position = [(f"arg {i}", item) for i, item in enumerate(positional)]
    return by_position + [(f'"{name}"', item) for name, item in keyword]


def _first_names(arguments: Mapping[str, Structure]) -> dict[int, str]:
    """Return the first place of each tensor, by its number."""
    names: dict[int, str] = {}
    stack = list(reversed(list(arguments.items())))
    while stack:
        name, item = stack.pop()
        if isinstance(item, _TensorLeaf):
            names.setdefault(item.index, name)
        elif isinstance(item, _NESTED):
            stack += [(f"{name}{key}", part) for key, part in reversed(_parts(item))]
    return names


def _differences(name: str, old: Structure | None, new: Structure | None, firsts: tuple[dict, dict]) -> list[str]:
    """Describe the parts in which two structures differ; None is what was not given.

    Args:
        name: ``arg 2`` or ``"labels"``.
        firsts: first place of each tensor, see :func:`_first_names`.
    """
    if old == new:
        return []
    nothing = (None, _Constant(None))
    if isinstance(old, _TensorLeaf) and isinstance(new, _TensorLeaf):
        if firsts[0][old.index] == firsts[1][new.index]:
            return []
        return [f"{_input(name)} is another tensor than before among those given twice"]
    if isinstance(new, _TensorLeaf) and old in nothing:
        return [f"{_input(name)} appeared"]
    if isinstance(old, _TensorLeaf) and new in nothing:
        return [f"{_input(name)} disappeared"]
    if isinstance(old, _NESTED) and isinstance(new, _NESTED) and _same_kind(old, new):
        before, after = dict(_parts(old)), dict(_parts(new))
        found = []
        for key in {**before, **after}:
            found += _differences(f"{name}{key}", before.get(key), after.get(key), firsts)
        return found
    if isinstance(old, _Constant) and isinstance(new, _Constant) and type(old.value) is type(new.value):
        return [f"{name}: {type(new.value).__name__} {described(old)} -> {described(new)}"]
    return [f"{name}: {described(old)} -> {described(new)}"]


def _same_kind(old: _Sequence | _Mapping | _Object, new: _Sequence | _Mapping | _Object) -> bool:
    return type(old) is type(new) and old.kind is new.kind


def _input(name: str) -> str:
    return name if name.startswith("arg ") else f"input {name}"


def _parts(item: _Sequence | _Mapping | _Object) -> list[tuple[str, Structure]]:
    if isinstance(item, _Sequence):
        return [(f"[{i}]", part) for i, part in enumerate(item.items)]
    if isinstance(item, _Mapping):
        return [(f"[{key!r}]", part) for key, part in item.items]
    return [(f".{attribute}", part) for attribute, part in item.items]


def described(item: Structure | None) -> str:
    """Return a word or two for what a structure stands for."""
    if item is None:
        return "not given"
    if isinstance(item, _Constant):
        return repr(item.value)[:40]
    if isinstance(item, _TensorLeaf):
        return "tensor"
    return item.kind.__name__ if hasattr(item, "kind") else "an object"


def types_in(structure: Structure) -> Iterator[type[Any]]:
    """Yield the type of each container, object and constant in a structure, but for caches of keys and values."""
    if isinstance(structure, _Constant):
        yield type(structure.value)
    elif isinstance(structure, (_Sequence, _Mapping, _Object)) and not _is_cache_type(structure.kind):
        yield structure.kind
        for _, part in _parts(structure):
            yield from types_in(part)


def types_in_call(structure: tuple) -> Iterator[type[Any]]:
    """Yield the type of each container, object and constant among the arguments of a call."""
    for _, item in _arguments(structure):
        yield from types_in(item)


def constants_in_call(structure: tuple) -> Iterator[Any]:
    """Yield the values among the arguments of a call that are neither tensors nor containers."""
    stack = [item for _, item in _arguments(structure)]
    while stack:
        item = stack.pop()
        if isinstance(item, _Constant):
            yield item.value
        elif isinstance(item, _NESTED):
            stack += [part for _, part in _parts(item)]


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
        self._tensors: dict[int, _TensorLeaf] = {}
        self._numbers: dict[int, int] = {}

    def __call__(self, item: Any, name: str, depth: int = 0) -> Structure:
        if id(item) in self._given:
            return _Given(self._given[id(item)])
        if isinstance(item, torch.Tensor):
            return _Constant(item) if id(item) in self._constants else self._tensor(item, name)
        if isinstance(item, _PLAIN):
            return _Constant(item)
        if isinstance(item, torch.Size):
            return self._size(item)
        if is_cache(item) and self._drop_caches:
            return _Constant(None)
        if depth > _MOST_LEVELS:
            return self._opaque(item, name)
        if isinstance(item, Mapping):
            plain = ((self._sizes.plain(key) if self._sizes else key, val) for key, val in item.items())
            pairs = tuple((key, self(val, f"{name}_{key}", depth + 1)) for key, val in plain)
            return _Mapping(type(item), pairs, getattr(item, "default_factory", None))
        if isinstance(item, (list, tuple, collections.deque)):
            items = tuple(self(val, f"{name}_{i}", depth + 1) for i, val in enumerate(item))
            return _Sequence(type(item), items, getattr(item, "maxlen", None))
        if id(item) in self._numbers:
            return _Reference(self._numbers[id(item)])
        if not _has_attributes(item) or not (self._inputs or _holds_tensors(item, set())):
            return self._opaque(item, name)
        number = self._numbers[id(item)] = len(self.objects)
        self.objects.append(item)
        attributes: list[tuple[str, Structure]] = []
        for attribute, value in attributes_in(item):
            if isinstance(value, torch.nn.Parameter) and not self._inputs:
                attributes.append((attribute, _Constant(value)))  # it belongs to the module and is no result
            else:
                attributes.append((attribute, self(value, f"{name}_{attribute}", depth + 1)))
        return _Object(type(item), tuple(attributes), number, self._known.get(id(item)))

    def _result(self, item: torch.Tensor) -> Structure:
        leaf = self._tensors.get(id(item))
        if leaf is None:
            leaf = self._tensors[id(item)] = _TensorLeaf(len(self.tensors))
            self.tensors.append(item)
        if self._sizes is not None and self._sizes.includes(item):
            return _Number(leaf.index, self._sizes.kind_of(item))
        return _Held(leaf.index, self._held[id(item)]) if id(item) in self._held else leaf

    def _tensor(self, item: torch.Tensor, name: str) -> Structure:
        if not self._inputs:
            return self._result(item)
        leaf = self._tensors.get(id(item))
        if leaf is None:
            if item.layout != torch.strided or item.is_nested or item.is_quantized:
                kind = f"{item.layout}" if item.layout != torch.strided else "nested" if item.is_nested else "quantized"
                raise LayoutError(f"argument {name} is a {kind} tensor; ONNX graphs take dense ones")
            leaf = self._tensors[id(item)] = _TensorLeaf(len(self.tensors))
            self.tensors.append(item)
            # two paths may spell one name, as "a_b"[0] and "a"["b_0"] do
            self.names.append(name if name not in self.names else f"{name}__{leaf.index}")
        return leaf

    def _size(self, item: torch.Size) -> Structure:
        if self._inputs or not item:
            return _Constant(item)
        # the tracer's sizes are tensors, and another batch has others
        sizes = [size if isinstance(size, torch.Tensor) else torch.tensor(size) for size in item]
        self.tensors.append(torch.stack(sizes))
        return _Size(len(self.tensors) - 1)

    def _opaque(self, item: Any, name: str) -> _Constant:
        if self._inputs:
            _refuse_unguardable(item, name)
        elif _holds_tensors(item, set()):
            raise TypeError(
                f"the module returns a {type(item).__module__}.{type(item).__qualname__}, which holds tensors and "
                "cannot be taken apart; return a tuple, list, dict or dataclass"
            )
        return _Constant(item)


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
        if isinstance(item, _TensorLeaf):
            return self._tensors[item.index]
        if isinstance(item, _Number):
            return item.kind(self._tensors[item.index].item()) if self._numbers else self._tensors[item.index]
        if isinstance(item, _Constant):
            return item.value
        if isinstance(item, _Given):
            return value_in_call(self._call, item.path)
        if isinstance(item, _Held):
            own = self._held(item.name)
            return self._tensors[item.index] if own is None else own
        if isinstance(item, _Size):
            return torch.Size(self._tensors[item.index].tolist())
        if isinstance(item, _Sequence):
            items = [self(part) for part in item.items]
            if issubclass(item.kind, collections.deque):
                return item.kind(items, item.maxlen)
            return item.kind._make(items) if hasattr(item.kind, "_make") else item.kind(items)
        if isinstance(item, _Mapping):
            return self._mapping(item)
        if isinstance(item, _Reference):
            return self.built[item.number]
        if item.origin is not None:
            result = self._originals[item.origin]
        else:
            kind: Any = item.kind
            result = kind.__new__(kind)  # __init__ may want more than the attributes
        self.built[item.number] = result
        for name, part in item.items:
            object.__setattr__(result, name, self(part))
        return result

    def _mapping(self, item: _Mapping) -> Any:
        items = {key: self(part) for key, part in item.items}
        if dataclasses.is_dataclass(item.kind):  # transformers' ModelOutput
            return item.kind(**items)
        if issubclass(item.kind, defaultdict):
            return item.kind(item.default, items)
        return item.kind(items)


def _positional_names(count: int, parameters: Sequence[inspect.Parameter]) -> list[str]:
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind == inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return [*names, *(f"argument_{i}" for i in range(len(names), count))][:count]


def _find_slots(kind: type) -> tuple[str, ...] | None:
    """Return the names in ``__slots__`` of a class that is written in Python all the way; None for others."""
    names: list[str] = []
    for cls in kind.__mro__[:-1]:
        if cls is SimpleNamespace:
            continue
        if cls.__module__ == "builtins" or not cls.__flags__ & (1 << 9):  # Py_TPFLAGS_HEAPTYPE
            return None
        slots = vars(cls).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


_slots_of: Callable[[type], tuple[str, ...] | None] = functools.cache(_find_slots)


def is_plain(kind: type) -> bool:
    """Return whether instances of the class are what their attributes are: no module, function, class or type of C."""
    called = any("__call__" in vars(cls) for cls in kind.__mro__)
    if called or issubclass(kind, (type, torch.nn.Module, ModuleType, Iterator)):
        return False
    plain = kind.__new__ is object.__new__ or issubclass(kind, SimpleNamespace)
    return plain and _slots_of(kind) is not None


def _has_attributes(item: Any) -> bool:
    return is_plain(type(item))


def attributes_in(item: Any) -> list[tuple[str, Any]]:
    """Return the (name, value) pairs of an object's attributes, those in slots first."""
    missing = object()
    slots = [(name, getattr(item, name, missing)) for name in _slots_of(type(item)) or ()]
    return [pair for pair in slots if pair[1] is not missing] + list(getattr(item, "__dict__", {}).items())


def _refuse_unguardable(item: Any, name: str) -> None:
    """Raise for an argument whose contents may change without our seeing it: the graph would keep the first ones."""
    kind = f"{type(item).__module__}.{type(item).__qualname__}"
    if isinstance(item, Iterator):
        raise TypeError(f"argument {name} is a {kind}, which can be read only once; pass a list")
    if hasattr(item, "__array_interface__"):
        raise TypeError(f"argument {name} is a {kind}, which the graph would keep as a constant; pass a torch.Tensor")
    if isinstance(item, (set, frozenset)) and any(_holds_tensors(part, set()) for part in item):
        raise TypeError(f"argument {name} is a {kind} of tensors, which have no order in it; pass a list")
    if isinstance(item, (bytearray, set)):
        raise TypeError(f"argument {name} is a {kind}, whose changes the graph would not notice; pass a tuple")


def _holds_tensors(item: Any, seen: set[int], depth: int = 6) -> bool:
    """Return True if a computed tensor is inside `item`; modules and their parameters are no results."""
    if isinstance(item, torch.Tensor):
        return not isinstance(item, torch.nn.Parameter)
    if depth == 0 or id(item) in seen or callable(item) or isinstance(item, (*_PLAIN, torch.nn.Module, ModuleType)):
        return False
    seen.add(id(item))
    if isinstance(item, Mapping):
        parts: list[Any] = list(item.values())
    elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
        parts = list(item)
    else:
        parts = [value for _, value in attributes_in(item)]
    return any(_holds_tensors(part, seen, depth - 1) for part in parts)


def is_cache(item: Any) -> bool:
    """Return True for a transformers cache; imports nothing."""
    return _is_cache_type(type(item))


def _is_cache_type(kind: type) -> bool:
    return any(c.__name__ == "Cache" and c.__module__ == "transformers.cache_utils" for c in kind.__mro__)


def parameters_of(function: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a module's ``forward``."""
    return list(inspect.signature(function).parameters.values())
