"""Rebuild pickled objects of harmless classes of Python and numpy, and list the functions to refuse.

Each class has a builder here: a function that takes the record of an object, checks its types and sizes, and returns
the value. A record that fails a check stays a record.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import re
import uuid
from collections.abc import Callable
from typing import Any

from ort_zero.checkpoint.restricted_pickle.values import ClassReference, OpaqueObject

UNKNOWN = object()
"""Result of a builder for an object that stays a record."""

_HOSTILE_MODULES = frozenset(
    "os posix nt sys subprocess _posixsubprocess pty socket shutil ctypes importlib runpy code codeop pdb bdb timeit "
    "webbrowser urllib http ftplib smtplib telnetlib tempfile multiprocessing threading _thread concurrent asyncio "
    "signal site imp zipimport pip ensurepip venv commands builtins io _io functools operator pickle _pickle marshal "
    "shelve dill cloudpickle joblib linecache types".split()
)
_HARMLESS = frozenset(
    (
        *(
            f"builtins.{name}"
            for name in (
                "object list dict tuple set frozenset int float bool str bytes bytearray complex slice range "
                "getattr type"
            ).split()
        ),
        *("types.SimpleNamespace", "functools.partial", "operator.itemgetter", "operator.attrgetter"),
        *("io.BytesIO", "_io.BytesIO", "io.StringIO", "_io.StringIO"),
    )
)
_EXCEPTION = re.compile(r"builtins\.[A-Z]\w*(Error|Exception|Warning|StopIteration|KeyboardInterrupt|SystemExit)")
_HOSTILE = re.compile(
    r"torch\.((hub|utils\.cpp_extension|jit|package)\b.*|load|save)"
    r"|numpy\.((testing|f2py)\b.*|load|save|fromfile|memmap)"
)


def is_hostile(name: str) -> bool:
    """Return True if a function or class acts on the machine or runs code, and no checkpoint needs to call it.

    ort_zero calls nothing in either case. But a file with a hostile call does harm where ``torch.load`` unpickles it.

    Args:
        name: full name of the function or class.
    """
    if name in _HARMLESS or _EXCEPTION.fullmatch(name):
        return False
    return name.partition(".")[0] in _HOSTILE_MODULES or _HOSTILE.fullmatch(name) is not None


def rebuilt(record: OpaqueObject) -> Any:
    """Return the value that a record describes, :data:`UNKNOWN` for other classes and for unexpected contents."""
    build = _BUILDERS.get(record.class_name)
    if build is None:
        return UNKNOWN
    try:
        return build(record)
    except (TypeError, ValueError, ArithmeticError, IndexError, KeyError, AttributeError):
        return UNKNOWN


# ---- classes of Python ----------------------------------------------------------------------------------------------


def _only_args(record: OpaqueObject) -> bool:
    return not (record.kwargs or record.state or record.items or record.entries)


def _encoded(record: OpaqueObject) -> Any:
    """Return bytes, which protocol 2 writes as text with a codec: _codecs.encode(text, "latin1")."""
    text, codec = record.args
    return text.encode("latin1") if type(text) is str and codec in ("latin1", "latin-1") else UNKNOWN


def _bytes(record: OpaqueObject) -> Any:
    return b"" if not record.args and _only_args(record) else UNKNOWN


def _bytearray(record: OpaqueObject) -> Any:
    if not record.args:
        return bytearray()
    content = record.args[0]
    if type(content) is str and record.args[1:] == ("latin-1",):
        content = content.encode("latin1")
    return bytearray(content) if type(content) is bytes else UNKNOWN


def _ordered_dict(record: OpaqueObject) -> Any:
    pairs = record.args[0] if record.args else ()  # before Python 2.7; later versions pickle the pairs as entries
    return collections.OrderedDict([*((key, value) for key, value in pairs), *record.entries])


_FACTORIES: dict[str, Callable[[], Any]] = {
    f"builtins.{kind.__name__}": kind for kind in (list, dict, set, tuple, int, float, bool, str, bytes)
}


def _default_dict(record: OpaqueObject) -> Any:
    (factory,) = record.args or (None,)
    if factory is not None:
        if type(factory) is not ClassReference or factory.name not in _FACTORIES:
            return UNKNOWN
        factory = _FACTORIES[factory.name]
    return collections.defaultdict(factory, record.entries)


def _counter(record: OpaqueObject) -> Any:
    (counts,) = record.args or ({},)
    return collections.Counter(counts) if type(counts) is dict else UNKNOWN


def _deque(record: OpaqueObject) -> Any:
    items, max_length = (*record.args, None, None)[:2]
    if not (items is None or type(items) in (list, tuple)) or not (max_length is None or type(max_length) is int):
        return UNKNOWN
    return collections.deque([*(items or ()), *record.items], max_length)


def _container(kind: type) -> Callable[[OpaqueObject], Any]:
    def build(record: OpaqueObject) -> Any:
        (items,) = record.args or ((),)
        return kind(items) if type(items) in (list, tuple) and _only_args(record) else UNKNOWN

    return build


def _from_numbers(kind: Callable[..., Any]) -> Callable[[OpaqueObject], Any]:
    def build(record: OpaqueObject) -> Any:
        fit = all(type(a) in (int, float, bool, type(None)) for a in record.args)
        return kind(*record.args) if fit and _only_args(record) else UNKNOWN

    return build


def _from_text(kind: Callable[[str], Any]) -> Callable[[OpaqueObject], Any]:
    def build(record: OpaqueObject) -> Any:
        (text,) = record.args
        return kind(text) if type(text) is str and len(text) < 1000 and _only_args(record) else UNKNOWN

    return build


def _fraction(record: OpaqueObject) -> Any:
    if len(record.args) == 2 and all(type(number) is int for number in record.args):
        return fractions.Fraction(*record.args)
    (text,) = record.args
    # no exponent: a short text such as 1e999999999 would make a huge number
    return fractions.Fraction(text) if re.fullmatch(r"-?\d{1,999}(/\d{1,999})?", text) else UNKNOWN


def _path(kind: type[pathlib.PurePath]) -> Callable[[OpaqueObject], Any]:
    def build(record: OpaqueObject) -> Any:
        return kind(*record.args) if all(type(a) is str for a in record.args) and _only_args(record) else UNKNOWN

    return build


def _namespace(record: OpaqueObject) -> Any:
    state = record.state or {}
    if record.args or type(state) is not dict or not all(type(key) is str for key in state):
        return UNKNOWN
    namespace = argparse.Namespace()
    vars(namespace).update(state)
    return namespace


def _from_packed_time(kind: type) -> Callable[[OpaqueObject], Any]:
    """Return the builder of a class of :mod:`datetime`, whose pickled form is bytes and a time zone."""

    def build(record: OpaqueObject) -> Any:
        packed, *zone = record.args
        fit = type(packed) is bytes and len(packed) <= 10
        fit = fit and len(zone) <= 1 and all(type(z) is datetime.timezone for z in zone)
        return kind(packed, *zone) if fit and _only_args(record) else UNKNOWN

    return build


def _time_zone(record: OpaqueObject) -> Any:
    fit = record.args and type(record.args[0]) is datetime.timedelta and all(type(a) is str for a in record.args[1:])
    return datetime.timezone(*record.args) if fit and _only_args(record) else UNKNOWN


def _uuid(record: OpaqueObject) -> Any:
    number = record.attribute("int")
    return uuid.UUID(int=number) if type(number) is int else UNKNOWN


# ---- classes of numpy -----------------------------------------------------------------------------------------------

_NUMPY_TYPE = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")


def _numpy_dtype(record: OpaqueObject) -> Any:
    """Return a numeric dtype, pickled as dtype("f4", False, True) with the state (version, byte order, ...)."""
    import numpy as np

    text, state = record.args[0], record.state
    order: Any = state[1] if type(state) is tuple and len(state) > 1 else "="
    if type(text) is not str or not _NUMPY_TYPE.fullmatch(text) or order not in ("<", ">", "|", "="):
        return UNKNOWN
    return np.dtype(text).newbyteorder(order)


def _numpy_scalar(record: OpaqueObject) -> Any:
    import numpy as np

    dtype, raw = record.args
    fit = isinstance(dtype, np.dtype) and type(raw) is bytes and len(raw) == dtype.itemsize
    return np.frombuffer(raw, dtype)[0] if fit else UNKNOWN


def _numpy_array(record: OpaqueObject) -> Any:
    """Return an array, pickled as _reconstruct(ndarray, (0,), b"b"); state: (version, shape, dtype, order, bytes)."""
    _, shape, dtype, columns_first, raw = record.state
    return _array_of(raw, dtype, shape, "F" if columns_first else "C")


def _numpy_buffer(record: OpaqueObject) -> Any:
    """Return an array, pickled by protocol 5 as _frombuffer(bytes, dtype, shape, order)."""
    raw, dtype, shape, order = record.args[:4]
    return _array_of(raw, dtype, shape, order)


def _array_of(raw: Any, dtype: Any, shape: Any, order: Any) -> Any:
    import numpy as np

    fit = isinstance(dtype, np.dtype) and type(raw) in (bytes, bytearray) and order in ("C", "F")
    if not fit or type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        return UNKNOWN
    return np.frombuffer(bytearray(raw), dtype).reshape(shape, order=order)


_BUILDERS: dict[str, Callable[[OpaqueObject], Any]] = {
    "_codecs.encode": _encoded,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.set": _container(set),
    "builtins.frozenset": _container(frozenset),
    "builtins.complex": _from_numbers(complex),
    "builtins.range": _from_numbers(range),
    "builtins.slice": _from_numbers(slice),
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "argparse.Namespace": _namespace,
    "datetime.datetime": _from_packed_time(datetime.datetime),
    "datetime.date": _from_packed_time(datetime.date),
    "datetime.time": _from_packed_time(datetime.time),
    "datetime.timedelta": _from_numbers(datetime.timedelta),
    "datetime.timezone": _time_zone,
    "decimal.Decimal": _from_text(decimal.Decimal),
    "fractions.Fraction": _fraction,
    "uuid.UUID": _uuid,
    "numpy.dtype": _numpy_dtype,
    **{
        f"{module}.{name}": build
        for module in ("pathlib", "pathlib._local")
        for name, build in {
            "PosixPath": _path(pathlib.PosixPath),
            "PurePosixPath": _path(pathlib.PurePosixPath),
            "WindowsPath": _path(pathlib.PureWindowsPath),
            "PureWindowsPath": _path(pathlib.PureWindowsPath),
            "Path": _path(pathlib.PosixPath),
            "PurePath": _path(pathlib.PurePosixPath),
        }.items()
    },
    **{
        f"numpy.{core}.{name}": build
        for core in ("core", "_core")
        for name, build in {
            "multiarray.scalar": _numpy_scalar,
            "multiarray._reconstruct": _numpy_array,
            "numeric._frombuffer": _numpy_buffer,
        }.items()
    },
}
"""Builders for objects of Python and numpy, by the full name of the pickled class or function."""
