"""Rebuild pickled objects of harmless classes of Python, numpy and DeepSpeed.

Each class has a builder here: a function that takes the record of an object, whose parts are rebuilt already, and
returns the value. The record stays if the builder returns None or raises one of :data:`ERRORS`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import re
from collections.abc import Callable
from operator import index
from typing import Any

from ort_zero.checkpoint.restricted_pickle.values import FragmentAddress, OpaqueObject

ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What builders raise for other contents than the class pickles."""

_Builder = Callable[[OpaqueObject], Any]
_NUMBERS = (int, float, bool, type(None))
_NUMPY_TYPE = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")
_FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (list, dict, set, tuple, int, float, bool, str, bytes)}


def _call(make: Callable[..., Any], *types: type) -> _Builder:
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
    "_codecs.encode": _call(_encoded, str),
    "builtins.bytes": _call(bytes),
    "builtins.bytearray": _call(_bytearray, bytes, str),
    "builtins.set": _call(set, list, tuple),
    "builtins.frozenset": _call(frozenset, list, tuple),
    "builtins.complex": _call(complex, *_NUMBERS),
    "builtins.range": _call(range, *_NUMBERS),
    "builtins.slice": _call(slice, *_NUMBERS),
    # before Python 2.7 the pairs were arguments
    "collections.OrderedDict": lambda r: collections.OrderedDict([*(r.args[0] if r.args else ()), *r.entries]),
    "collections.defaultdict": _default_dict,
    "collections.Counter": _call(collections.Counter, dict),
    "collections.deque": _deque,
    "argparse.Namespace": _namespace,
    "datetime.datetime": _call(datetime.datetime, bytes, datetime.timezone),
    "datetime.date": _call(datetime.date, bytes),
    "datetime.time": _call(datetime.time, bytes, datetime.timezone),
    "datetime.timedelta": _call(datetime.timedelta, *_NUMBERS),
    "datetime.timezone": _call(datetime.timezone, datetime.timedelta, str),
    "numpy.dtype": _numpy_dtype,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _call(int, int),
    "deepspeed.utils.tensor_fragment.fragment_address": lambda record: FragmentAddress(
        index(record.state["numel"]), index(record.state["start"])
    ),
}
"""Builders by the full name of the pickled class or function."""
for _module in ("pathlib.", "pathlib._local."):
    for _name in ("PosixPath", "Path"):
        BUILDERS[_module + _name] = _call(pathlib.PosixPath, str)
    for _name in ("PurePosixPath", "PurePath"):
        BUILDERS[_module + _name] = _call(pathlib.PurePosixPath, str)
    for _name in ("WindowsPath", "PureWindowsPath"):
        BUILDERS[_module + _name] = _call(pathlib.PureWindowsPath, str)
for _module in ("numpy.core.", "numpy._core."):
    BUILDERS[f"{_module}multiarray.scalar"] = lambda record: _numpy_array(record.args[1], record.args[0], (), "C")[()]
    BUILDERS[f"{_module}multiarray._reconstruct"] = _numpy_state
    BUILDERS[f"{_module}numeric._frombuffer"] = lambda record: _numpy_array(*record.args[:4])
