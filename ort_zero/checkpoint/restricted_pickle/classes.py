"""The harmless classes of Python and numpy whose pickled objects are rebuilt, and the functions that are refused.

Each class has a function here that takes what the pickle says of an object, checks its types and sizes, and returns the
value. What does not fit stays a record.
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
"""Returned for an object that stays a record."""

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
    """Return True for a function or class that acts on the machine or runs code, and that no checkpoint has to call.

    Nothing is called in either case. A file that wants it called does harm wherever else it is loaded, and is named.

    Args:
        name: full name.
    """
    if name in _HARMLESS or _EXCEPTION.fullmatch(name):
        return False
    return name.partition(".")[0] in _HOSTILE_MODULES or _HOSTILE.fullmatch(name) is not None


def rebuilt(made: OpaqueObject) -> Any:
    """Return the value of an object of a class in the table, :data:`UNKNOWN` for others and for what does not fit."""
    build = _TABLE.get(made.class_name)
    if build is None:
        return UNKNOWN
    try:
        return build(made)
    except (TypeError, ValueError, ArithmeticError, IndexError, KeyError, AttributeError):
        return UNKNOWN


# ---- Python's ------------------------------------------------------------------------------------------------------


def _only_args(made: OpaqueObject) -> bool:
    return not (made.kwargs or made.state or made.items or made.entries)


def _encoded(made: OpaqueObject) -> Any:
    """Return bytes, which protocol 2 writes as text that is encoded."""
    text, codec = made.args
    return text.encode("latin1") if type(text) is str and codec in ("latin1", "latin-1") else UNKNOWN


def _bytes(made: OpaqueObject) -> Any:
    return b"" if not made.args and _only_args(made) else UNKNOWN


def _bytearray(made: OpaqueObject) -> Any:
    if not made.args:
        return bytearray()
    content = made.args[0]
    if type(content) is str and made.args[1:] == ("latin-1",):
        content = content.encode("latin1")
    return bytearray(content) if type(content) is bytes else UNKNOWN


def _ordered_dict(made: OpaqueObject) -> Any:
    pairs = made.args[0] if made.args else ()  # before Python 2.7; since then the entries follow
    return collections.OrderedDict([*((key, value) for key, value in pairs), *made.entries])


_FACTORIES: dict[str, Callable[[], Any]] = {
    f"builtins.{kind.__name__}": kind for kind in (list, dict, set, tuple, int, float, bool, str, bytes)
}


def _default_dict(made: OpaqueObject) -> Any:
    (factory,) = made.args or (None,)
    if factory is not None:
        if type(factory) is not ClassReference or factory.name not in _FACTORIES:
            return UNKNOWN
        factory = _FACTORIES[factory.name]
    return collections.defaultdict(factory, made.entries)


def _counter(made: OpaqueObject) -> Any:
    (counts,) = made.args or ({},)
    return collections.Counter(counts) if type(counts) is dict else UNKNOWN


def _deque(made: OpaqueObject) -> Any:
    items, most = (*made.args, None, None)[:2]
    if not (items is None or type(items) in (list, tuple)) or not (most is None or type(most) is int):
        return UNKNOWN
    return collections.deque([*(items or ()), *made.items], most)


def _container(kind: type) -> Callable[[OpaqueObject], Any]:
    def build(made: OpaqueObject) -> Any:
        (items,) = made.args or ((),)
        return kind(items) if type(items) in (list, tuple) and _only_args(made) else UNKNOWN

    return build


def _of_numbers(kind: Callable[..., Any]) -> Callable[[OpaqueObject], Any]:
    def build(made: OpaqueObject) -> Any:
        fit = all(type(a) in (int, float, bool, type(None)) for a in made.args)
        return kind(*made.args) if fit and _only_args(made) else UNKNOWN

    return build


def _of_text(kind: Callable[[str], Any]) -> Callable[[OpaqueObject], Any]:
    def build(made: OpaqueObject) -> Any:
        (text,) = made.args
        return kind(text) if type(text) is str and len(text) < 1000 and _only_args(made) else UNKNOWN

    return build


def _fraction(made: OpaqueObject) -> Any:
    if len(made.args) == 2 and all(type(number) is int for number in made.args):
        return fractions.Fraction(*made.args)
    (text,) = made.args
    # no exponent: the numbers are to be no longer than the text
    return fractions.Fraction(text) if re.fullmatch(r"-?\d{1,999}(/\d{1,999})?", text) else UNKNOWN


def _path(kind: type[pathlib.PurePath]) -> Callable[[OpaqueObject], Any]:
    def build(made: OpaqueObject) -> Any:
        return kind(*made.args) if all(type(a) is str for a in made.args) and _only_args(made) else UNKNOWN

    return build


def _namespace(made: OpaqueObject) -> Any:
    state = made.state or {}
    if made.args or type(state) is not dict or not all(type(key) is str for key in state):
        return UNKNOWN
    namespace = argparse.Namespace()
    vars(namespace).update(state)
    return namespace


def _of_time(kind: type) -> Callable[[OpaqueObject], Any]:
    """Return the builder of a class of :mod:`datetime`, whose pickled form is bytes and a time zone."""

    def build(made: OpaqueObject) -> Any:
        packed, *zone = made.args
        fit = type(packed) is bytes and len(packed) <= 10
        fit = fit and len(zone) <= 1 and all(type(z) is datetime.timezone for z in zone)
        return kind(packed, *zone) if fit and _only_args(made) else UNKNOWN

    return build


def _time_zone(made: OpaqueObject) -> Any:
    fit = made.args and type(made.args[0]) is datetime.timedelta and all(type(a) is str for a in made.args[1:])
    return datetime.timezone(*made.args) if fit and _only_args(made) else UNKNOWN


def _uuid(made: OpaqueObject) -> Any:
    number = made.attribute("int")
    return uuid.UUID(int=number) if type(number) is int else UNKNOWN


# ---- numpy's -------------------------------------------------------------------------------------------------------

_NUMPY_TYPE = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")


def _numpy_dtype(made: OpaqueObject) -> Any:
    """Return a numeric dtype: dtype("f4", False, True) with the state (version, byte order, ...)."""
    import numpy as np

    text, state = made.args[0], made.state
    order: Any = state[1] if type(state) is tuple and len(state) > 1 else "="
    if type(text) is not str or not _NUMPY_TYPE.fullmatch(text) or order not in ("<", ">", "|", "="):
        return UNKNOWN
    return np.dtype(text).newbyteorder(order)


def _numpy_scalar(made: OpaqueObject) -> Any:
    import numpy as np

    dtype, raw = made.args
    fit = isinstance(dtype, np.dtype) and type(raw) is bytes and len(raw) == dtype.itemsize
    return np.frombuffer(raw, dtype)[0] if fit else UNKNOWN


def _numpy_array(made: OpaqueObject) -> Any:
    """Return an array: _reconstruct(ndarray, (0,), b"b") with the state (version, shape, dtype, order, bytes)."""
    _, shape, dtype, columns_first, raw = made.state
    return _array_of(raw, dtype, shape, "F" if columns_first else "C")


def _numpy_buffer(made: OpaqueObject) -> Any:
    """Return an array as protocol 5 writes it: _frombuffer(bytes, dtype, shape, order)."""
    raw, dtype, shape, order = made.args[:4]
    return _array_of(raw, dtype, shape, order)


def _array_of(raw: Any, dtype: Any, shape: Any, order: Any) -> Any:
    import numpy as np

    fit = isinstance(dtype, np.dtype) and type(raw) in (bytes, bytearray) and order in ("C", "F")
    if not fit or type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        return UNKNOWN
    return np.frombuffer(bytearray(raw), dtype).reshape(shape, order=order)


_TABLE: dict[str, Callable[[OpaqueObject], Any]] = {
    "_codecs.encode": _encoded,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.set": _container(set),
    "builtins.frozenset": _container(frozenset),
    "builtins.complex": _of_numbers(complex),
    "builtins.range": _of_numbers(range),
    "builtins.slice": _of_numbers(slice),
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "argparse.Namespace": _namespace,
    "datetime.datetime": _of_time(datetime.datetime),
    "datetime.date": _of_time(datetime.date),
    "datetime.time": _of_time(datetime.time),
    "datetime.timedelta": _of_numbers(datetime.timedelta),
    "datetime.timezone": _time_zone,
    "decimal.Decimal": _of_text(decimal.Decimal),
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
"""How objects of Python and numpy are rebuilt, by the full name of the class or function."""
