"""Runs the opcodes of a pickle over data only: a name stays a name, a call stays a record of the call.

Python's own unpickler imports what a pickle names and calls it. This one has neither. Each length in the pickle is
compared with the bytes that are left before anything is allocated, and no value is larger than the pickle allows:
every opcode makes at most one object.
"""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from ort_zero.checkpoint.restricted_pickle.values import ClassReference, OpaqueObject

_MOST_INTEGER_BYTES = 1024
"""Longest integer: Python refuses to print those of more than 4300 digits."""


class MalformedPickleError(ValueError):
    """The pickle is no sequence of opcodes that the pickler of Python 3 writes."""


class HostilePickleError(Exception):
    """The pickle calls a function that acts on the machine of whoever loads it, or one that it makes itself.

    Attributes:
        name: full name of the function.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class PersistentId:
    """The place of something that is stored beside the pickle, for torch a storage."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def interpret(data: bytes) -> Any:
    """Return the value that a pickle of protocol 2 to 5 describes, with nothing of it executed.

    Args:
        data: the whole pickle.

    Returns:
        Python's plain values and containers; a :class:`~.values.ClassReference` for each name, an
        :class:`~.values.OpaqueObject` for each call or object, a :class:`PersistentId` for each storage. Containers may
        hold themselves, and be held several times.

    Raises:
        MalformedPickleError: it ends early, or holds an opcode that is not known or does not fit.
        HostilePickleError: it calls what another call returns.
    """
    machine = _Machine(data)
    try:
        return machine.run()
    except MalformedPickleError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise MalformedPickleError(f"at byte {machine.position}: {type(error).__name__}: {error}") from None


class _Machine:
    """The stack and memo of one pickle."""

    def __init__(self, data: bytes):
        self._data = data
        self._end = len(data)
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._references: dict[str, ClassReference] = {}
        self._version = 2
        self.position = 0
        """Bytes that were read so far."""

    def run(self) -> Any:
        """Run all opcodes up to STOP and return the value on top of the stack."""
        data, memo, handlers = self._data, self._memo, _HANDLERS
        while True:
            code = data[self.position]
            self.position += 1
            # the four most frequent opcodes need no call
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
        if self._version < 3:  # which has the names of Python 2
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        return self._references.setdefault(full, ClassReference(full))

    def _global(self) -> None:
        module = self._line()
        self._stack.append(self._reference(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise MalformedPickleError(f"a name at byte {self.position} is no text")
        self._stack.append(self._reference(module, name))

    def _object(self, callee: Any, args: Any, kwargs: Any, called: bool) -> None:
        if type(callee) is OpaqueObject:
            raise HostilePickleError(_described(callee))
        if type(callee) is not ClassReference:
            raise MalformedPickleError(f"what is called at byte {self.position} has no name")
        if type(args) is not tuple or type(kwargs) is not dict:
            raise MalformedPickleError(f"the arguments of {callee.name} are no arguments")
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
            raise MalformedPickleError(f"a value at byte {self.position} that has no attributes is given some")
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
            raise MalformedPickleError(f"something is appended to no list at byte {self.position}")

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
            raise MalformedPickleError(f"a key is set in no dict at byte {self.position}")

    def _set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([(key, value)])

    def _add(self) -> None:
        items = self._to_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise MalformedPickleError(f"something is added to no set at byte {self.position}")
        target.update(items)

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def _protocol(self) -> None:
        self._version = self._take(1)[0]
        if not 2 <= self._version <= pickle.HIGHEST_PROTOCOL:
            raise MalformedPickleError(f"it has protocol {self._version}, 2 to {pickle.HIGHEST_PROTOCOL} are known")

    def _frame(self) -> None:
        length = self._number(_U64)
        if length > self._end - self.position:
            raise MalformedPickleError(f"a frame of {length} bytes at byte {self.position} leads out of it")

    def _integer(self, length: int) -> None:
        if length > _MOST_INTEGER_BYTES:
            raise MalformedPickleError(f"an integer at byte {self.position} has {length} bytes")
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


def _described(callee: OpaqueObject) -> str:
    """Return a name for what a call returns: of an attribute its own."""
    if callee.class_name == "builtins.getattr" and len(callee.args) > 1 and type(callee.args[0]) is ClassReference:
        return f"{callee.args[0].name}.{callee.args[1]}"
    return f"what {callee.class_name} returns"


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
