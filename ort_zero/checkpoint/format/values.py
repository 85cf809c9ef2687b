"""Encode Python values as JSON and decode them: state of schedulers and of users. Decoding executes no code.

None, booleans, finite numbers, strings, lists and dicts with string keys stay themselves. Every other value becomes a
JSON object whose key ``"__type__"`` has its tag, and ``"items"`` its parts. Tensors and arrays are not part of the
JSON: the caller stores them as a list in safetensors, and the JSON has the indices in this list.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ort_zero.errors import CheckpointError

_TYPE, _ITEMS, _FACTORY = "__type__", "items", "factory"
_IN_JSON = "ort_zero.value"
"""Key of an object in plain JSON whose value :func:`encode` has made."""
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str, bytes)}
"""Default factories by their stored names; a defaultdict with another factory is stored as a dict."""
_KEPT_MAPPINGS = (collections.OrderedDict, collections.defaultdict, collections.Counter)
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, *_KEPT_MAPPINGS, argparse.Namespace)}
_MAX_NUMBER_BYTES = 8
"""Maximum size in bytes of a number in an array: torch has no type for numpy's long double."""


def _deque(items: list, most: int | None) -> collections.deque:
    if type(items) is not list:
        raise ValueError(f"a deque of {items!r}")
    return collections.deque(items, most)


def _dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


_TYPES: dict[str, tuple[type, Any, Any]] = {
    "bytes": (
        bytes,
        lambda value: [base64.b64encode(value).decode()],
        lambda text: base64.b64decode(text, validate=True),
    ),
    "dtype": (torch.dtype, lambda value: [str(value).removeprefix("torch.")], _dtype),
    "device": (torch.device, lambda value: [str(value)], torch.device),
    "tuple": (tuple, list, lambda *items: items),
    "set": (set, list, lambda *items: set(items)),
    "frozenset": (frozenset, list, lambda *items: frozenset(items)),
    "float": (float, lambda value: [repr(value)], float),
    "complex": (complex, lambda value: [repr(value)], complex),
    "range": (range, lambda value: [value.start, value.stop, value.step], range),
    "datetime": (datetime.datetime, lambda value: [value.isoformat()], datetime.datetime.fromisoformat),
    "date": (datetime.date, lambda value: [value.isoformat()], datetime.date.fromisoformat),
    "time": (datetime.time, lambda value: [value.isoformat()], datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        datetime.timedelta,
    ),
    "path": (pathlib.PurePath, lambda value: [str(value)], pathlib.Path),
    "deque": (collections.deque, lambda value: [list(value), value.maxlen], _deque),
}
"""By tag: the class, the function that returns the parts of a value, and the function that makes a value of them."""


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
        return {_TYPE: tag, _ITEMS: len(tensors) - 1}
    table = vars(value) if isinstance(value, argparse.Namespace) else value
    if isinstance(table, dict):
        pairs = [[part(key, where), part(item, f"{where}[{key!r}]")] for key, item in table.items()]
        return {_TYPE: "Namespace" if table is not value else kind.__name__, _ITEMS: pairs, _FACTORY: _factory(table)}
    for tag, (stored_kind, parts_of, _) in _TYPES.items():
        if kind is stored_kind or (stored_kind is pathlib.PurePath and isinstance(value, stored_kind)):
            return {_TYPE: tag, _ITEMS: [part(item, f"{where}[{i}]") for i, item in enumerate(parts_of(value))]}
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a sharded checkpoint does not store (it holds no "
        "pickles); turn it into numbers, strings, lists, dicts or tensors"
    )


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    try:
        return _decoded(value, tensors)
    except (RecursionError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"a stored value cannot be read, it is not what was written: {error}") from None


def _decoded(value: Any, tensors: list[torch.Tensor]) -> Any:
    part = functools.partial(_decoded, tensors=tensors)
    if type(value) is list:
        return [part(item) for item in value]
    if type(value) is not dict:
        return value
    if _TYPE not in value:
        return {key: part(item) for key, item in value.items()}
    tag = value[_TYPE]
    items: Any = value.get(_ITEMS)
    if tag in ("tensor", "ndarray"):
        return tensors[items] if tag == "tensor" else tensors[items].numpy()
    if tag not in _TYPES and tag not in _MAPPINGS:
        raise CheckpointError(f"a stored value has the unknown type {tag!r}; a later version of ort_zero wrote it")
    if not isinstance(items, list) or value.keys() - {_TYPE, _ITEMS, _FACTORY}:
        raise ValueError(f"a {tag!r} has no list of parts, or other keys: {', '.join(value)}")
    if tag in _TYPES:
        return _TYPES[tag][2](*(part(item) for item in items))
    factory = value.get(_FACTORY)
    made: Any = collections.defaultdict(_FACTORIES[factory]) if factory else _MAPPINGS[tag]()
    table = vars(made) if isinstance(made, argparse.Namespace) else made
    table.update({part(key): part(item) for key, item in items})
    return made


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
    if type(value) in _KEPT_MAPPINGS and _factory(value) is not None:
        return value
    return dict(value) if isinstance(value, Mapping) else value


def _factory(value: Any) -> str | None:
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
