"""Turns the records that a pickle was read into back into values of torch, as far as that needs no foreign class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ort_zero.checkpoint.restricted_pickle.values import (
    ClassReference,
    OpaqueObject,
    StoredStorage,
    StoredTensor,
    TorchConstant,
)


def restored(
    value: Any, read: Callable[[StoredTensor], torch.Tensor], where: str = "value"
) -> tuple[Any, dict[str, str]]:
    """Return `value` with tensors and torch's constants in the place of their records, and what could not be restored.

    Args:
        value: a part of the content of a :class:`~ort_zero.checkpoint.torch_file.TorchFile`.
        read: returns a tensor with the elements of a stored one.
        where: how `value` is named in the second result.

    Returns:
        The value, in which the records of objects of unknown classes stay what they are, and the class name of each of
        those by where it is: ``{"client_state['mode']": "my_module.Mode"}``.
    """
    left: dict[str, str] = {}
    return _restored(value, read, where, left), left


def _restored(value: Any, read: Callable[[StoredTensor], torch.Tensor], where: str, left: dict[str, str]) -> Any:
    kind = type(value)
    if kind is StoredTensor:
        return read(value)
    if kind is TorchConstant:
        return torch.device(value.name) if value.kind == "device" else getattr(torch, value.name)
    if kind in (OpaqueObject, ClassReference, StoredStorage):
        left[where] = str(getattr(value, "class_name", None) or getattr(value, "name", "a storage of torch"))
        return value
    if isinstance(value, dict):
        items = {_restored(k, read, where, left): _restored(v, read, f"{where}[{k!r}]", left) for k, v in value.items()}
        if kind is dict:
            return items
        made = value.copy()  # an OrderedDict, a defaultdict or a Counter
        made.clear()
        made.update(items)
        return made
    if kind in (list, tuple, set, frozenset):
        return kind([_restored(item, read, f"{where}[{i}]", left) for i, item in enumerate(value)])
    if hasattr(value, "__dict__") and kind.__module__ == "argparse":
        made = kind()
        vars(made).update({n: _restored(v, read, f"{where}.{n}", left) for n, v in vars(value).items()})
        return made
    return value
