"""Lets sizes, which are tensors while a module is traced, behave as the Python numbers that they are outside of it.

``x.shape[1]`` and what arithmetic makes of it are keys of dicts and sets, have texts, types and methods of numbers, and
do not change in place. Where Python code takes the number, the read is recorded by :mod:`.trace_sizes`.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import calls_cached_function, is_foreign, is_only_message, is_runtime
from ort_zero.ortmodule.compat.traced_numbers import OUT_OF_PLACE

_C: Any = torch._C
_SIZES = frozenset({torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.numel})
_OF_INSTANCES = frozenset(
    getattr(torch.Tensor, name)
    for name in dir(torch.Tensor)
    if callable(vars(torch.Tensor).get(name, getattr(torch._C.TensorBase, name, None))) and name != "__class__"
)
"""Methods of tensors: of sizes, all that the operators of Python's numbers call."""
_METHODS = ("__round__", "__divmod__", "__rdivmod__", "__trunc__", "__floor__", "__ceil__", "bit_length", "bit_count",
            "is_integer", "as_integer_ratio", "to_bytes")  # fmt: skip
"""Methods that numbers have and tensors lack."""
REPLACED_BUILTINS = ("isinstance", "type")
"""Names of the builtin functions that tell code another type of a size than it has in a trace."""
_KINDS: dict[torch.dtype, type] = {torch.bool: bool, torch.int64: int}


class SizeNumbers:
    """Knows which tensors of one trace are Python numbers outside of it: sizes, and numbers among the inputs.

    Args:
        take: called with each such tensor whose number Python code takes.
        value_of: returns the number that such a tensor stands for, in Python's precision.
        inputs: the numbers that are inputs.
    """

    def __init__(
        self,
        take: Callable[[torch.Tensor], None],
        value_of: Callable[[torch.Tensor], Any],
        inputs: Sequence[torch.Tensor] = (),
    ):
        self._take = take
        self._value_of = value_of
        self._known = {id(number): number for number in inputs}
        """By ``id()``; the tensors are held, or others could get their ids."""
        self.traced: set[int] = set()
        """Numbers of the values of the trace that are such tensors."""
        self._entered: list[dict[str, Any]] = []
        self._builtins = dict(zip(REPLACED_BUILTINS, (self._isinstance, _typing(self)), strict=True))

    # -- which they are --------------------------------------------------------------------------------------------

    def includes(self, value: Any) -> bool:
        """Return whether a value is a tensor that stands for a number."""
        return id(value) in self._known

    def out_of_place(self, func: Any, args: tuple) -> Any:
        """Return the function that does for numbers what `func` does for tensors."""
        plain = OUT_OF_PLACE.get(getattr(func, "__name__", ""))
        return getattr(torch.Tensor, plain) if plain is not None and args and self.includes(args[0]) else func

    def follow(self, func: Any, args: tuple, result: Any) -> None:
        """Note which tensors among the results of a function are numbers of sizes."""
        if func in _SIZES or getattr(getattr(func, "__self__", None), "__name__", "") == "shape":
            found = result if isinstance(result, tuple) else (result,)
        elif isinstance(result, torch.Tensor) and func in _OF_INSTANCES and args and self._are_numbers(args):
            found = (result,)
        else:
            return
        for number in found:
            if isinstance(number, torch.Tensor):
                self._known[id(number)] = number
                self.traced.add(_C._get_value_trace(number).unique())

    def _are_numbers(self, args: tuple) -> bool:
        tensors = [given for given in args if isinstance(given, torch.Tensor)]
        return bool(tensors) and all(map(self.includes, tensors))

    def number_in(self, tensor: torch.Tensor) -> Any:
        """Return the Python number that a tensor stands for."""
        return self._value_of(tensor)

    def plain(self, key: Any) -> Any:
        """Return a key of a dict with Python numbers in the place of sizes."""
        if isinstance(key, tuple):
            parts = [self.plain(part) for part in key]
            same = all(part is before for part, before in zip(parts, key, strict=True))
            return key if same else key._make(parts) if hasattr(key, "_make") else type(key)(parts)
        return self.number_in(key) if self.includes(key) else key

    def _plain_switch(self, value: Any) -> Any:
        """Return a bool for what a size was compared to; a function that takes nothing but a bool is given it."""
        if isinstance(value, torch.Tensor) and value.dtype == torch.bool and self.includes(value):
            self._take(value)
            return self.number_in(value)
        return value

    # -- how they behave -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def behaving(self) -> Iterator[None]:
        """Let the tensors behave as numbers in the block."""
        methods: dict[str, Any] = {name: self._of_number(name) for name in _METHODS}
        methods["__hash__"] = self._hash(torch.Tensor.__hash__)
        methods["__repr__"] = self._repr(torch.Tensor.__repr__)
        own = {name: vars(torch.Tensor).get(name) for name in methods}
        for name, method in methods.items():
            setattr(torch.Tensor, name, method)
        is_tensor: Any = torch.is_tensor
        torch.is_tensor = self._is_tensor  # type: ignore[assignment]
        attention = torch.nn.functional.scaled_dot_product_attention

        @functools.wraps(attention)
        def with_plain_switches(*args: Any, **kwargs: Any) -> Any:
            plain = {name: self._plain_switch(value) for name, value in kwargs.items()}
            return attention(*map(self._plain_switch, args), **plain)

        torch.nn.functional.scaled_dot_product_attention = with_plain_switches
        try:
            yield
        finally:
            torch.is_tensor = is_tensor
            torch.nn.functional.scaled_dot_product_attention = attention
            for name, method in own.items():
                if method is None:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, method)
            for names in self._entered:
                for name, function in self._builtins.items():
                    if names.get(name) is function:
                        del names[name]

    def enter(self, names: dict[str, Any]) -> None:
        """Let ``isinstance`` and ``type`` tell code that such a tensor is a number.

        Args:
            names: globals of the code.
        """
        for name, function in self._builtins.items():
            if name not in names:
                names[name] = function
                self._entered.append(names)

    def kind_of(self, tensor: torch.Tensor) -> type:
        """Return the type of the number that a tensor stands for."""
        return _KINDS.get(tensor.dtype, float)

    def _isinstance(self, obj: Any, kinds: Any) -> bool:
        if self.includes(obj) and _C._is_tracing():
            return builtins.isinstance(self.number_in(obj), kinds)
        return builtins.isinstance(obj, kinds)

    def _is_tensor(self, obj: Any) -> bool:
        users = not is_foreign(sys._getframe(1).f_code.co_filename)
        return isinstance(obj, torch.Tensor) and not (users and self.includes(obj) and _C._is_tracing())

    def _hash(self, original: Any) -> Any:
        def hash_(tensor: torch.Tensor) -> int:
            if not _C._is_tracing() or not self.includes(tensor):
                return original(tensor)
            frame = sys._getframe(1)
            if not is_runtime(frame.f_code.co_filename):
                if calls_cached_function(frame):
                    return original(tensor)  # the function runs, and the trace holds what it computes
                self._take(tensor)
            return hash(self.number_in(tensor))

        hash_.unobserved = original  # type: ignore[attr-defined]
        return hash_

    def _repr(self, original: Any) -> Any:
        """Return a text of a size as it is outside of a trace: that of a number."""

        def repr_(tensor: torch.Tensor, **options: Any) -> str:
            frame = sys._getframe(1)
            if not _C._is_tracing() or is_foreign(frame.f_code.co_filename) or not self.includes(tensor):
                return original(tensor, **options)
            if not is_only_message(frame, text=True):
                self._take(tensor)
            return repr(self.number_in(tensor))

        repr_.unobserved = original  # type: ignore[attr-defined]
        return repr_

    def _of_number(self, name: str) -> Any:
        """Return a method that numbers have and tensors lack."""

        def method(tensor: torch.Tensor, *args: Any) -> Any:
            if not _C._is_tracing() or not self.includes(tensor):
                raise TypeError(f"type Tensor doesn't define {name} method")
            for number in (tensor, *(given for given in args if isinstance(given, torch.Tensor))):
                self._take(number)
            given = [self.number_in(value) if isinstance(value, torch.Tensor) else value for value in args]
            return getattr(self.number_in(tensor), name)(*given)

        return functools.wraps(getattr(float, name, None) or getattr(int, name))(method)


def _typing(numbers: SizeNumbers) -> type:
    """Return what takes the place of ``type``: a class, since code may look for its instances too."""

    class OfType(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            if len(args) == 1 and not options and numbers.includes(args[0]) and _C._is_tracing():
                return numbers.kind_of(args[0])
            return builtins.type(*args, **options)

        def __instancecheck__(cls, instance: Any) -> bool:
            return builtins.isinstance(instance, builtins.type)

        def __subclasscheck__(cls, subclass: Any) -> bool:
            return issubclass(subclass, builtins.type)

    return OfType("type", (builtins.type,), {})


def with_plain_keys(items: Mapping[Any, Any], plain: Callable[[Any], Any]) -> dict[Any, Any] | None:
    """Return the items of a dict under keys without sizes; None if there are no sizes among its keys."""
    keys = {key: plain(key) for key in items}
    if all(key is before for before, key in keys.items()):
        return None
    return {keys[key]: value for key, value in items.items()}
