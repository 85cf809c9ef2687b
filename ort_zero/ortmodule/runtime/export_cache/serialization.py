"""Structures and operators as JSON and back; nothing that is read is imported or run.

Classes are ``"module:qualname"`` and are looked up among the modules that are loaded already.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import re
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ort_zero.ortmodule.runtime.export import plain_objects, structures
from ort_zero.ortmodule.runtime.operators import aten_op
from ort_zero.utils.json_values import (
    BYTES,
    DEVICE,
    DTYPE,
    Decode,
    Encode,
    JsonCodec,
    NotDecodable,
    NotEncodable,
    TaggedType,
    as_items,
    as_text,
    exactly,
    must_be,
    of_torch,
)


class NotStorable(Exception):
    """A graph, or a value of it, has no meaning in another process."""


def encode(value: Any, what: str = "argument") -> Any:
    """Return `value` as what ``json.dumps`` takes and :func:`decode` turns into an equal value.

    Args:
        value: nodes of :mod:`.structures`, the structure of a call, an :class:`.aten_op.Operator`, and constants.
        what: says in errors what `value` is.

    Raises:
        NotStorable: a part has no meaning in another process; the message names the part.
    """
    try:
        return _CODEC.encode(value, "")
    except NotEncodable as error:
        name = f' "{error.where}"' if error.where else ""
        raise NotStorable(f"{what}{name} {error.reason}, which has no lasting name") from None


def decode(written: Any) -> Any:
    """Return the value that :func:`encode` wrote.

    Raises:
        NotDecodable: it is damaged, or names a class that is not loaded.
    """
    return _CODEC.decode(written)


# -- classes -----------------------------------------------------------------------------------------------------------


def name_of(kind: type) -> str | None:
    """Return ``"module:qualname"`` if the class can be found again under this name, else None."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if _find(name) is kind else None


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # no getattr: a lazy module would import
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _class_named(name: str) -> type:
    found = _find(name)
    if not isinstance(found, type) or f"{found.__module__}:{found.__qualname__}" != name:
        raise NotDecodable(f"no class {name!r} is loaded")
    return found


def _name_for(kind: type, where: str) -> str:
    name = name_of(kind)
    if name is None:
        raise NotEncodable(where, kind, f"is or holds a {kind.__module__}.{kind.__qualname__}")
    return name


# -- constants ---------------------------------------------------------------------------------------------------------


def _doubles(written: str, count: int) -> tuple[float, ...]:
    data = bytes.fromhex(written)
    if len(data) != 8 * count:
        raise NotDecodable(f"{written!r} is not {8 * count} bytes")
    return struct.unpack(f">{count}d", data)


def _float(written: str) -> float:
    (value,) = _doubles(written, 1)
    # structures are compared with ==, which takes one NaN for another only if they are one object
    return math.nan if value != value and written == struct.pack(">d", math.nan).hex() else value


def _is_member(value: Any) -> bool:
    return isinstance(value, enum.Enum) and type(value).__members__.get(value.name) is value


def _write_member(value: enum.Enum, where: str, encode: Encode) -> dict[str, Any]:
    return {"class": _name_for(type(value), where), "name": value.name}


def _read_member(fields: dict[str, Any], decode: Decode) -> enum.Enum:
    kind = _class_named(must_be(str, fields["class"]))
    if not issubclass(kind, enum.Enum):
        raise NotDecodable(f"{kind.__qualname__} is no enum")
    return kind.__members__[fields["name"]]


def _write_tuple(value: tuple, where: str, encode: Encode) -> dict[str, Any]:
    if len(value) == 2 and type(value[0]) not in _TAGS and type(value[1]) in _TAGS:  # name and node
        name = str(value[0]) if type(value[0]) in (str, int) else ""
        return {"items": [encode(value[0], where), encode(value[1], _longer(where, name))]}
    names = (str(i) if type(part) in _TAGS else "" for i, part in enumerate(value))
    return {"items": [encode(part, _longer(where, name)) for part, name in zip(value, names, strict=False)]}


def _longer(where: str, name: str) -> str:
    return f"{where}.{name}" if where and name else where or name


_CONSTANTS = (
    as_text("float", float, lambda value: struct.pack(">d", value).hex(), _float),
    as_text(
        "complex",
        complex,
        lambda value: struct.pack(">dd", value.real, value.imag).hex(),
        lambda text: complex(*_doubles(text, 2)),
    ),
    BYTES,
    DTYPE,
    DEVICE,
    of_torch("layout", torch.layout),
    of_torch("memory_format", torch.memory_format),
    TaggedType(
        "tuple",
        exactly(tuple),
        _write_tuple,
        lambda fields, decode: tuple([decode(part) for part in must_be(list, fields["items"])]),
        ("items",),
    ),
    as_items("torch.Size", torch.Size, iter, torch.Size),
    as_items("slice", slice, lambda value: (value.start, value.stop, value.step), lambda parts: slice(*_three(parts))),
    TaggedType("enum", _is_member, _write_member, _read_member, ("class", "name")),
    TaggedType(
        "type",
        lambda value: isinstance(value, type),
        lambda value, where, encode: {"class": _name_for(value, where)},
        lambda fields, decode: _class_named(must_be(str, fields["class"])),
        ("class",),
    ),
)


def _three(parts: list) -> list:
    if len(parts) != 3:
        raise NotDecodable(f"a slice has three parts, not {len(parts)}")
    return parts


# -- nodes -------------------------------------------------------------------------------------------------------------


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_key(value: Any) -> bool:
    return type(value) in (int, str, float, bool, type(None), tuple)


def _is_structure(value: Any) -> bool:
    return type(value) in _STRUCTURES


def _is_argument(value: Any) -> bool:
    return type(value) in (aten_op.Tensor, aten_op.Number, aten_op.Constant, aten_op.List)


def _all(value: Any, check: Callable[[Any], bool]) -> bool:
    return type(value) is tuple and all(map(check, value))


def _is_pair(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and _is_structure(value[1])


def _is_attribute(value: Any) -> bool:
    return _is_pair(value) and type(value[0]) is str


def _is_named_argument(value: Any) -> bool:
    named = type(value) is tuple and len(value) == 2 and (value[0] is None or type(value[0]) is str)
    return named and _is_argument(value[1])


def _is_kind(value: Any, *bases: type) -> bool:
    return isinstance(value, type) and issubclass(value, bases)


def _check_mapping(node: Any) -> bool:
    factory = node.default is None or isinstance(node.default, type)
    return _is_kind(node.kind, Mapping) and _all(node.items, _is_pair) and factory


def _check_object(node: Any) -> bool:
    numbers = _is_index(node.number) and (node.origin is None or _is_index(node.origin))
    plain = isinstance(node.kind, type) and plain_objects.is_plain(node.kind)
    return plain and numbers and _all(node.items, _is_attribute)


def _check_operator(node: Any) -> bool:
    named = type(node.name) is str and re.fullmatch(r"[a-z]\w*::\w+", node.name, re.ASCII | re.IGNORECASE)
    overload = type(node.overload) is str and re.fullmatch(r"\w*", node.overload, re.ASCII)
    own = type(node.name) is str and node.name.startswith("ort_zero::")
    return bool(named and overload) and not own and _all(node.arguments, _is_named_argument)


_CHECKS: dict[str, tuple[type, Callable[[Any], bool]]] = {
    "Slot": (structures.TensorLeaf, lambda node: _is_index(node.index)),
    "Number": (structures.NumberLeaf, lambda node: _is_index(node.index) and node.kind in (int, float, bool)),
    "Given": (structures.GivenLeaf, lambda node: _all(node.path, _is_key)),
    "Held": (structures.HeldLeaf, lambda node: _is_index(node.index) and type(node.name) is str),
    "Constant": (structures.ConstantLeaf, lambda node: type(node.value) not in _TAGS),
    "Size": (structures.SizeLeaf, lambda node: _is_index(node.index)),
    "Sequence": (
        structures.SequenceNode,
        lambda node: _is_kind(node.kind, list, tuple, collections.deque) and _all(node.items, _is_structure),
    ),
    "Mapping": (structures.MappingNode, _check_mapping),
    "Object": (structures.ObjectNode, _check_object),
    "Again": (structures.Reference, lambda node: _is_index(node.number)),
    "aten.Tensor": (
        aten_op.Tensor,
        lambda node: _is_index(node.index) and node.kind in ("real", "complex", "bool"),
    ),
    "aten.Number": (aten_op.Number, lambda node: _is_index(node.index)),
    "aten.Constant": (aten_op.Constant, lambda node: type(node.value) not in _TAGS),
    "aten.List": (aten_op.List, lambda node: _all(node.items, _is_argument)),
    "aten.Operator": (aten_op.Operator, _check_operator),
}
"""The class of the nodes of each tag, and the check that a node must pass after it was read."""

_TAGS: dict[type, str] = {kind: tag for tag, (kind, _) in _CHECKS.items()}
_STRUCTURES = tuple(kind for kind in _TAGS if kind.__module__ == structures.__name__)


def _node(tag: str, kind: type, holds: Callable[[Any], bool]) -> TaggedType:
    """Return the type of nodes of one class, whose fields are those of the dataclass."""
    names = tuple(field.name for field in dataclasses.fields(kind))

    def write(value: Any, where: str, encode: Encode) -> dict[str, Any]:
        if isinstance(value, aten_op.Operator) and value.name.startswith("ort_zero::"):
            raise NotStorable(f"operator {value.name} belongs to this process, and has no lasting name")
        return {name: encode(getattr(value, name), where) for name in names}

    def read(fields: dict[str, Any], decode: Decode) -> Any:
        node = kind(**{name: decode(written) for name, written in fields.items()})
        if not holds(node):
            raise NotDecodable(f"a {tag} that was not written like this")
        return node

    return TaggedType(tag, exactly(kind), write, read, names)


_CODEC = JsonCodec([*(_node(tag, *rest) for tag, rest in _CHECKS.items()), *_CONSTANTS])
