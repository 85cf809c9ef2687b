"""Unpickle with Python's unpickler so that a name stays a name, and a call becomes a record of the call.

:func:`check_opcodes` first bounds the memory and the time that the unpickler can take: it compares lengths, memo
numbers and the sizes of keys, and refuses opcodes that Python 3 does not write. Every opcode makes at most one object.
"""

from __future__ import annotations

import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from ort_zero.checkpoint.restricted_pickle.values import (
    AttributeReference,
    ClassReference,
    HostilePickleError,
    MalformedPickleError,
    OpaqueObject,
)

_MAX_INTEGER_BYTES = 1024
"""Maximum size of an integer in bytes: Python refuses to print integers of more than 4300 digits."""
_MAX_KEY_VALUES = 1000
"""Maximum number of values in a key or an item of a set. Python hashes a tuple with all tuples in it: a few
bytes can nest a tuple so that its hash never ends, or overflows the stack of C."""
_MAX_NAMES = 10_000
"""Maximum number of classes and functions that a pickle names; a few bytes of a name become a class of 1 KiB."""
_MAX_ATTRIBUTE = 1000
"""Maximum number of characters of the full name of an attribute; a few bytes repeat a long text many times."""


class PersistentId(OpaqueObject):
    """A reference from the pickle to data beside it in the file; for torch, to a storage."""

    __slots__ = ()
    class_name = "a persistent id"


def unpickled(data: bytes) -> Any:
    """Return the value that a pickle of protocol 2 to 5 describes, without importing or calling what it names."""
    try:
        check_opcodes(data)
        return _Unpickler(data).load()
    except (HostilePickleError, MalformedPickleError):
        raise
    except Exception as error:  # the documentation of pickle lists some exceptions and allows any other
        raise MalformedPickleError(f"it is damaged ({type(error).__name__}: {error})") from None


_ENUMERATIONS = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": {
        "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3,
    },
}  # fmt: skip
"""Values of the members of enumerations by name; Python 3.11.0 to 3.11.3 write members by name, others by value."""


class _Getattr:
    """The ``getattr`` of a pickle: ``getattr(NAME, TEXT)`` names a class within a class, or a member of an enumeration.

    Other calls become records.
    """

    __slots__ = ("_unpickler",)

    def __init__(self, unpickler: _Unpickler):
        self._unpickler = unpickler

    def __call__(self, *args: Any) -> Any:
        if len(args) == 2 and type(args[0]) is ClassReference and type(args[1]) is str:
            members = _ENUMERATIONS.get(args[0].class_name, {})
            if args[1] in members:
                return args[0](members[args[1]])
            if len(args[0].class_name) + len(args[1]) < _MAX_ATTRIBUTE:
                return self._unpickler.reference(f"{args[0].class_name}.{args[1]}", AttributeReference)
        return self._unpickler.reference("builtins.getattr")(*args)

    def __setstate__(self, state: Any) -> None:
        raise MalformedPickleError("it sets attributes of a function")


class _Unpickler(pickle.Unpickler):
    """Python's unpickler without its two ways out of the pickle: names and persistent ids."""

    def __init__(self, data: bytes):
        super().__init__(io.BufferedReader(io.BytesIO(data)))  # a stream without a buffer is read opcode by opcode
        self._references: dict[tuple[str, type[ClassReference]], ClassReference] = {}
        self._getattr = _Getattr(self)

    def find_class(self, module: str, name: str) -> Any:
        """Return an inert class for a name, with Python 3's name of the module; the same class for the same name."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return self._getattr if (module, name) == ("builtins", "getattr") else self.reference(f"{module}.{name}")

    def reference(self, class_name: str, kind: type[ClassReference] = ClassReference) -> ClassReference:
        key = (class_name, kind)
        if key not in self._references:
            if len(self._references) == _MAX_NAMES:
                raise MalformedPickleError(f"it names more than {_MAX_NAMES} classes and functions")
            self._references[key] = kind("OpaqueObject", (OpaqueObject,), {"class_name": class_name, "__slots__": ()})
        return self._references[key]

    def persistent_load(self, pid: Any) -> OpaqueObject:
        return PersistentId(pid)


# ---- the check before unpickling ------------------------------------------------------------------------------------


def _codes(names: dict[int, str]) -> dict[int, int]:
    """Return the number of each opcode by its code; `names` has the names in the module pickle, by the number."""
    return {getattr(pickle, name)[0]: number for number, line in names.items() for name in line.split()}


_VALUES = _codes(
    {0: "NONE NEWTRUE NEWFALSE EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET", 1: "BININT1", 2: "BININT2", 4: "BININT"}
    | {8: "BINFLOAT"}
)
"""Bytes of the argument of opcodes that only put a value on the stack."""
_LENGTHS = _codes(
    {1: "LONG1 SHORT_BINUNICODE SHORT_BINBYTES", 4: "LONG4 BINUNICODE BINBYTES", 8: "BINUNICODE8 BINBYTES8 BYTEARRAY8"}
)
"""Bytes of the length before the argument, for opcodes that put it on the stack."""
_OTHERS = _codes({0: "MARK GLOBAL MEMOIZE", 1: "PROTO BINPUT BINGET", 4: "LONG_BINPUT LONG_BINGET", 8: "FRAME"})
"""Bytes of the argument."""
_TAKERS = _codes(
    {1: "STOP POP BINPERSID TUPLE1", 2: "STACK_GLOBAL REDUCE NEWOBJ BUILD APPEND TUPLE2", 3: "NEWOBJ_EX SETITEM TUPLE3"}
)
"""Number of values taken from the stack."""
_MARK_TAKERS = _codes({0: "POP_MARK TUPLE FROZENSET", 1: "APPENDS SETITEMS ADDITEMS"})
"""Number of values taken from below the last mark, for opcodes that take all above it as well."""
_STOP, _MARK, _PROTO, _FRAME, _GLOBAL, _MEMOIZE = b".(\x80\x95c\x94"
_PUTS, _GETS, _INTEGERS, _TUPLES, _WITHOUT_RESULT = b"qr", b"hj", b"\x8a\x8b", b"t\x85\x86\x87\x91", b".01"
_KEYS = {ord("s"): (1, 2), ord("u"): (1, 2), 0x90: (1, 1), 0x91: (0, 1)}
"""The keys that an opcode hashes: place of the first among the values that are taken, and distance to the next."""


def check_opcodes(data: bytes) -> None:
    """Refuse a pickle that Python's unpickler would need much memory or time for.

    The check runs the opcodes over sizes of values: a tuple or frozen set has the sum of its items' sizes, and one
    more. Every other value has size 1, since its hash does not depend on its contents.

    Raises:
        MalformedPickleError: a length, a memo number, an integer or a key is too large; an opcode lacks its values, or
            no pickler of Python 3 writes it.
        IndexError, KeyError, ValueError: the pickle ends early, or a memo number has no value.
    """
    sizes: list[int] = []  # of the values on the stack
    marks: list[int] = []  # lengths of the stack at each mark
    memo: dict[int, int] = {}
    code, position = 0, 0
    while code != _STOP:
        start, code = position, data[position]
        position += 1
        if code in _VALUES:
            sizes.append(1)
            position += _VALUES[code]
        elif code in _TAKERS or code in _MARK_TAKERS:
            begin = len(sizes) - _TAKERS[code] if code in _TAKERS else marks.pop() - _MARK_TAKERS[code]
            if begin < (marks[-1] if marks else 0):
                raise MalformedPickleError(f"too few values at byte {start}")
            first, step = _KEYS.get(code, (0, 0))
            if step and max(sizes[begin + first :: step], default=0) > _MAX_KEY_VALUES:
                raise MalformedPickleError(f"a key at byte {start} is nested too deeply or has too many values")
            size = 1 + sum(sizes[begin:]) if code in _TUPLES else 1
            sizes[begin:] = () if code in _WITHOUT_RESULT else (size,)
        elif code in _LENGTHS or code in _OTHERS:
            width = _LENGTHS[code] if code in _LENGTHS else _OTHERS[code]
            number = int.from_bytes(data[position : position + width], "little") if code != _MEMOIZE else len(memo)
            position += width
            if code in _INTEGERS and number > _MAX_INTEGER_BYTES:
                raise MalformedPickleError(f"an integer at byte {start} is too long: {number} bytes")
            if position + (number if code in _LENGTHS or code == _FRAME else 0) > len(data):
                raise MalformedPickleError(f"{number} bytes are announced at byte {start}, fewer are left")
            if code in _PUTS or code == _MEMOIZE:
                if number > len(memo) + 1:
                    raise MalformedPickleError(f"memo number {number} at byte {start} does not follow the others")
                memo[number] = sizes[-1]
            elif code in _GETS:
                sizes.append(memo[number])
            elif code == _MARK:
                marks.append(len(sizes))
            elif code == _GLOBAL:
                sizes.append(1)
                position = data.index(b"\n", data.index(b"\n", position) + 1) + 1
            elif code in _LENGTHS:
                sizes.append(1)
                position += number
            elif code == _PROTO and not 2 <= number <= pickle.HIGHEST_PROTOCOL:
                raise MalformedPickleError(f"its protocol is {number}, not 2 to {pickle.HIGHEST_PROTOCOL}")
        else:
            raise MalformedPickleError(f"opcode {code:#04x} at byte {start} is not known")
