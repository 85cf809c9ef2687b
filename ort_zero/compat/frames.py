"""Distinguishes the user's code from that of libraries, and reads which globals code uses."""

from __future__ import annotations

import dis
import functools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<name>\w+)")
_OURS = str(Path(__file__).parents[1]) + os.sep
_TRACER = os.path.join(_OURS, "runtime", "export", "tracer.py")
_ENTRIES = ("_run_traced", "_run_in_pytorch")
"""Functions of the tracer that call the user's module."""
_WRAPPERS = frozenset({"wrapper", "wrapped", "inner", "wrapped_forward", "new_forward"})
"""Names of the functions that decorators put around a method."""
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


_EXTENDED_ARG, _LOAD_GLOBAL = dis.opmap["EXTENDED_ARG"], dis.opmap["LOAD_GLOBAL"]
_CALL_BIT = int(sys.version_info >= (3, 11))
"""The lowest bit of LOAD_GLOBAL's argument tells since Python 3.11 whether a call follows."""
_DUPLICATE = dis.opmap["COPY"] if "COPY" in dis.opmap else dis.opmap["DUP_TOP"]
_LOAD_ATTR = dis.opmap["LOAD_ATTR"]


@functools.lru_cache(maxsize=16384)
def is_foreign(file: str) -> bool:
    """Return True for a file of torch, ORT, DeepSpeed, Python itself or ort_zero."""
    if file.startswith("<"):  # made by exec; torch.fx names in it the file that it traced
        return file.startswith("<frozen")
    package = _PACKAGES.search(file)
    if package is not None:
        return package["name"] in ("torch", "onnxruntime", "onnx", "deepspeed", "ort_zero", "typing_extensions")
    return file.startswith((_OURS, _STANDARD))


def is_standard(file: str) -> bool:
    """Return True for a file of Python's own library."""
    return file.startswith(_STANDARD) and _PACKAGES.search(file) is None


class Frame(NamedTuple):
    """One frame of a Python stack."""

    file: str
    line: int
    function: str


def users_line(frames: Iterable[Frame]) -> str:
    """Return "FILE:LINE in FUNCTION" of the innermost code of the user; that of a library where there is none.

    Args:
        frames: the stack, the innermost frame last. What called the model is left out, if the stack reaches that far.
    """
    stack = list(frames)
    entries = (i for i, frame in enumerate(stack) if frame.file == _TRACER and frame.function in _ENTRIES)
    entry = max(entries, default=-1)
    own = [frame for frame in stack[entry + 1 :] if not is_foreign(frame.file)]
    written = [frame for frame in own if not is_installed(frame.file)]
    plain = [frame for frame in own if frame.function not in _WRAPPERS]
    best = written or plain or own
    return f"{best[-1].file}:{best[-1].line} in {best[-1].function}" if best else ""


def is_ours(file: str) -> bool:
    """Return True for a file of ort_zero or DeepSpeed."""
    package = _PACKAGES.search(file)
    return package["name"] in ("deepspeed", "ort_zero") if package is not None else file.startswith(_OURS)


def is_installed(file: str) -> bool:
    """Return True for a file in site-packages, of whatever package."""
    return _PACKAGES.search(file) is not None


def global_names(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the names that `code` and the functions in it look up as globals, and those of attributes and imports."""
    found, names, more, ops = set(), set(code.co_names), 0, code.co_code
    for place in range(0, len(ops), 2):
        op, arg = ops[place], ops[place + 1] | more
        more = arg << 8 if op == _EXTENDED_ARG else 0
        if op == _LOAD_GLOBAL:
            found.add(code.co_names[arg >> _CALL_BIT])
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner, attributes = global_names(constant)
            found |= inner
            names |= attributes
    return found, names


def is_augmented_read(frame: FrameType) -> bool:
    """Return True while `frame` reads an attribute for an augmented assignment to it, such as ``self.calls += 1``."""
    ops, place = frame.f_code.co_code, frame.f_lasti
    if place < 2 or ops[place] != _LOAD_ATTR:
        return False
    place -= 2
    while place > 0 and ops[place] == _EXTENDED_ARG:
        place -= 2
    return ops[place] == _DUPLICATE and (_DUPLICATE == dis.opmap.get("DUP_TOP") or ops[place + 1] == 1)


def user_line() -> str:
    """Return ``FILE:LINE in FUNCTION`` of the model's code that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "unknown line"
