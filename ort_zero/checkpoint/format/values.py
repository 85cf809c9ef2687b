"""Encode Python values as JSON and decode them: state of schedulers and of users. Decoding executes no code.

Tensors and arrays are not part of the JSON: the caller stores them as a list in safetensors, and the JSON has the
indices in this list.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ort_zero.errors import CheckpointError
from ort_zero.utils.json_values import (
    BYTES,
    DEVICE,
    DTYPE,
    TUPLE,
    Decode,
    Encode,
    JsonCodec,
    NotDecodable,
    NotEncodable,
    TaggedType,
    UnknownTag,
    as_items,
    as_text,
    exactly,
    must_be,
)


def encode(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """Return `value` as JSON values; append its tensors to `tensors`.

    Args:
        value: None, bool, number, str, bytes, list, tuple, set, dict, deque, range, path, date, time, tensor,
            numpy array or scalar, torch dtype, torch device, ``argparse.Namespace``, and containers of these.
        where: name of `value` in messages, such as ``client_state``.
        tensors: list to which the tensors and arrays in `value` are appended, on the CPU and contiguous.

    Raises:
        CheckpointError: a value of another type, named by its path.
    """
    try:
        return _codec(tensors).encode(value, where)
    except NotEncodable as error:
        raise CheckpointError(
            f"{error}, which a sharded checkpoint does not store (it holds no pickles); turn it into numbers, strings, "
            "lists, dicts or tensors"
        ) from None


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


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the Python value of an encoded value.

    Raises:
        CheckpointError: `value` is damaged, or has a type that only later versions of ort_zero know.
    """
    try:
        return _codec(tensors).decode(value)
    except UnknownTag as error:
        raise CheckpointError(
            f"a stored value has the unknown type {error.tag!r}; a later version of ort_zero wrote it"
        ) from None
    except NotDecodable as error:
        raise CheckpointError(f"a stored value cannot be read: {error}") from None


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


def _codec(tensors: list[torch.Tensor]) -> JsonCodec:
    """Return the codec for values whose tensors are in `tensors`."""

    def index_of(tensor: torch.Tensor) -> dict[str, int]:
        tensors.append(tensor)
        return {"index": len(tensors) - 1}

    def tensor_at(fields: dict[str, Any]) -> torch.Tensor:
        return tensors[must_be(int, fields["index"])]

    return JsonCodec(
        [
            TaggedType(
                "tensor",
                lambda value: isinstance(value, torch.Tensor),
                lambda value, where, encode: index_of(value.detach().cpu().contiguous()),
                lambda fields, decode: tensor_at(fields),
                ("index",),
            ),
            TaggedType(
                "ndarray",
                _is_array,
                lambda value, where, encode: index_of(_as_tensor(value)),
                lambda fields, decode: tensor_at(fields).numpy(),
                ("index",),
            ),
            *_TYPES,
        ],
        _simplified,
    )


def _write_dict(value: dict, where: str, encode: Encode) -> dict[str, Any]:
    return {"items": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}


def _read_dict(fields: dict[str, Any], decode: Decode) -> dict:
    return {decode(key): decode(item) for key, item in must_be(list, fields["items"])}


def _write_mapping(value: Any, where: str, encode: Encode) -> dict[str, Any]:
    return {**_write_dict(value, where, encode), "kind": type(value).__name__, "factory": _factory_name(value) or None}


def _read_mapping(fields: dict[str, Any], decode: Decode) -> Any:
    kind = {mapping.__name__: mapping for mapping in _KEPT_MAPPINGS}[fields["kind"]]
    made: Any = kind() if fields["factory"] is None else collections.defaultdict(_FACTORIES[fields["factory"]])
    made.update(_read_dict(fields, decode))
    return made


def _write_deque(value: collections.deque, where: str, encode: Encode) -> dict[str, Any]:
    return {"items": [encode(part, f"{where}[{i}]") for i, part in enumerate(value)], "most": value.maxlen}


def _read_deque(fields: dict[str, Any], decode: Decode) -> collections.deque:
    return collections.deque(map(decode, must_be(list, fields["items"])), fields["most"])


_TYPES = (
    BYTES,
    DTYPE,
    DEVICE,
    TUPLE,
    as_items("set", set, iter, set),
    as_text("float", float, repr, float),
    as_items("frozenset", frozenset, iter, frozenset),
    as_items("range", range, lambda value: (value.start, value.stop, value.step), lambda numbers: range(*numbers)),
    as_text("complex", complex, repr, complex),
    as_text("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    as_text("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    as_text("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    as_items(
        "timedelta",
        datetime.timedelta,
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda numbers: datetime.timedelta(*numbers),
    ),
    TaggedType(
        "path",
        lambda value: isinstance(value, pathlib.PurePath),
        lambda value, where, encode: {"value": str(value)},
        lambda fields, decode: pathlib.Path(must_be(str, fields["value"])),
    ),
    TaggedType("dict", exactly(dict), _write_dict, _read_dict, ("items",)),
    TaggedType(
        "mapping",
        lambda value: type(value) in _KEPT_MAPPINGS,
        _write_mapping,
        _read_mapping,
        ("items", "kind", "factory"),
    ),
    TaggedType("deque", exactly(collections.deque), _write_deque, _read_deque, ("items", "most")),
    TaggedType(
        "namespace",
        lambda value: isinstance(value, argparse.Namespace),
        lambda value, where, encode: {"value": encode(vars(value), where)},
        lambda fields, decode: argparse.Namespace(**decode(fields["value"])),
    ),
)
"""Types of values that can be stored, besides the types of JSON and tensors."""
