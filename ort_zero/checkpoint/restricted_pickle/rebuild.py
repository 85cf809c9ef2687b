"""Rebuild values from the records of a pickle: tensors become records of their place in the file.

Only objects of the classes and functions in the tables here and in :mod:`.classes` are rebuilt, by functions of
ort_zero that check the arguments first. Every other object stays a record of its class and state. Nothing is imported
or called because a file names it.
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

_MAX_NESTING = 200
"""Maximum number of levels of containers and objects within each other."""
_MIN_VALUE_LIMIT = 1 << 20
_VALUES_PER_BYTE = 16
"""A pickle may expand to this many values per byte, and to `_MIN_VALUE_LIMIT` values in any case. A value counts once
for each container that refers to it: a few bytes can refer to one list, and to each of its items, many times."""
_MAX_AXES = 64
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
    """Return the value of a pickle, and the names of the classes whose objects stayed records.

    Args:
        value: result of :func:`~ort_zero.checkpoint.restricted_pickle.machine.interpret`.
        records: (offset, length) in bytes of the data of each storage in the file, by its key.
        size: size of the pickle in bytes; limits the number of values.

    Raises:
        MalformedPickleError: values are nested too deeply or are too many, or a tensor has no data.
        HostilePickleError: the pickle calls a function that acts on the machine and that no checkpoint needs.
    """
    builder = _Rebuilder(records, max(_MIN_VALUE_LIMIT, _VALUES_PER_BYTE * size))
    result = builder.value(value, 0)
    return result, frozenset(builder.opaque)


class _Rebuilder:
    """The rebuilder of one pickle's values, from the leaves up; each container and object is rebuilt once."""

    def __init__(self, records: Mapping[str, tuple[int, int]], value_limit: int):
        self.opaque: set[str] = set()
        self._records = records
        self._value_limit = value_limit
        self._count = 0
        self._done: dict[int, tuple[Any, int]] = {}
        """(rebuilt value, number of values in it) by the id of the raw value."""
        self._open: set[int] = set()
        """Ids of the raw containers and objects around the value that is being rebuilt."""

    def value(self, raw: Any, depth: int) -> Any:
        """Return the value of `raw`, which lies `depth` levels below the outermost container."""
        kind = type(raw)
        if kind in _PLAIN:
            self._add(1)
            return raw
        key = id(raw)
        done = self._done.get(key)
        if done is not None:
            self._add(done[1])
            return done[0]
        if depth > _MAX_NESTING:
            raise MalformedPickleError("its values are nested too deeply")
        if key in self._open:  # it contains itself; no reader follows such a reference
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
        if self._count > self._value_limit:
            raise MalformedPickleError(f"it repeats values again and again, more than {self._value_limit} in all")

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
        raise MalformedPickleError(f"it holds a value of the unexpected type {kind.__name__}")

    def _object(self, raw: OpaqueObject, depth: int) -> Any:
        record = OpaqueObject(
            raw.class_name,
            self.value(raw.args, depth),
            self.value(raw.kwargs, depth) if raw.kwargs else {},
            self.value(raw.state, depth),
            [self.value(item, depth) for item in raw.items],
            [(self.value(key, depth), self.value(item, depth)) for key, item in raw.entries],
            raw.called,
        )
        if raw.called and raw.class_name not in _TORCH_BUILDERS and classes.is_hostile(raw.class_name):
            raise HostilePickleError(raw.class_name)
        result = _torch_value(record) if record.class_name in _TORCH_BUILDERS else classes.rebuilt(record)
        if result is classes.UNKNOWN:
            self.opaque.add(record.class_name)
            return record
        return result

    def _storage(self, pid: Any) -> StoredStorage:
        """Return the storage of a persistent id: ("storage", class, key, device, number of elements)."""
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or type(pid[1]) is not ClassReference:
            raise MalformedPickleError("a persistent id in it is not of a storage of torch")
        module, _, name = pid[1].name.rpartition(".")
        dtype = _STORAGES.get(name) if module == "torch" else None
        record = self._records.get(pid[2]) if type(pid[2]) is str else None
        if record is None:
            raise MalformedPickleError(f"the file has no record for its storage {pid[2]!r}")
        return StoredStorage(*record, dtype)


def _torch_value(record: OpaqueObject) -> Any:
    try:
        return _TORCH_BUILDERS[record.class_name](record)
    except MalformedPickleError:
        raise
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise MalformedPickleError(f"{record.class_name} has other arguments than torch writes: {error}") from None


# ---- tensors --------------------------------------------------------------------------------------------------------


def _tensor(record: OpaqueObject) -> Any:
    """Return a dense tensor, pickled as _rebuild_tensor_v2(storage, offset, size, stride, ..., metadata)."""
    storage, offset, shape, strides, *rest = record.args
    if len(rest) > 2 and rest[2]:  # a conjugate or negated view: its values differ from the stored ones
        return classes.UNKNOWN
    return _stored_tensor(storage, storage.dtype, offset, shape, strides)


def _typed_tensor(record: OpaqueObject) -> Any:
    """Return a dense tensor, pickled as _rebuild_tensor_v3(storage, offset, size, stride, ..., dtype, metadata)."""
    storage, offset, shape, strides, _, _, dtype, *rest = record.args
    if (rest and rest[0]) or type(dtype) is not TorchConstant or dtype.kind != "dtype":
        return classes.UNKNOWN
    return _stored_tensor(storage, dtype.name, offset, shape, strides)


def _stored_tensor(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any) -> Any:
    if type(storage) is not StoredStorage:
        raise MalformedPickleError("a tensor has no storage")
    if dtype is None:
        return classes.UNKNOWN
    for axes in (shape, strides):
        if type(axes) is not tuple or any(type(n) is not int or not 0 <= n < 1 << 63 for n in axes):
            raise MalformedPickleError("a tensor has no shape, or strides below zero")
    if len(shape) != len(strides) or len(shape) > _MAX_AXES or type(offset) is not int or not 0 <= offset < 1 << 63:
        raise MalformedPickleError("the shape, strides and offset of a tensor do not fit together")
    begin = storage.offset + offset * dtypes.itemsize_of(dtype)
    return StoredTensor(begin, dtype, shape, strides, storage.offset)


def _parameter(record: OpaqueObject) -> Any:
    """Return the tensor of a parameter, pickled as _rebuild_parameter(data, requires_grad, hooks[, state])."""
    return record.args[0] if isinstance(record.args[0], StoredTensor) else classes.UNKNOWN


def _tensor_with_attributes(record: OpaqueObject) -> Any:
    """Return a tensor without its attributes, pickled as _rebuild_from_type_v2(function, type, args, state)."""
    function, kind, args, _ = record.args
    if type(function) is not ClassReference or type(kind) is not ClassReference or kind.name not in _TENSOR_TYPES:
        return classes.UNKNOWN
    build = _TORCH_BUILDERS.get(function.name)
    return classes.UNKNOWN if build is None else build(OpaqueObject(function.name, args, called=True))


def _size(record: OpaqueObject) -> Any:
    """Return a ``torch.Size`` as a plain tuple."""
    (numbers,) = record.args
    shape = tuple(numbers)
    if any(type(number) is not int for number in shape) or len(shape) > _MAX_AXES:
        return classes.UNKNOWN
    if any(number < 0 for number in shape) or math.prod(shape) >= 1 << 63:
        raise MalformedPickleError("a shape has more elements than any tensor")
    return shape


def _device(record: OpaqueObject) -> TorchConstant:
    return TorchConstant("device", ":".join(str(part) for part in record.args))


def _stage(record: OpaqueObject) -> int:
    """Return the number of a ZeRO stage, which DeepSpeed pickles as a member of an enumeration."""
    (number,) = record.args
    return int(number)


def _fragment_address(record: OpaqueObject) -> Any:
    numel, start = record.attribute("numel"), record.attribute("start")
    if type(numel) is not int or type(start) is not int:
        return classes.UNKNOWN
    return FragmentAddress(numel, start)


_TORCH_BUILDERS: dict[str, Callable[[OpaqueObject], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda record: TorchConstant("layout", record.args[0].removeprefix("torch.")),
    "deepspeed.runtime.zero.config.ZeroStageEnum": _stage,
    "deepspeed.utils.tensor_fragment.fragment_address": _fragment_address,
}
"""Builders for objects of torch and DeepSpeed, by the full name of the pickled class or function."""
