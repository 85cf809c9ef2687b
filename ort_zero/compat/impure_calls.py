"""Notices calls whose result is another one each time: clocks, the system's random bytes, the seeds of PyTorch.

While a module is traced their results would become constants of its graph. Seeds count because ONNX Runtime draws from
generators of its own: ``torch.manual_seed(0)`` in a forward would not repeat what the graph draws.

Clocks are used for measuring as well. So a time may be subtracted, stored and printed; it is refused where it decides
something: when it is compared, becomes an integer, or is given to a function of PyTorch
(:func:`is_time`).
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ort_zero.compat.frames import is_foreign

_CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
           "process_time_ns")  # fmt: skip
_SEEDS = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
_WRAPPERS = (os.sep + "contextlib.py", os.path.join("torch", "random.py"))
"""Ends of the names of files whose functions call for the user's code."""
_NOTHING: Callable[[str], None] = lambda what: None  # noqa: E731
_notice: Callable[[str], None] = _NOTHING


@contextlib.contextmanager
def noticed(notice: Callable[[str], None]) -> Iterator[None]:
    """Call `notice` with what the user's code does, where it makes such a call in the block.

    Args:
        notice: takes such as "reads a clock"; may raise.
    """
    global _notice
    replacements: dict[int, Callable] = {}
    for name in _CLOCKS:
        replacements[id(getattr(time, name))] = _clock(getattr(time, name))
    for name in _SEEDS:
        function = getattr(torch, name)
        replacements[id(function)] = replacements[id(getattr(torch.random, name))] = _noticing(
            function, f"calls torch.{name}", called_by_user
        )
    replacements[id(os.urandom)] = _noticing(os.urandom, "draws random bytes from the system", _serves_user)
    originals: list[tuple[Any, str, Any]] = [(random.Random, "seed", random.Random.seed)]
    replacements[id(random.Random.seed)] = _noticing_seed(random.Random.seed)
    for module in list(sys.modules.values()):
        if _may_hold(module):
            originals += [(module, n, v) for n, v in list(vars(module).items()) if id(v) in replacements]
    for owner, name, value in originals:
        setattr(owner, name, replacements[id(value)])
    before, _notice = _notice, notice
    try:
        yield
    finally:
        _notice = before
        for owner, name, value in originals:
            setattr(owner, name, value)


def _may_hold(module: Any) -> bool:
    """Return True for a module whose names the user's code may call: the functions' own home, or a file of the user's.

    ``random`` and ``secrets`` ask the system for the user's code.
    """
    if module in (time, os, random, torch, torch.random):
        return True
    file = getattr(module, "__dict__", {}).get("__file__")
    return isinstance(file, str) and not is_foreign(file)


def called_by_user() -> bool:
    """Return True if the function that calls this one was called by the user's code."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return not is_foreign(frame.f_code.co_filename)


def _serves_user() -> bool:
    """Return True if the code outside of Python's own library that is running is the user's."""
    frame: Any = sys._getframe(2)
    standard = os.path.dirname(os.__file__) + os.sep
    while frame is not None and frame.f_code.co_filename.startswith(standard) and "-packages" not in (
        frame.f_code.co_filename
    ):  # fmt: skip
        frame = frame.f_back
    return frame is not None and not is_foreign(frame.f_code.co_filename)


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
