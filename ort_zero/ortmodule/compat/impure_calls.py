"""Notices calls whose result is another one each time: clocks, files, queues, random bytes, the seeds of PyTorch.

While a module is traced their results would become constants of its graph. Seeds count because ONNX Runtime draws from
generators of its own: ``torch.manual_seed(0)`` in a forward would not repeat what the graph draws.

Clocks are used for measuring as well. So a time may be subtracted, stored and printed; it is refused where it decides
something: when it is compared, becomes an integer, or is given to a function of PyTorch
(:func:`is_time`).
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pathlib
import queue
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import is_foreign, is_standard

_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
           "process_time_ns")  # fmt: skip
_SEEDS = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
_WRAPPERS = (os.sep + "contextlib.py", os.path.join("torch", "random.py"))
"""Ends of the names of files whose functions call for the user's code."""
_OF_MODULES = os.path.join("torch", "nn", "modules", "module.py")
_HOMES = (time, os, random, torch, torch.random)
"""Modules of the functions themselves; ``random`` asks the system for ``secrets`` and NumPy too."""
_NOTHING: Callable[[str], None] = lambda what: None  # noqa: E731
_notice: Callable[[str], None] = _NOTHING


@contextlib.contextmanager
def noticed(notice: Callable[[str], None]) -> Iterator[None]:
    """Call `notice` with what the user's code does, where it makes such a call in the block.

    Args:
        notice: takes such as "calls torch.manual_seed"; may raise.
    """
    global _notice
    replacements = _replacements()
    originals: list[tuple[Any, str, Any]] = [(random.Random, "seed", random.Random.seed)]
    for module in list(sys.modules.values()):
        originals += [(module, name, vars(module)[name]) for name in _names_in(module, replacements.keys())]
    for owner, name, replacement in _from_outside():
        originals.append((owner, name, vars(owner)[name]))
        replacements[id(vars(owner)[name])] = replacement
    for owner, name, value in originals:
        setattr(owner, name, replacements[id(value)])
    before, _notice = _notice, notice
    try:
        yield
    finally:
        _notice = before
        for owner, name, value in originals:
            setattr(owner, name, value)


def _replacements() -> dict[int, Callable]:
    """Return the functions that notice calls, by the ``id()`` of those that they replace."""
    made: dict[int, Callable] = {id(getattr(time, name)): _clock(getattr(time, name)) for name in _CLOCKS}
    for name in _SEEDS:
        function = getattr(torch, name)
        made[id(function)] = _noticing(function, f"calls torch.{name}", called_by_user)
        made[id(getattr(torch.random, name))] = made[id(function)]
    made[id(os.urandom)] = _noticing(os.urandom, "draws random bytes from the system", _serves_user)
    made[id(random.Random.seed)] = _noticing_seed(random.Random.seed)
    return made


def _from_outside() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner and name of what brings values from outside of the process or from other threads, and what notices
    its use."""
    opening: Any = _noticing(open, "opens a file", _serves_user)
    accessor = getattr(pathlib, "_NormalAccessor", None)
    if accessor is not None:  # Python 3.10's pathlib holds the function in a class, where it would become a method
        opening = staticmethod(opening)
        yield accessor, "open", opening
    yield builtins, "open", opening
    yield io, "open", opening  # pathlib's
    yield queue.Queue, "get", _noticing(queue.Queue.get, "takes from a queue", _serves_user)
    shared = sys.modules.get("multiprocessing.sharedctypes")
    if shared is not None:
        value = shared.Synchronized.value
        reads = _noticing(value.fget, "reads a value that processes share", _serves_user)
        yield shared.Synchronized, "value", property(reads, value.fset)


_names_of_file: dict[str, tuple[int, list[str]]] = {}
"""Number of globals of each file that was searched, and those of their names that hold one of the functions."""


def _names_in(module: Any, functions: Collection[int]) -> list[str]:
    """Return the names under which the user's code finds one of the functions in a module.

    A file is searched again when it has got more globals: there are thousands of files.

    Args:
        module: a value of ``sys.modules``.
        functions: the ``id()`` of each function.
    """
    names = getattr(module, "__dict__", {})
    if module not in _HOMES:
        file = names.get("__file__")
        if not isinstance(file, str) or is_foreign(file):
            return []
        size, known = _names_of_file.get(file, (0, []))
        if size == len(names):
            return [name for name in known if id(names.get(name)) in functions]
    found = [name for name, value in list(names.items()) if id(value) in functions]
    _names_of_file[names.get("__file__") or names["__name__"]] = len(names), found
    return found


def called_by_user() -> bool:
    """Return True if the function that calls this one was called by the user's code."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return _is_users(frame)


def _serves_user() -> bool:
    """Return True if the code outside of Python's own library that is running is the user's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return _is_users(frame)


def _is_users(frame: FrameType | None) -> bool:
    """Return True for a frame of the user's code, but for code that an import runs once."""
    if frame is None or is_foreign(frame.f_code.co_filename):
        return False
    while frame is not None and not frame.f_code.co_filename.endswith(_OF_MODULES):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return True


def _noticing(function: Callable, what: str, concerns_user: Callable[[], bool]) -> Callable:
    """Return `function` with a notice of each call that concerns the user's code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if concerns_user():
            _notice(what)
        return function(*args, **kwargs)

    return call


def _noticing_seed(function: Callable) -> Callable:
    """Return ``random.Random.seed`` with a notice of a generator that is seeded with nothing."""

    def seed(self: random.Random, a: Any = None, *args: Any, **kwargs: Any) -> None:
        if a is None and _serves_user():
            _notice("makes a random.Random without a seed")
        function(self, a, *args, **kwargs)

    return seed


# -- clocks ------------------------------------------------------------------------------------------------------------


def _clock(function: Callable) -> Callable:
    """Return a clock whose readings notice what they are used for."""

    def call() -> Any:
        reading = function()
        if not called_by_user():
            return reading
        return _Nanoseconds(reading) if isinstance(reading, int) else _Seconds(reading)

    return call


def is_time(value: Any) -> bool:
    """Return True for what a clock has shown, or what was computed from it, while a module was traced."""
    return isinstance(value, (_Seconds, _Nanoseconds))


def notice_time() -> None:
    """Notice that a time decides something."""
    _notice("uses the time of a clock")


class _Seconds(float):
    """A time in seconds that notices what it is used for; a copy of it is a plain number."""

    def __reduce__(self) -> tuple:
        return float, (float.__add__(self, 0.0),)


class _Nanoseconds(int):
    """A time in nanoseconds that notices what it is used for; a copy of it is a plain number."""

    def __reduce__(self) -> tuple:
        return int, (int.__add__(self, 0),)


def _computing(name: str) -> Callable:
    def compute(self: Any, *others: Any) -> Any:
        result = getattr(float if isinstance(self, float) else int, name)(self, *others)
        if isinstance(result, float):
            return _Seconds(result)
        return _Nanoseconds(result) if isinstance(result, int) else result

    return compute


def _deciding(name: str) -> Callable:
    def decide(self: Any, *others: Any) -> Any:
        notice_time()
        return getattr(float if isinstance(self, float) else int, name)(self, *others)

    return decide


for _kind, _base in ((_Seconds, float), (_Nanoseconds, int)):
    for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod",
                  "rmod", "neg", "abs"):  # fmt: skip
        setattr(_kind, f"__{_name}__", _computing(f"__{_name}__"))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "hash", "int", "round", "trunc", "floor", "ceil",
                  "divmod", "pow", "index", "and", "or", "xor", "lshift", "rshift"):  # fmt: skip
        if hasattr(_base, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _deciding(f"__{_name}__"))
