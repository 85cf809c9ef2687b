"""Encode Python values as JSON and decode them: state of schedulers and of users. Decoding executes no code.

None, booleans, finite numbers, strings, lists and dicts with string keys stay themselves. Every other value becomes a
JSON object whose key ``"__type__"`` has its tag; the other keys are the fields of the tag's type. Tensors and arrays
are not part of the JSON: the caller stores them as a list in safetensors, and the JSON has the indices in this list.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ort_zero.errors import CheckpointError

_TYPE = "__type__"
_Encode = Callable[[Any, str], Any]
"""Takes a part of a value and its place in the whole value, returns the part as JSON."""
_Decode = Callable[[Any], Any]


def encode(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """Return `value` as JSON values; append its tensors to `tensors`.

    Args:
        value: None, bool, number, str, bytes, list, tuple, set, dict, deque, range, path, date, time, tensor,
            numpy array or scalar, torch dtype, torch device, ``argparse.Namespace``, and containers of these.
        where: name of `value` in messages, such as ``client_state``; parts add their index or key: ``state['lr'][0]``.
        tensors: list to which the tensors and arrays in `value` are appended, on the CPU and contiguous.
    """
    value = _simplified(value)
    kind, part = type(value), functools.partial(encode, tensors=tensors)
    if value is None or kind in (bool, str, int) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [part(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is dict and _TYPE not in value and all(type(key) is str for key in value):
        return {key: part(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, torch.Tensor) or _is_array(value):
        tag = "ndarray" if isinstance(value, np.ndarray) else "tensor"
        tensors.append(_as_tensor(value) if tag == "ndarray" else value.detach().cpu().contiguous())
        return {_TYPE: tag, "index": len(tensors) - 1}
    for tagged in _TYPES:
        if tagged.matches(value):
            return {_TYPE: tagged.tag, **tagged.write(value, where, part)}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a sharded checkpoint does not store (it holds no "
        "pickles); turn it into numbers, strings, lists, dicts or tensors"
    )


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the Python value of an encoded value.

    Args:
        value: result of :func:`encode`.
        tensors: the list that :func:`encode` appended to.
    """
    try:
        return _decoded(value, tensors)
    except (RecursionError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"a stored value cannot be read, it is not what was written: {error}") from None


def _decoded(value: Any, tensors: list[torch.Tensor]) -> Any:
    part = functools.partial(_decoded, tensors=tensors)
    if type(value) is list:
        return [part(item) for item in value]
    if type(value) is not dict:
        return value
    if _TYPE not in value:
        return {key: part(item) for key, item in value.items()}
    tag, fields = value[_TYPE], {name: item for name, item in value.items() if name != _TYPE}
    if tag in ("tensor", "ndarray"):
        tensor = tensors[_must_be(int, fields.pop("index"))]
        return tensor if tag == "tensor" else tensor.numpy()
    tagged = next((tagged for tagged in _TYPES if tagged.tag == tag), None)
    if tagged is None:
        raise CheckpointError(f"a stored value has the unknown type {tag!r}; a later version of ort_zero wrote it")
    if fields.keys() != set(tagged.fields):
        raise ValueError(f"a {tag!r} has the fields {sorted(tagged.fields)}, not {sorted(fields)}")
    return tagged.read(fields, part)


_IN_JSON = "ort_zero.value"
"""Key of an object in plain JSON whose value :func:`encode` has made."""


def encode_in_json(value: Any, where: str) -> dict[str, Any]:
    """Return a value without tensors as one object of plain JSON; raises as :func:`encode` does."""
    tensors: list[torch.Tensor] = []
    encoded = encode(value, where, tensors)
    if tensors:
        raise CheckpointError(f"{where} holds tensors within other values")
    return {_IN_JSON: encoded}


def decode_in_json(value: Any) -> Any:
    """Return the Python value of an object that :func:`encode_in_json` made, also in lists; other values unchanged."""
    if isinstance(value, list):
        return [decode_in_json(item) for item in value]
    is_encoded = isinstance(value, dict) and value.keys() == {_IN_JSON}
    return decode(value[_IN_JSON], []) if is_encoded else value


def _simplified(value: Any) -> Any:
    """Return a numpy scalar or an instance of a subclass as a plain value, other values unchanged."""
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)  # the text of a member of an enum, not its name
    if isinstance(value, bool):
        return value
    plain: Any
    for plain in (int, float, bytes, list, tuple):
        if isinstance(value, plain):
            return value if type(value) is plain else plain(value)
    if isinstance(value, (set, frozenset)):
        return value if type(value) in (set, frozenset) else set(value)
    if type(value) in _KEPT_MAPPINGS and _factory_name(value) is not None:
        return value
    return dict(value) if isinstance(value, Mapping) else value


_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str, bytes)}
"""Default factories by their stored names; a defaultdict with another factory is stored as a dict."""
_KEPT_MAPPINGS = (collections.OrderedDict, collections.defaultdict, collections.Counter)
_MAX_NUMBER_BYTES = 8
"""Maximum size in bytes of a number in an array: torch has no type for numpy's long double."""


def _factory_name(value: Any) -> str | None:
    """Return the name of a defaultdict's factory: None if it cannot be stored, empty if there is no factory."""
    factory = getattr(value, "default_factory", None)
    if factory is None:
        return ""
    return next((name for name, kind in _FACTORIES.items() if kind is factory), None)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= _MAX_NUMBER_BYTES


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return the values of an array in the byte order of the machine."""
    return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape))


class _TaggedType(NamedTuple):
    """The codec of one type: the conversion of its values to JSON objects and back."""

    tag: str
    matches: Callable[[Any], bool]
    write: Callable[[Any, str, _Encode], dict[str, Any]]
    """Takes the value, its place, and the function that encodes its parts; returns the fields."""
    read: Callable[[dict[str, Any], _Decode], Any]
    """Takes the fields and the function that decodes them; returns the value."""
    fields: tuple[str, ...] = ("value",)
    """Names of all fields; an object with other fields is not decoded."""


def _exactly(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _must_be(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is not a {kind.__name__}")
    return value


def _as_text(tag: str, kind: type, write: Callable[[Any], str], read: Callable[[str], Any]) -> _TaggedType:
    """Return a type whose values become one string, in the field ``"value"``."""
    return _TaggedType(
        tag,
        _exactly(kind),
        lambda value, where, encode: {"value": write(value)},
        lambda fields, decode: read(_must_be(str, fields["value"])),
    )


def _as_items(tag: str, kind: type, items: Callable[[Any], Iterable], build: Callable[[list], Any]) -> _TaggedType:
    """Return a type of containers whose parts become a list, in the field ``"items"``, and are built from that list."""
    return _TaggedType(
        tag,
        _exactly(kind),
        lambda value, where, encode: {"items": [encode(part, f"{where}[{i}]") for i, part in enumerate(items(value))]},
        lambda fields, decode: build([decode(part) for part in _must_be(list, fields["items"])]),
        ("items",),
    )


def _write_dict(value: dict, where: str, encode: _Encode) -> dict[str, Any]:
    return {"items": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}


def _read_dict(fields: dict[str, Any], decode: _Decode) -> dict:
    return {decode(key): decode(item) for key, item in _must_be(list, fields["items"])}


def _write_mapping(value: Any, where: str, encode: _Encode) -> dict[str, Any]:
    return {**_write_dict(value, where, encode), "kind": type(value).__name__, "factory": _factory_name(value) or None}


def _read_mapping(fields: dict[str, Any], decode: _Decode) -> Any:
    kind = {mapping.__name__: mapping for mapping in _KEPT_MAPPINGS}[fields["kind"]]
    made: Any = kind() if fields["factory"] is None else collections.defaultdict(_FACTORIES[fields["factory"]])
    made.update(_read_dict(fields, decode))
    return made


def _write_deque(value: collections.deque, where: str, encode: _Encode) -> dict[str, Any]:
    return {"items": [encode(part, f"{where}[{i}]") for i, part in enumerate(value)], "most": value.maxlen}


def _read_deque(fields: dict[str, Any], decode: _Decode) -> collections.deque:
    return collections.deque(map(decode, _must_be(list, fields["items"])), fields["most"])


_TYPES = (
    _as_text(
        "bytes",
        bytes,
        lambda value: base64.b64encode(value).decode(),
        lambda text: base64.b64decode(text, validate=True),
    ),
    _as_text(
        "dtype",
        torch.dtype,
        lambda value: str(value).removeprefix("torch."),
        lambda name: _must_be(torch.dtype, vars(torch).get(name)),
    ),
    _as_text("device", torch.device, str, torch.device),
    _as_items("tuple", tuple, iter, tuple),
    _as_items("set", set, iter, set),
    _as_text("float", float, repr, float),
    _as_items("frozenset", frozenset, iter, frozenset),
    _as_items("range", range, lambda value: (value.start, value.stop, value.step), lambda numbers: range(*numbers)),
    _as_text("complex", complex, repr, complex),
    _as_text("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    _as_text("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    _as_text("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    _as_items(
        "timedelta",
        datetime.timedelta,
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda numbers: datetime.timedelta(*numbers),
    ),
    _TaggedType(
        "path",
        lambda value: isinstance(value, pathlib.PurePath),
        lambda value, where, encode: {"value": str(value)},
        lambda fields, decode: pathlib.Path(_must_be(str, fields["value"])),
    ),
    _TaggedType("dict", _exactly(dict), _write_dict, _read_dict, ("items",)),
    _TaggedType(
        "mapping",
        lambda value: type(value) in _KEPT_MAPPINGS,
        _write_mapping,
        _read_mapping,
        ("items", "kind", "factory"),
    ),
    _TaggedType("deque", _exactly(collections.deque), _write_deque, _read_deque, ("items", "most")),
    _TaggedType(
        "namespace",
        lambda value: isinstance(value, argparse.Namespace),
        lambda value, where, encode: {"value": encode(vars(value), where)},
        lambda fields, decode: argparse.Namespace(**decode(fields["value"])),
    ),
)
"""Types of values that can be stored, besides the types of JSON and tensors."""
