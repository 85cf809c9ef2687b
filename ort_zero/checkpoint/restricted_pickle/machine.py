"""Interpret the opcodes of a pickle as data only: a name stays a name, a call stays a record of the call.

Python's unpickler imports and calls the functions that a pickle names. This interpreter imports and calls nothing. It
compares each length in the pickle with the number of bytes left before it allocates memory. Every opcode makes at most
one object, so the size of the pickle limits the size of its values.
"""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from ort_zero.checkpoint.restricted_pickle.values import ClassReference, OpaqueObject

_MAX_INTEGER_BYTES = 1024
"""Maximum size of an integer in bytes: Python refuses to print integers of more than 4300 digits."""


class MalformedPickleError(ValueError):
    """The error for a pickle that the pickler of Python 3 cannot have written."""


class HostilePickleError(Exception):
    """The error for a pickle that calls a function acting on the machine, or calls the result of another call.

    Attributes:
        name: full name of the function.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class PersistentId:
    """A reference from the pickle to data beside it in the file; for torch, to a storage."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def interpret(data: bytes) -> Any:
    """Return the value that a pickle of protocol 2 to 5 describes, without executing any code of the pickle.

    Args:
        data: the whole pickle.

    Returns:
        Python's plain values and containers; a :class:`~.values.ClassReference` for each name, an
        :class:`~.values.OpaqueObject` for each call or object, a :class:`PersistentId` for each storage. A
        container may contain itself, and may occur in several containers.

    Raises:
        MalformedPickleError: the pickle ends early, or has an unknown or misplaced opcode.
        HostilePickleError: the pickle calls the result of another call.
    """
    machine = _Machine(data)
    try:
        return machine.run()
    except MalformedPickleError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise MalformedPickleError(f"at byte {machine.position}: {type(error).__name__}: {error}") from None


class _Machine:
    """The interpreter of one pickle, with its stack and memo."""

    def __init__(self, data: bytes):
        self._data = data
        self._end = len(data)
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._references: dict[str, ClassReference] = {}
        self._version = 2
        self.position = 0
        """Number of bytes that were read so far."""

    def run(self) -> Any:
        """Run all opcodes up to STOP and return the value on top of the stack."""
        data, memo, handlers = self._data, self._memo, _HANDLERS
        while True:
            code = data[self.position]
            self.position += 1
            # the most frequent opcodes are handled here, which saves a function call for each
            if code == 0x71:  # BINPUT
                memo[data[self.position]] = self._stack[-1]
                self.position += 1
            elif code == 0x68:  # BINGET
                self._stack.append(memo[data[self.position]])
                self.position += 1
            elif code == 0x4B:  # BININT1
                self._stack.append(data[self.position])
                self.position += 1
            elif code == 0x28:  # MARK
                self._outer.append(self._stack)
                self._stack = []
            elif code == 0x2E:  # STOP
                return self._stack.pop()
            else:
                handler = handlers[code]
                if handler is None:
                    raise MalformedPickleError(f"opcode {code:#04x} at byte {self.position - 1} is not known")
                handler(self)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        start = self.position
        if not 0 <= count <= self._end - start:
            raise MalformedPickleError(f"{count} bytes are announced at byte {start}, {self._end - start} are left")
        self.position = start + count
        return self._data[start : start + count]

    def _number(self, format: struct.Struct) -> Any:
        (value,) = format.unpack_from(self._data, self.position)
        self.position += format.size
        return value

    def _line(self) -> str:
        end = self._data.index(b"\n", self.position)
        line = self._data[self.position : end].decode()
        self.position = end + 1
        return line

    def _to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    # ---- names, calls and objects -----------------------------------------------------------------------------------

    def _reference(self, module: str, name: str) -> ClassReference:
        if self._version < 3:  # protocol 2 has Python 2's names of modules
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full_name = f"{module}.{name}"
        return self._references.setdefault(full_name, ClassReference(full_name))

    def _global(self) -> None:
        module = self._line()
        self._stack.append(self._reference(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise MalformedPickleError(f"a name at byte {self.position} is no string")
        self._stack.append(self._reference(module, name))

    def _object(self, callee: Any, args: Any, kwargs: Any, called: bool) -> None:
        if type(callee) is OpaqueObject:
            raise HostilePickleError(_name_of_result(callee))
        if type(callee) is not ClassReference:
            raise MalformedPickleError(f"the call at byte {self.position} is not of a named function or class")
        if type(args) is not tuple or type(kwargs) is not dict:
            raise MalformedPickleError(f"the arguments of {callee.name} are no tuple, or its keyword arguments no dict")
        self._stack.append(OpaqueObject(callee.name, args, kwargs, called=called))

    def _reduce(self) -> None:
        args = self._stack.pop()
        self._object(self._stack.pop(), args, {}, True)

    def _newobj(self) -> None:
        args = self._stack.pop()
        self._object(self._stack.pop(), args, {}, False)

    def _newobj_ex(self) -> None:
        kwargs, args = self._stack.pop(), self._stack.pop()
        self._object(self._stack.pop(), args, kwargs, False)

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is not OpaqueObject:
            raise MalformedPickleError(f"attributes are set at byte {self.position} on a value that has none")
        target.state = state

    def _persistent(self) -> None:
        self._stack.append(PersistentId(self._stack.pop()))

    # ---- containers -------------------------------------------------------------------------------------------------

    def _tuple(self) -> None:
        items = tuple(self._to_mark())
        self._stack.append(items)

    def _tuple_of(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count:
            raise MalformedPickleError(f"too few values at byte {self.position}")
        self._stack[-count:] = [items]

    def _list(self) -> None:
        items = self._to_mark()
        self._stack.append(items)

    def _dict(self) -> None:
        items = self._to_mark()
        self._stack.append(dict(_pairs(items)))

    def _frozenset(self) -> None:
        items = frozenset(self._to_mark())
        self._stack.append(items)

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is OpaqueObject:
            target.items.extend(items)
        else:
            raise MalformedPickleError(f"items are appended at byte {self.position} to a value that is no list")

    def _append_one(self) -> None:
        item = self._stack.pop()
        self._append([item])

    def _set(self, pairs: list[tuple[Any, Any]]) -> None:
        target = self._stack[-1]
        if type(target) is dict:
            target.update(pairs)
        elif type(target) is OpaqueObject:
            target.entries.extend(pairs)
        else:
            raise MalformedPickleError(f"a key is set at byte {self.position} in a value that is no dict")

    def _set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([(key, value)])

    def _add(self) -> None:
        items = self._to_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise MalformedPickleError(f"items are added at byte {self.position} to a value that is no set")
        target.update(items)

    # ---- protocol, frames, memo and stack ---------------------------------------------------------------------------

    def _protocol(self) -> None:
        self._version = self._take(1)[0]
        if not 2 <= self._version <= pickle.HIGHEST_PROTOCOL:
            raise MalformedPickleError(f"its protocol is {self._version}, not 2 to {pickle.HIGHEST_PROTOCOL}")

    def _frame(self) -> None:
        length = self._number(_U64)
        if length > self._end - self.position:
            raise MalformedPickleError(f"a frame of {length} bytes at byte {self.position} ends behind the pickle")

    def _integer(self, length: int) -> None:
        if length > _MAX_INTEGER_BYTES:
            raise MalformedPickleError(f"an integer at byte {self.position} is too long: {length} bytes")
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self) -> None:
        self._memo[self._number(_U32)] = self._stack[-1]

    def _get(self) -> None:
        self._stack.append(self._memo[self._number(_U32)])

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._to_mark()

    def _push(self, value: Any) -> None:
        self._stack.append(value)


def _name_of_result(callee: OpaqueObject) -> str:
    """Return a name for the result of a call; for a call of ``getattr``, the full name of the attribute."""
    if callee.class_name == "builtins.getattr" and len(callee.args) > 1 and type(callee.args[0]) is ClassReference:
        return f"{callee.args[0].name}.{callee.args[1]}"
    return f"the result of {callee.class_name}"


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    if len(items) % 2:
        raise MalformedPickleError("a key has no value")
    return list(zip(items[::2], items[1::2]))


_U16, _I32, _U32, _U64 = (struct.Struct(f"<{code}") for code in "HiIQ")
_F64 = struct.Struct(">d")


def _text(m: _Machine, format: struct.Struct) -> None:
    m._push(m._take(m._number(format)).decode("utf-8", "surrogatepass"))


def _bytes(m: _Machine, format: struct.Struct) -> None:
    m._push(m._take(m._number(format)))


_U8 = struct.Struct("<B")
_BY_OPCODE = {
    pickle.PROTO: _Machine._protocol,
    pickle.FRAME: _Machine._frame,
    pickle.GLOBAL: _Machine._global,
    pickle.STACK_GLOBAL: _Machine._stack_global,
    pickle.REDUCE: _Machine._reduce,
    pickle.NEWOBJ: _Machine._newobj,
    pickle.NEWOBJ_EX: _Machine._newobj_ex,
    pickle.BUILD: _Machine._build,
    pickle.BINPERSID: _Machine._persistent,
    pickle.NONE: lambda m: m._push(None),
    pickle.NEWTRUE: lambda m: m._push(True),
    pickle.NEWFALSE: lambda m: m._push(False),
    pickle.BININT: lambda m: m._push(m._number(_I32)),
    pickle.BININT2: lambda m: m._push(m._number(_U16)),
    pickle.LONG1: lambda m: m._integer(m._number(_U8)),
    pickle.LONG4: lambda m: m._integer(m._number(_U32)),
    pickle.BINFLOAT: lambda m: m._push(m._number(_F64)),
    pickle.SHORT_BINUNICODE: lambda m: _text(m, _U8),
    pickle.BINUNICODE: lambda m: _text(m, _U32),
    pickle.BINUNICODE8: lambda m: _text(m, _U64),
    pickle.SHORT_BINBYTES: lambda m: _bytes(m, _U8),
    pickle.BINBYTES: lambda m: _bytes(m, _U32),
    pickle.BINBYTES8: lambda m: _bytes(m, _U64),
    pickle.BYTEARRAY8: lambda m: m._push(bytearray(m._take(m._number(_U64)))),
    pickle.EMPTY_TUPLE: lambda m: m._push(()),
    pickle.TUPLE: _Machine._tuple,
    pickle.TUPLE1: lambda m: m._tuple_of(1),
    pickle.TUPLE2: lambda m: m._tuple_of(2),
    pickle.TUPLE3: lambda m: m._tuple_of(3),
    pickle.EMPTY_LIST: lambda m: m._push([]),
    pickle.LIST: _Machine._list,
    pickle.APPEND: _Machine._append_one,
    pickle.APPENDS: lambda m: m._append(m._to_mark()),
    pickle.EMPTY_DICT: lambda m: m._push({}),
    pickle.DICT: _Machine._dict,
    pickle.SETITEM: _Machine._set_one,
    pickle.SETITEMS: lambda m: m._set(_pairs(m._to_mark())),
    pickle.EMPTY_SET: lambda m: m._push(set()),
    pickle.ADDITEMS: _Machine._add,
    pickle.FROZENSET: _Machine._frozenset,
    pickle.MEMOIZE: _Machine._memoize,
    pickle.LONG_BINPUT: _Machine._put,
    pickle.LONG_BINGET: _Machine._get,
    pickle.POP: _Machine._pop,
    pickle.POP_MARK: lambda m: m._to_mark(),
    pickle.DUP: lambda m: m._push(m._stack[-1]),
}
_HANDLERS = [_BY_OPCODE.get(bytes([code])) for code in range(256)]
