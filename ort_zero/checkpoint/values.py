"""Plain values as JSON and back: schedulers' and users' state. Nothing that is read is executed.

What JSON has no word for is an object with the key ``"__type__"``. Tensors and arrays are kept apart, in a list that
the caller stores as safetensors.
"""

from __future__ import annotations

import argparse
import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ort_zero.errors import CheckpointError

_TYPE = "__type__"


def encode(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """Return `value` as JSON values; tensors are appended to `tensors`.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, set, dict, tensor, numpy array or scalar, torch dtype,
            torch device, ``argparse.Namespace``, and whatever of these nests.
        where: how the message names it, such as ``client_state``.

    Raises:
        CheckpointError: a value of another type, named by its path.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return encode(value.item(), where, tensors)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TYPE: "float", "value": repr(float(value))}
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {_TYPE: "tensor", "index": len(tensors) - 1}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)))
        return {_TYPE: "ndarray", "index": len(tensors) - 1}
    if isinstance(value, bytes):
        return {_TYPE: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_TYPE: type(value).__name__, "value": str(value).removeprefix("torch.")}
    if isinstance(value, argparse.Namespace):
        return {_TYPE: "namespace", "value": encode(vars(value), where, tensors)}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and _TYPE not in value:
            return {key: encode(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
        pairs = [[encode(k, where, tensors), encode(v, f"{where}[{k!r}]", tensors)] for k, v in value.items()]
        return {_TYPE: "dict", "items": pairs}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return {_TYPE: "tuple" if isinstance(value, tuple) else "set", "items": items}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a sharded checkpoint does not store "
        "(it holds no pickles); turn it into numbers, strings, lists, dicts or tensors"
    )


def decode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return what :func:`encode` was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TYPE)
    if kind is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    if kind == "tensor":
        return tensors[value["index"]]
    if kind == "ndarray":
        return tensors[value["index"]].numpy()
    if kind == "float":
        return float(value["value"])
    if kind == "bytes":
        return base64.b64decode(value["value"])
    if kind == "dtype":
        return getattr(torch, value["value"])
    if kind == "device":
        return torch.device(value["value"])
    if kind == "namespace":
        return argparse.Namespace(**decode(value["value"], tensors))
    if kind == "dict":
        return {decode(k, tensors): decode(v, tensors) for k, v in value["items"]}
    if kind in ("tuple", "set"):
        return {"tuple": tuple, "set": set}[kind](decode(item, tensors) for item in value["items"])
    raise CheckpointError(f"a stored value has the unknown type {kind!r}; a later version of ort_zero wrote it")
