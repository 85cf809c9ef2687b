"""Writes structures and operators as JSON and reads them again; nothing that is read is imported or run.

Values that JSON has are themselves; all others are lists that begin with a tag: ``["tuple", 1, 2]``. Classes are
``"module:qualname"`` and are looked up among the modules that are loaded already.
"""

from __future__ import annotations

import base64
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

from ort_zero.runtime.export import pytree
from ort_zero.runtime.operators import aten_op


class NotLasting(Exception):
    """A value has no meaning in another process."""


class NotReadable(Exception):
    """What was written is damaged, or names a class that this process does not have."""


def encode(value: Any, what: str = "argument") -> Any:
    """Return `value` as what ``json.dumps`` takes and :func:`decode` turns into an equal value.

    Args:
        value: nodes of :mod:`.structure`, the structure of a call, an :class:`.aten.Operator`, and constants.
        what: says in errors what `value` is.

    Raises:
        NotLasting: a part has no meaning in another process; names the part.
    """
    return _encode(value, what, "")


def decode(written: Any) -> Any:
    """Return the value that :func:`encode` wrote.

    Raises:
        NotReadable: it is damaged, or names a class that is not loaded.
    """
    try:
        return _decode(written)
    except NotReadable:
        raise
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error) as error:
        raise NotReadable(f"not what was written: {error}") from None


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


def _class_named(name: Any) -> type:
    found = _find(name) if isinstance(name, str) else None
    if not isinstance(found, type) or f"{found.__module__}:{found.__qualname__}" != name:
        raise NotReadable(f"no class {name!r} is loaded")
    return found


# -- constants --------------------------------------------------------------------------------------------------------


def _encode(value: Any, what: str, path: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 1 << 63 else ["int", hex(value)]
    if kind is float and math.isfinite(value):
        return value
    tag = _TAGS.get(kind)
    if tag is not None:
        return [tag, *(_encode(part, what, _longer(path, name)) for name, part in _parts(value))]
    if kind in _WRITERS:
        return _WRITERS[kind](value)
    if isinstance(value, enum.Enum) and kind.__members__.get(value.name) is value:
        return ["enum", _lasting_class(kind, what, path), value.name]
    if isinstance(value, type):
        return ["type", _lasting_class(value, what, path)]
    raise NotLasting(_words(what, path, f"is a {kind.__qualname__}"))


def _words(what: str, path: str, rest: str) -> str:
    name = f' "{path}"' if path else ""
    return f"{what}{name} {rest}, which has no lasting name"


def _lasting_class(kind: type, what: str, path: str) -> str:
    name = name_of(kind)
    if name is None:
        raise NotLasting(_words(what, path, f"is or holds a {kind.__module__}.{kind.__qualname__}"))
    return name


def _longer(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container or node, each with its name for errors."""
    if isinstance(value, aten_op.Operator) and value.name.startswith("ort_zero::"):
        raise NotLasting(f"operator {value.name} belongs to this process, and has no lasting name")
    if dataclasses.is_dataclass(value):
        return [("", getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, slice):
        return [("", value.start), ("", value.stop), ("", value.step)]
    if len(value) == 2 and type(value[0]) not in _NODES and type(value[1]) in _NODES:
        name = str(value[0]) if type(value[0]) in (str, int) else ""
        return [("", value[0]), (name, value[1])]
    return [(str(i) if type(part) in _NODES else "", part) for i, part in enumerate(value)]


def _without_prefix(value: Any) -> str:
    return str(value).removeprefix("torch.")


_WRITERS: dict[type, Callable[[Any], list]] = {
    float: lambda value: ["float", struct.pack(">d", value).hex()],
    complex: lambda value: ["complex", struct.pack(">dd", value.real, value.imag).hex()],
    bytes: lambda value: ["bytes", base64.b64encode(value).decode()],
    torch.dtype: lambda value: ["dtype", _without_prefix(value)],
    torch.layout: lambda value: ["layout", _without_prefix(value)],
    torch.memory_format: lambda value: ["memory_format", _without_prefix(value)],
    torch.device: lambda value: ["device", str(value)],
}


def _float(written: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(written))
    # structures are compared with ==, which takes one NaN for another only if they are one object
    return math.nan if value != value and written == struct.pack(">d", math.nan).hex() else value


def _of_torch(kind: type) -> Callable[[str], Any]:
    def read(name: str) -> Any:
        return _must(isinstance(found := vars(torch).get(name), kind), found)

    return read


def _member(kind: str, name: str) -> enum.Enum:
    cls = _class_named(kind)
    _must(issubclass(cls, enum.Enum))
    return cls.__members__[name]


def _must(condition: Any, value: Any = None) -> Any:
    if not condition:
        raise NotReadable("not what was written")
    return value


_READERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": _float,
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "dtype": _of_torch(torch.dtype),
    "layout": _of_torch(torch.layout),
    "memory_format": _of_torch(torch.memory_format),
    "device": lambda text: torch.device(_must(type(text) is str, text)),
    "enum": _member,
    "type": _class_named,
}
"""By tag: takes what stands behind the tag."""


# -- containers and nodes ---------------------------------------------------------------------------------------------


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


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
    plain = isinstance(node.kind, type) and pytree.is_plain(node.kind)
    return plain and numbers and _all(node.items, _is_attribute)


def _check_operator(node: Any) -> bool:
    named = type(node.name) is str and re.fullmatch(r"[a-z]\w*::\w+", node.name, re.ASCII | re.IGNORECASE)
    overload = type(node.overload) is str and re.fullmatch(r"\w*", node.overload, re.ASCII)
    own = type(node.name) is str and node.name.startswith("ort_zero::")
    return bool(named and overload) and not own and _all(node.arguments, _is_named_argument)


_CHECKS: dict[str, tuple[type, Callable[[Any], bool]]] = {
    "Slot": (pytree._TensorLeaf, lambda node: _is_index(node.index)),
    "Constant": (pytree._Constant, lambda node: type(node.value) not in _NODES),
    "Size": (pytree._Size, lambda node: _is_index(node.index)),
    "Sequence": (
        pytree._Sequence,
        lambda node: _is_kind(node.kind, list, tuple, collections.deque) and _all(node.items, _is_structure),
    ),
    "Mapping": (pytree._Mapping, _check_mapping),
    "Object": (pytree._Object, _check_object),
    "Again": (pytree._Reference, lambda node: _is_index(node.number)),
    "aten.Tensor": (
        aten_op.Tensor,
        lambda node: _is_index(node.index) and node.kind in ("real", "complex", "bool"),
    ),
    "aten.Number": (aten_op.Number, lambda node: _is_index(node.index)),
    "aten.Constant": (aten_op.Constant, lambda node: type(node.value) not in _NODES),
    "aten.List": (aten_op.List, lambda node: _all(node.items, _is_argument)),
    "aten.Operator": (aten_op.Operator, _check_operator),
}
"""By tag: the class of a node, and what must hold of one that was read."""

_NODES = {kind: tag for tag, (kind, _) in _CHECKS.items()}
_STRUCTURES = tuple(kind for kind in _NODES if kind.__module__ == pytree.__name__)
_CONTAINERS: dict[str, tuple[type, Callable[..., Any]]] = {
    "tuple": (tuple, lambda *items: items),
    "list": (list, lambda *items: list(items)),
    "slice": (slice, lambda start, stop, step: slice(start, stop, step)),
    "torch.Size": (torch.Size, lambda *items: torch.Size(items)),
}
_TAGS = {**_NODES, **{kind: tag for tag, (kind, _) in _CONTAINERS.items()}}


def _decode(written: Any) -> Any:
    if written is None or type(written) in (bool, int, float, str):
        return written
    _must(type(written) is list and written and type(written[0]) is str)
    tag, *parts = written
    if tag in _READERS:
        return _READERS[tag](*parts)
    parts = [_decode(part) for part in parts]
    if tag in _CONTAINERS:
        return _CONTAINERS[tag][1](*parts)
    _must(tag in _CHECKS)
    kind, holds = _CHECKS[tag]
    _must(len(parts) == len(dataclasses.fields(kind)))
    node = kind(*parts)
    return _must(holds(node), node)
