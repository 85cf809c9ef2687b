"""Turn the records of an unpickled value back into values of torch; objects of unknown classes stay records."""

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
    """Return `value` with tensors and torch's constants instead of their records, and the places of other records.

    Args:
        value: a part of the content of a :class:`~ort_zero.checkpoint.torch_file.TorchFile`.
        read: returns a tensor with the elements of a stored one.
        where: name of `value` in the second result.

    Returns:
        The value, and the class name of each record that stays in it (an object of an unknown class), by its place:
        ``{"client_state['mode']": "my_module.Mode"}``.
    """
    kept: dict[str, str] = {}
    return _restored(value, read, where, kept), kept


def _restored(value: Any, read: Callable[[StoredTensor], torch.Tensor], where: str, kept: dict[str, str]) -> Any:
    kind = type(value)
    if kind is StoredTensor:
        return read(value)
    if kind is TorchConstant:
        try:
            return torch.device(value.name) if value.kind == "device" else getattr(torch, value.name)
        except (AttributeError, RuntimeError):  # this version of torch does not have it
            kept[where] = f"torch.{value.kind}"
            return value
    if isinstance(value, (OpaqueObject, ClassReference, StoredStorage)):
        kept[where] = getattr(value, "class_name", "a storage of torch")
        return value
    if isinstance(value, dict):
        items = {_restored(k, read, where, kept): _restored(v, read, f"{where}[{k!r}]", kept) for k, v in value.items()}
        if kind is dict:
            return items
        result = value.copy()  # an OrderedDict, a defaultdict or a Counter
        result.clear()
        result.update(items)
        return result
    if kind in (list, tuple, set, frozenset):
        return kind([_restored(item, read, f"{where}[{i}]", kept) for i, item in enumerate(value)])
    if hasattr(value, "__dict__") and kind.__module__ == "argparse":
        result = kind()
        vars(result).update({n: _restored(v, read, f"{where}.{n}", kept) for n, v in vars(value).items()})
        return result
    return value
