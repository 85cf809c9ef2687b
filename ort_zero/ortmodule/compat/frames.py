"""Distinguishes the user's code from that of libraries, and reads which globals code uses."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\](?P<name>\w+)")
_OURS = str(Path(__file__).parents[2]) + os.sep
_TRACER = os.path.join(_OURS, "runtime", "export", "tracer.py")
_ENTRIES = ("_run_traced", "_run_in_pytorch")
"""Functions of the tracer that call the user's module."""
_WRAPPERS = frozenset({"wrapper", "wrapped", "inner", "wrapped_forward", "new_forward"})
"""Names of the functions that decorators put around a method."""
_MESSAGES = frozenset(
    "print debug info warning warn error critical exception log warning_once info_once warn_once".split()
)
"""Names of functions that only tell people something."""
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


_EXTENDED_ARG, _LOAD_GLOBAL = dis.opmap["EXTENDED_ARG"], dis.opmap["LOAD_GLOBAL"]
_CALL_BIT = int(sys.version_info >= (3, 11))
"""The lowest bit of LOAD_GLOBAL's argument tells since Python 3.11 whether a call follows."""
_DUPLICATE = dis.opmap["COPY"] if "COPY" in dis.opmap else dis.opmap["DUP_TOP"]
_LOAD_ATTR = dis.opmap["LOAD_ATTR"]
_CACHED = type(functools.lru_cache(int))


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


@functools.lru_cache(maxsize=16384)
def is_runtime(file: str) -> bool:
    """Return True for a file of ort_zero or onnxruntime."""
    package = _PACKAGES.search(file)
    return package["name"] in ("onnxruntime", "ort_zero") if package is not None else file.startswith(_OURS)


def is_only_message(frame: FrameType, *, text: bool) -> bool:
    """Return whether the innermost code of the user's in `frame` and around it runs a line that only tells something.

    Such lines print, log or raise. For a text, also all calls whose result is not used, such as
    ``check(condition, f"{n} tokens")``.

    Args:
        frame: a frame of the stack that runs.
        text: whether a text is made.
    """
    found: FrameType | None = frame
    while found is not None and is_foreign(found.f_code.co_filename):
        found = found.f_back
    return found is not None and found.f_lineno in _message_lines(found.f_code.co_filename)[text]


@functools.lru_cache(maxsize=256)
def _message_lines(file: str) -> tuple[frozenset[int], frozenset[int]]:
    """Return the lines of a source file that print, log or raise, and these with all calls whose result is not used."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset(), frozenset()
    told: set[int] = set()
    called: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Expr, ast.Raise)):
            continue
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if call is None and isinstance(node, ast.Expr):
            continue
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        name = getattr(call.func, "attr", getattr(call.func, "id", "")) if call is not None else ""
        (told if call is None or name in _MESSAGES else called).update(lines)
    return frozenset(told), frozenset(told | called)


def calls_cached_function(frame: FrameType) -> bool:
    """Return whether `frame` calls a function that remembers its results, as ``functools.lru_cache`` makes it."""
    place = frame.f_lasti
    line = dis.findlinestarts(frame.f_code)
    start = max((offset for offset, _ in line if offset <= place), default=0)
    before = [i for i in _instructions(frame.f_code) if start <= i.offset <= place]
    if not before or "CALL" not in before[-1].opname:
        return False
    return any(isinstance(_loaded(frame, before[: i + 1]), _CACHED) for i in range(len(before)))


def _loaded(frame: FrameType, before: list[dis.Instruction]) -> Any:
    """Return the value that the last of some instructions has loaded; None for what is not a name or an attribute."""
    if not before:
        return None
    last = before[-1]
    if last.opname in _LOADING_METHOD:
        return getattr(_loaded(frame, before[:-1]), last.argval, None)
    if last.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return frame.f_globals.get(last.argval)
    if last.opname in ("LOAD_FAST", "LOAD_DEREF"):
        return frame.f_locals.get(last.argval)
    return last.argval if last.opname == "LOAD_CONST" else None


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


def attribute_chains(code: CodeType) -> list[tuple[str, tuple[str, ...]]]:
    """Return each global that `code` looks up, with the attributes that it takes one of the other: ``F.relu``."""
    found: list[tuple[str, tuple[str, ...]]] = []
    before = ""
    for instruction in _instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            found.append((instruction.argval, ()))
        elif instruction.opname in _LOADING_METHOD and before in ("LOAD_GLOBAL", *_LOADING_METHOD) and found:
            name, path = found[-1]
            found[-1] = name, (*path, instruction.argval)
        else:
            before = ""
            continue
        before = instruction.opname
    return list(dict.fromkeys(found))


def is_augmented_read(frame: FrameType) -> bool:
    """Return True while `frame` reads an attribute for an augmented assignment to it, such as ``self.calls += 1``."""
    ops, place = frame.f_code.co_code, frame.f_lasti
    if place < 2 or ops[place] != _LOAD_ATTR:
        return False
    place -= 2
    while place > 0 and ops[place] == _EXTENDED_ARG:
        place -= 2
    return ops[place] == _DUPLICATE and (_DUPLICATE == dis.opmap.get("DUP_TOP") or ops[place + 1] == 1)


READ, FILLED, ADDED_TO = "read", "filled", "added to"
_FILLING = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "update", "clear"})
_PUSHING = frozenset({"LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLOSURE"})
_LOADING = frozenset({"LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST"})
_JOINING = frozenset({"BUILD_STRING", "BUILD_TUPLE"})
_LOADING_METHOD = frozenset({"LOAD_METHOD", "LOAD_ATTR"})
_IN_PLACE = frozenset({"INPLACE_ADD", "INPLACE_SUBTRACT"})
_CALLS = {"CALL": 1, "CALL_METHOD": 1, "CALL_FUNCTION": 0}
"""Values that a call takes off the stack besides its arguments, less the one that it puts there."""
_NOTHING = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PRECALL"})


def use_of_read(frame: FrameType) -> str:
    """Return what `frame` does with the attribute that it reads at the moment.

    Returns:
        :data:`FILLED` where a container is given more or other items, and nothing else (``self.losses.append(x)``,
        ``self.seen["x"] = x``); :data:`ADDED_TO` for ``self.calls += 1``; :data:`READ` for all else.
    """
    return _use_after(frame.f_code, frame.f_lasti)


def is_only_filled(code: CodeType, name: str, *, attribute: bool = False) -> bool:
    """Return whether all that `code` does with a variable is to give the container more or other items.

    Args:
        code: of a function.
        name: of the variable.
        attribute: it is the name of an attribute instead, of whatever object.
    """
    loading = _LOADING_METHOD if attribute else _LOADING
    loads = [i.offset for i in _instructions(code) if i.opname in loading and i.argval == name]
    return bool(loads) and all(_use_after(code, offset) == FILLED for offset in loads)


@functools.lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(instruction for instruction in dis.get_instructions(code) if instruction.opname not in _NOTHING)


@functools.lru_cache(maxsize=4096)
def _use_after(code: CodeType, offset: int) -> str:
    """Return what is done with the value that the instruction at `offset` loads; :data:`READ` if that is not clear."""
    above = 0  # values on the stack above it
    for instruction in _instructions(code):
        name = instruction.opname
        if instruction.offset <= offset:
            continue
        if above == 0 and name in _LOADING_METHOD:
            return FILLED if instruction.argval in _FILLING else READ
        if above == 1 and name == "STORE_SUBSCR":
            return FILLED
        if above == 1 and name == "BINARY_SUBSCR":  # the same of the item
            above = 0
            continue
        if above == 1 and (name in _IN_PLACE or (name == "BINARY_OP" and instruction.argrepr in ("+=", "-="))):
            return ADDED_TO
        if name in _PUSHING or (name == "LOAD_GLOBAL" and not (instruction.arg or 0) & _CALL_BIT):
            above += 1
        elif name in _JOINING and above >= (instruction.arg or 0) > 0:
            above -= (instruction.arg or 0) - 1
        elif above >= 2 and (name == "BINARY_SUBSCR" or name == "BINARY_OP" and not instruction.argrepr.endswith("=")):
            above -= 1
        elif name in ("LOAD_METHOD", "LOAD_GLOBAL"):
            above += 1 if name == "LOAD_METHOD" else 2
        elif name in _CALLS and above > (instruction.arg or 0) + _CALLS[name]:
            above -= (instruction.arg or 0) + _CALLS[name]
        elif not (name == "LOAD_ATTR" or (name == "FORMAT_VALUE" and not (instruction.arg or 0) & 4)):
            return READ
    return READ


def user_line() -> str:
    """Return ``FILE:LINE in FUNCTION`` of the model's code that runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "unknown line"
