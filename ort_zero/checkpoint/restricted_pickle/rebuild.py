"""Make values from the records of a pickle: tensors become records of their place in the file.

Only objects of the classes and functions in the tables here are rebuilt, by functions of ort_zero that check the
arguments first. Every other object stays a record of its class and state.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from operator import index
from typing import Any

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.restricted_pickle.unpickler import PersistentId, unpickled
from ort_zero.checkpoint.restricted_pickle.values import (
    AttributeReference,
    ClassReference,
    FragmentAddress,
    MalformedPickleError,
    OpaqueObject,
    StoredStorage,
    StoredTensor,
    TorchConstant,
)

ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What builders raise for other contents than the class pickles."""

_Builder = Callable[[OpaqueObject], Any]
_NUMBERS = (int, float, bool, type(None))
_NUMPY_TYPE = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")
_FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (list, dict, set, tuple, int, float, bool, str, bytes)}


def _calling(make: Callable[..., Any], *types: type) -> _Builder:
    """Return a builder that calls `make` with the arguments of a record of nothing else, if all are of `types`."""

    def build(record: OpaqueObject) -> Any:
        others = record.state or record.items or record.entries
        return make(*record.args) if not others and all(type(a) in types for a in record.args) else None

    return build


# ---- classes of Python ----------------------------------------------------------------------------------------------


def _encoded(text: str, codec: str) -> Any:
    """Return bytes, which protocol 2 writes as text with a codec."""
    return text.encode("latin1") if codec in ("latin1", "latin-1") else None


def _bytearray(content: Any = b"", *codec: str) -> Any:
    return bytearray(_encoded(content, *codec) if codec else content)


def _default_dict(record: OpaqueObject) -> Any:
    (factory,) = record.args or (None,)
    if factory is not None:
        factory = _FACTORIES[factory.class_name]
    return collections.defaultdict(factory, record.entries)


def _deque(record: OpaqueObject) -> Any:
    items, max_length = (*record.args, None, None)[:2]
    fit = type(items) in (list, tuple, type(None))
    return collections.deque([*(items or ()), *record.items], max_length) if fit else None


def _namespace(record: OpaqueObject) -> Any:
    state = record.state or {}
    if record.args or type(state) is not dict or not all(type(key) is str for key in state):
        return None
    namespace = argparse.Namespace()
    vars(namespace).update(state)
    return namespace


# ---- classes of numpy -----------------------------------------------------------------------------------------------


def _numpy_dtype(record: OpaqueObject) -> Any:
    """Return a numeric dtype, pickled as dtype("f4", False, True) with the state (version, byte order, ...)."""
    import numpy as np

    text, order = record.args[0], record.state[1]
    return np.dtype(text).newbyteorder(order) if _NUMPY_TYPE.fullmatch(text) and order in "<>|=" else None


def _numpy_array(raw: Any, dtype: Any, shape: Any, order: Any) -> Any:
    import numpy as np

    fit = isinstance(dtype, np.dtype) and type(raw) in (bytes, bytearray) and type(shape) is tuple
    return np.frombuffer(bytearray(raw), dtype).reshape(shape, order=order) if fit else None


def _numpy_state(record: OpaqueObject) -> Any:
    """Return an array, pickled as _reconstruct(ndarray, (0,), b"b"); state: (version, shape, dtype, order, bytes)."""
    _, shape, dtype, columns_first, raw = record.state
    return _numpy_array(raw, dtype, shape, "F" if columns_first else "C")


BUILDERS: dict[str, _Builder] = {
    "_codecs.encode": _calling(_encoded, str),
    "builtins.bytes": _calling(bytes),
    "builtins.bytearray": _calling(_bytearray, bytes, str),
    "builtins.set": _calling(set, list, tuple),
    "builtins.frozenset": _calling(frozenset, list, tuple),
    "builtins.complex": _calling(complex, *_NUMBERS),
    "builtins.range": _calling(range, *_NUMBERS),
    "builtins.slice": _calling(slice, *_NUMBERS),
    # before Python 2.7 the pairs were arguments
    "collections.OrderedDict": lambda r: collections.OrderedDict([*(r.args[0] if r.args else ()), *r.entries]),
    "collections.defaultdict": _default_dict,
    "collections.Counter": _calling(collections.Counter, dict),
    "collections.deque": _deque,
    "argparse.Namespace": _namespace,
    "datetime.datetime": _calling(datetime.datetime, bytes, datetime.timezone),
    "datetime.date": _calling(datetime.date, bytes),
    "datetime.time": _calling(datetime.time, bytes, datetime.timezone),
    "datetime.timedelta": _calling(datetime.timedelta, *_NUMBERS),
    "datetime.timezone": _calling(datetime.timezone, datetime.timedelta, str),
    "numpy.dtype": _numpy_dtype,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _calling(int, int),
    "deepspeed.utils.tensor_fragment.fragment_address": lambda record: FragmentAddress(
        index(record.state["numel"]), index(record.state["start"])
    ),
}
"""By the full name of the pickled class or function: functions that take the record of an object, whose parts are
rebuilt already, and return the value. The record stays if a builder returns None or raises one of :data:`ERRORS`."""
for _module in ("pathlib.", "pathlib._local."):
    for _name in ("PosixPath", "Path"):
        BUILDERS[_module + _name] = _calling(pathlib.PosixPath, str)
    for _name in ("PurePosixPath", "PurePath"):
        BUILDERS[_module + _name] = _calling(pathlib.PurePosixPath, str)
    for _name in ("WindowsPath", "PureWindowsPath"):
        BUILDERS[_module + _name] = _calling(pathlib.PureWindowsPath, str)
for _module in ("numpy.core.", "numpy._core."):
    BUILDERS[f"{_module}multiarray.scalar"] = lambda record: _numpy_array(record.args[1], record.args[0], (), "C")[()]
    BUILDERS[f"{_module}multiarray._reconstruct"] = _numpy_state
    BUILDERS[f"{_module}numeric._frombuffer"] = lambda record: _numpy_array(*record.args[:4])


_MAX_NESTING = 200
"""Maximum number of levels of containers and objects within each other."""
_MIN_VALUE_LIMIT = 1 << 20
_VALUES_PER_BYTE = 16
"""A pickle may expand to this many values per byte, and to `_MIN_VALUE_LIMIT` values in any case. A value counts once
for each container that refers to it: a few bytes can refer to one list, and to each of its items, many times."""
_MAX_AXES = 64
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, bytearray))
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
        "ComplexDouble": "complex128", "ComplexFloat": "complex64", "Int": "int32", "Short": "int16", "Char": "int8",
        "Byte": "uint8", "Bool": "bool", "QInt8": "qint8", "QUInt8": "quint8", "QInt32": "qint32",
    }.items()
}  # fmt: skip
_TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def read_pickle(
    data: bytes, storages: Mapping[str, tuple[int, int]], check: Callable[[StoredTensor], Any]
) -> tuple[Any, frozenset[str]]:
    """Return the value of a pickle of torch, and the names of the classes whose objects stayed records.

    Args:
        storages: (offset, length) in bytes of the data of each storage in the file, by its key.
        check: is called with each tensor, and raises an error for one that the file cannot hold.

    Raises:
        MalformedPickleError: the pickle is damaged, its values are nested too deeply or are too many, or a tensor has
            no data.
        HostilePickleError: the pickle calls a function that acts on the machine, or the result of another call.
    """
    builder = _Rebuilder(storages, check, max(_MIN_VALUE_LIMIT, _VALUES_PER_BYTE * len(data)))
    result = builder.value(unpickled(data), 0)
    return result, frozenset(builder.opaque)


class _Rebuilder:
    """The rebuilder of one pickle's values, from the leaves up; each container and object is rebuilt once."""

    def __init__(self, storages: Mapping[str, tuple[int, int]], check: Callable[[StoredTensor], Any], value_limit: int):
        self.opaque: set[str] = set()
        self._storages = storages
        self._check = check
        self._value_limit = value_limit
        self._count = 0
        self._done: dict[int, tuple[Any, Any, int]] = {}
        """(raw value, rebuilt value, number of values in it) by the id of the raw value."""
        self._open: set[int] = set()
        """Ids of the raw containers and objects around the value that is being rebuilt."""

    def value(self, raw: Any, depth: int) -> Any:
        """Return the value of `raw`, which lies `depth` levels below the outermost container."""
        if type(raw) in _PLAIN:
            self._count += 1
            return raw
        key = id(raw)
        if key in self._done:
            _, result, count = self._done[key]
            self._add(count)
            return result
        if depth > _MAX_NESTING:
            raise MalformedPickleError("its values are nested too deeply")
        if key in self._open:  # it contains itself; no reader follows such a reference
            return raw if isinstance(raw, OpaqueObject) else OpaqueObject()
        before = self._count
        self._add(1)
        self._open.add(key)
        result = self._rebuilt(raw, depth + 1)
        self._open.discard(key)
        self._done[key] = raw, result, self._count - before
        return result

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > self._value_limit:
            raise MalformedPickleError(f"it repeats values again and again, more than {self._value_limit} in all")

    def _rebuilt(self, raw: Any, depth: int) -> Any:
        kind, value = type(raw), self.value
        if kind is dict:
            return {value(key, depth): value(item, depth) for key, item in raw.items()}
        if kind in (list, tuple, set, frozenset):
            return kind([value(item, depth) for item in raw])
        if isinstance(raw, AttributeReference):
            self.opaque.add(raw.class_name)  # a member of an enumeration, by some versions of Python
        if isinstance(raw, ClassReference):
            name = raw.class_name.removeprefix("torch.")
            return TorchConstant("dtype", name) if raw.class_name != name and dtypes.is_dtype_name(name) else raw
        if not isinstance(raw, OpaqueObject):
            raise MalformedPickleError(f"it holds a value of the unexpected type {kind.__name__}")
        if isinstance(raw, PersistentId):
            return self._storage(*raw.args)
        raw.args, raw.state = value(raw.args, depth), value(raw.state, depth)
        raw.items = [value(item, depth) for item in raw.items]
        raw.entries = [(value(key, depth), value(item, depth)) for key, item in raw.entries]
        return self._object(raw)

    def _object(self, record: OpaqueObject) -> Any:
        """Return the value of a record whose parts are rebuilt, or the record itself if its class is unknown."""
        name = record.class_name
        of_torch = _TORCH_BUILDERS.get(name)
        try:
            result = of_torch(*record.args) if of_torch else BUILDERS.get(name, lambda _: None)(record)
        except MalformedPickleError:
            raise
        except ERRORS as error:
            if of_torch:
                raise MalformedPickleError(f"{name} has other arguments than torch writes: {error}") from None
            result = None
        if result is None:
            self.opaque.add(name)
            return record
        if type(result) is StoredTensor:
            self._check(result)
        return result

    def _storage(self, pid: Any) -> StoredStorage:
        """Return the storage of a persistent id: ("storage", class, key, device, number of elements)."""
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or type(pid[2]) is not str:
            raise MalformedPickleError("a persistent id in it is not of a storage of torch")
        key = pid[2]
        if key not in self._storages:
            raise MalformedPickleError(f"the file has no record for its storage {key[:100]!r}")
        return StoredStorage(*self._storages[key], _STORAGES.get(getattr(pid[1], "class_name", "")))


# ---- tensors --------------------------------------------------------------------------------------------------------


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any = None, _hooks: Any = None, metadata: Any = None
) -> Any:
    """Return a dense tensor, pickled by _rebuild_tensor or _rebuild_tensor_v2 with these arguments."""
    return _typed_tensor(storage, offset, shape, strides, None, None, TorchConstant("dtype", storage.dtype), metadata)


def _typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> Any:
    """Return a dense tensor, pickled by _rebuild_tensor_v3 with these arguments."""
    if type(storage) is not StoredStorage:
        raise MalformedPickleError("a tensor has no storage")
    # metadata: of a conjugate or negated view, whose values differ from the stored ones
    if metadata or type(dtype) is not TorchConstant or not dtypes.is_dtype_name(dtype.name):
        return None
    if type(shape) is not tuple or type(strides) is not tuple or not len(shape) == len(strides) <= _MAX_AXES:
        raise MalformedPickleError("a tensor has no shape, or its shape and strides do not fit together")
    if any(type(n) is not int or not 0 <= n < 1 << 63 for n in (*shape, *strides, offset)):
        raise MalformedPickleError("the shape, strides or offset of a tensor are below zero or too large")
    begin = storage.offset + offset * dtypes.itemsize_of(dtype.name)
    return StoredTensor(begin, dtype.name, shape, strides, storage.offset)


def _parameter(data: Any, *_: Any) -> Any:
    """Return the tensor of a parameter, pickled as _rebuild_parameter(data, requires_grad, hooks[, state])."""
    return data if isinstance(data, StoredTensor) else None


def _tensor_with_attributes(function: Any, kind: Any, args: Any, _state: Any) -> Any:
    """Return a tensor without its attributes, pickled as _rebuild_from_type_v2(function, type, args, state)."""
    named = isinstance(function, ClassReference) and isinstance(kind, ClassReference)
    if not named or kind.class_name not in _TENSOR_TYPES or function.class_name not in _TORCH_BUILDERS:
        return None
    return _TORCH_BUILDERS[function.class_name](*args)


def _size(numbers: Any) -> Any:
    shape = tuple(numbers)
    if any(type(number) is not int for number in shape) or len(shape) > _MAX_AXES:
        return None
    if any(number < 0 for number in shape) or math.prod(shape) >= 1 << 63:
        raise MalformedPickleError("a shape has more elements than any tensor")
    return shape


def _device(*parts: Any) -> Any:
    name = ":".join(str(part) for part in parts)
    return TorchConstant("device", name) if re.fullmatch(r"[a-z_0-9]{1,40}(:\d{1,4})?", name) else None


def _layout(name: Any) -> Any:
    layout = re.fullmatch(r"torch\.(strided|sparse_coo|sparse_(csr|csc|bsr|bsc)|jagged|_mkldnn)", name)
    return TorchConstant("layout", layout[1]) if layout else None


_TORCH_BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
}
"""Functions that take the arguments of torch's functions, by the full name of the latter."""
