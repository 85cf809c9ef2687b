"""Plain values as JSON and back: schedulers' and users' state. Nothing that is read is executed.

Tensors and arrays are not part of the JSON: they are in a list that the caller stores as safetensors, and the JSON has
their indices.
"""

from __future__ import annotations

import argparse
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
    """Return `value` as JSON values; tensors are appended to `tensors`.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, set, dict, tensor, numpy array or scalar, torch dtype,
            torch device, ``argparse.Namespace``, and lists, dicts, tuples and sets of these.
        where: how the message names it, such as ``client_state``.
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


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return what :func:`encode` was given.

    Args:
        value: what :func:`encode` returned.
        tensors: the list that :func:`encode` appended to.

    Raises:
        CheckpointError: it is damaged, or has a type that only later versions know.
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
    """Return the plain value of a numpy scalar or an instance of a subclass; other values as they are."""
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
        return set(value)
    return dict(value) if isinstance(value, Mapping) else value


def _codec(tensors: list[torch.Tensor]) -> JsonCodec:
    """Return the codec of a checkpoint's values whose tensors are in `tensors`."""

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
                lambda value: isinstance(value, np.ndarray) and value.dtype.kind in "biuf",
                lambda value, where, encode: index_of(torch.from_numpy(np.ascontiguousarray(value))),
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


_TYPES = (
    BYTES,
    DTYPE,
    DEVICE,
    TUPLE,
    as_items("set", set, iter, set),
    as_text("float", float, repr, float),
    TaggedType("dict", exactly(dict), _write_dict, _read_dict, ("items",)),
    TaggedType(
        "namespace",
        lambda value: isinstance(value, argparse.Namespace),
        lambda value, where, encode: {"value": encode(vars(value), where)},
        lambda fields, decode: argparse.Namespace(**decode(fields["value"])),
    ),
)
"""Types of a checkpoint's values besides JSON's own and tensors."""
