"""Turns what a pickle says into values: tensors into records of their place, harmless values into themselves.

Only classes and functions of the tables here and in :mod:`.classes` are rebuilt, by code of ours that checks the
arguments first. Every other object stays a record of its class and state. Nothing is imported or called because a file
names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.restricted_pickle import classes
from ort_zero.checkpoint.restricted_pickle.machine import HostilePickleError, MalformedPickleError, PersistentId
from ort_zero.checkpoint.restricted_pickle.values import (
    ClassReference,
    FragmentAddress,
    OpaqueObject,
    StoredStorage,
    StoredTensor,
    TorchConstant,
)

_MOST_NESTED = 200
"""Levels of containers and objects within each other."""
_MOST_VALUES = 1 << 20
_VALUES_PER_BYTE = 16
"""Number of values that a pickle may expand to, per byte of it and in any case, where a value counts each time that it
is held: a few bytes can hold one list many times, and each of its items too."""
_MOST_AXES = 64
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, bytearray))
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
}
_TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def rebuild(value: Any, records: Mapping[str, tuple[int, int]], size: int) -> tuple[Any, frozenset[str]]:
    """Return the value of a pickle and the names of the classes of which objects stayed records.

    Args:
        value: what :func:`~ort_zero.checkpoint.restricted_pickle.machine.interpret` returned.
        records: (offset, length) in bytes of the data of each storage in the file, by its key.
        size: bytes of the pickle; limits how many values there may be.

    Raises:
        MalformedPickleError: values nested too deeply, more than the pickle can hold, or a tensor without its data.
        HostilePickleError: it calls a function that no checkpoint needs and that acts on the machine.
    """
    builder = _Rebuilder(records, max(_MOST_VALUES, _VALUES_PER_BYTE * size))
    result = builder.value(value, 0)
    return result, frozenset(builder.opaque)


class _Rebuilder:
    """Walks the values of one pickle from the leaves up; each container and object is rebuilt once."""

    def __init__(self, records: Mapping[str, tuple[int, int]], most: int):
        self.opaque: set[str] = set()
        self._records = records
        self._most = most
        self._count = 0
        self._done: dict[int, tuple[Any, int]] = {}
        """(value, how many values it holds) by the id of what it was rebuilt from."""
        self._open: set[int] = set()
        """Ids of the containers around the one that is rebuilt."""

    def value(self, raw: Any, depth: int) -> Any:
        """Return what `raw` stands for, at `depth` levels below the outermost container."""
        kind = type(raw)
        if kind in _PLAIN:
            self._add(1)
            return raw
        key = id(raw)
        known = self._done.get(key)
        if known is not None:
            self._add(known[1])
            return known[0]
        if depth > _MOST_NESTED:
            raise MalformedPickleError("its values are nested too deeply")
        if key in self._open:  # it holds itself; nobody follows such a reference
            return OpaqueObject(raw.class_name if kind is OpaqueObject else f"builtins.{kind.__name__}")
        before = self._count
        self._add(1)
        self._open.add(key)
        result = self._rebuilt(raw, kind, depth + 1)
        self._open.discard(key)
        self._done[key] = (result, self._count - before)
        return result

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > self._most:
            raise MalformedPickleError("it holds the same values again and again, more than a file of its size can")

    def _rebuilt(self, raw: Any, kind: type, depth: int) -> Any:
        value = self.value
        if kind is dict:
            return {value(key, depth): value(item, depth) for key, item in raw.items()}
        if kind in (list, tuple, set, frozenset):
            return kind([value(item, depth) for item in raw])
        if kind is OpaqueObject:
            return self._object(raw, depth)
        if kind is ClassReference:
            module, _, name = raw.name.rpartition(".")
            return TorchConstant("dtype", name) if module == "torch" and dtypes.is_dtype_name(name) else raw
        if kind is PersistentId:
            return self._storage(raw.value)
        raise MalformedPickleError(f"a {kind.__name__} has no place in it")

    def _object(self, raw: OpaqueObject, depth: int) -> Any:
        made = OpaqueObject(
            raw.class_name,
            self.value(raw.args, depth),
            self.value(raw.kwargs, depth) if raw.kwargs else {},
            self.value(raw.state, depth),
            [self.value(item, depth) for item in raw.items],
            [(self.value(key, depth), self.value(item, depth)) for key, item in raw.entries],
            raw.called,
        )
        if raw.called and raw.class_name not in _OF_TORCH and classes.is_hostile(raw.class_name):
            raise HostilePickleError(raw.class_name)
        result = _of_torch(made) if made.class_name in _OF_TORCH else classes.rebuilt(made)
        if result is classes.UNKNOWN:
            self.opaque.add(made.class_name)
            return made
        return result

    def _storage(self, pid: Any) -> StoredStorage:
        """Return the storage of a persistent id: ("storage", class, key, device, number of elements)."""
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or type(pid[1]) is not ClassReference:
            raise MalformedPickleError("what it stores beside itself is no storage of torch")
        module, _, name = pid[1].name.rpartition(".")
        dtype = _STORAGES.get(name) if module == "torch" else None
        record = self._records.get(pid[2]) if type(pid[2]) is str else None
        if record is None:
            raise MalformedPickleError(f"the file has no record for its storage {pid[2]!r}")
        return StoredStorage(*record, dtype)


def _of_torch(made: OpaqueObject) -> Any:
    try:
        return _OF_TORCH[made.class_name](made)
    except MalformedPickleError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedPickleError(f"{made.class_name} has other arguments than torch writes: {error}") from None


# ---- tensors --------------------------------------------------------------------------------------------------------


def _tensor(made: OpaqueObject) -> Any:
    """Return the place of a dense tensor: _rebuild_tensor_v2(storage, offset, size, stride, ..., metadata)."""
    storage, offset, shape, strides, *rest = made.args
    if len(rest) > 2 and rest[2]:  # a conjugate or negated view: its elements are not what is stored
        return classes.UNKNOWN
    return _stored(storage, storage.dtype, offset, shape, strides)


def _typed_tensor(made: OpaqueObject) -> Any:
    """Return the place of a dense tensor: _rebuild_tensor_v3(storage, offset, size, stride, ..., dtype, metadata)."""
    storage, offset, shape, strides, _, _, dtype, *rest = made.args
    if (rest and rest[0]) or type(dtype) is not TorchConstant or dtype.kind != "dtype":
        return classes.UNKNOWN
    return _stored(storage, dtype.name, offset, shape, strides)


def _stored(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any) -> Any:
    if type(storage) is not StoredStorage:
        raise MalformedPickleError("a tensor has no storage")
    if dtype is None:
        return classes.UNKNOWN
    for axes in (shape, strides):
        if type(axes) is not tuple or any(type(n) is not int or not 0 <= n < 1 << 63 for n in axes):
            raise MalformedPickleError("a tensor has no shape, or strides below zero")
    if len(shape) != len(strides) or len(shape) > _MOST_AXES or type(offset) is not int or not 0 <= offset < 1 << 63:
        raise MalformedPickleError("a tensor has other strides than axes")
    begin = storage.offset + offset * dtypes.itemsize_of(dtype)
    return StoredTensor(begin, dtype, shape, strides, storage.offset)


def _parameter(made: OpaqueObject) -> Any:
    """Return what a parameter holds: _rebuild_parameter(data, requires_grad, hooks[, state])."""
    return made.args[0] if isinstance(made.args[0], StoredTensor) else classes.UNKNOWN


def _tensor_with_attributes(made: OpaqueObject) -> Any:
    """Return what a tensor that has attributes holds: _rebuild_from_type_v2(function, type, args, state)."""
    function, kind, args, _ = made.args
    if type(function) is not ClassReference or type(kind) is not ClassReference or kind.name not in _TENSOR_TYPES:
        return classes.UNKNOWN
    known = _OF_TORCH.get(function.name)
    return classes.UNKNOWN if known is None else known(OpaqueObject(function.name, args, called=True))


def _size(made: OpaqueObject) -> Any:
    """Return a shape as a plain tuple."""
    (numbers,) = made.args
    shape = tuple(numbers)
    if any(type(number) is not int for number in shape) or len(shape) > _MOST_AXES:
        return classes.UNKNOWN
    if any(number < 0 for number in shape) or math.prod(shape) >= 1 << 63:
        raise MalformedPickleError("a shape has more elements than any tensor")
    return shape


def _device(made: OpaqueObject) -> TorchConstant:
    return TorchConstant("device", ":".join(str(part) for part in made.args))


def _stage(made: OpaqueObject) -> int:
    """Return DeepSpeed's enumeration of ZeRO stages as a number."""
    (number,) = made.args
    return int(number)


def _fragment_address(made: OpaqueObject) -> Any:
    numel, start = made.attribute("numel"), made.attribute("start")
    if type(numel) is not int or type(start) is not int:
        return classes.UNKNOWN
    return FragmentAddress(numel, start)


_OF_TORCH: dict[str, Callable[[OpaqueObject], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda made: TorchConstant("layout", made.args[0].removeprefix("torch.")),
    "deepspeed.runtime.zero.config.ZeroStageEnum": _stage,
    "deepspeed.utils.tensor_fragment.fragment_address": _fragment_address,
}
"""How objects of torch and DeepSpeed are rebuilt, by the full name of the class or function."""
