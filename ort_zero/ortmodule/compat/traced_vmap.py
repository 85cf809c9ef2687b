"""Lets a trace hold what ``torch.vmap`` computes of single numbers: by broadcasting, as the tracer cannot follow vmap.

transformers 4.53 to 4.57 makes attention masks so: a function of one batch index, head, query and key is mapped over
all of them. Where each mapped argument is a vector and the function does nothing but arithmetic, comparisons and
look-ups, the same numbers come from one call with vectors that lie along an axis each. Everything else is left to
``torch.vmap``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import apis
from torch.overrides import TorchFunctionMode

from ort_zero.ortmodule.compat.replaced_methods import called_method
from ort_zero.ortmodule.compat.torch_transforms import in_transform

_OPERATORS = "add sub mul truediv floordiv mod and or xor lt le gt ge eq ne".split()
_POINTWISE = frozenset(
    [f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")]
    + "__invert__ __neg__ __abs__ __div__ __rdiv__".split()
    + "add sub mul div true_divide floor_divide remainder fmod neg abs sign where minimum maximum clamp square".split()
    + "lt le gt ge eq ne less less_equal greater greater_equal not_equal".split()
    + "logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not".split()
    + "exp log sqrt sin cos tanh sigmoid floor ceil round rsub".split()
    + "to type bool int long float double half bfloat16 clone detach zeros_like ones_like full_like".split()
)
"""Names of functions of numbers whose result for a tensor is that for each of its elements."""
_CHANGES = frozenset({"__setitem__", "__ipow__", *(f"__i{name}__" for name in _OPERATORS)})
_CONSTANTS = frozenset({"new_ones", "new_zeros", "new_full"})
_PROPERTIES = frozenset({"device", "dtype", "is_cuda", "layout"})
"""Properties that are those of each element."""
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


class _NotScalar(BaseException):
    """The mapped function does something else; not for ``except Exception`` in the model's code."""


class _Threads(threading.local):
    running: _Broadcast | None = None


_threads = _Threads()


@contextlib.contextmanager
def vmap_by_broadcasting() -> Iterator[None]:
    """Compute in the block, while a trace is made, by broadcasting what ``torch.vmap`` computes of single numbers."""
    torch_apis: Any = apis
    original = torch_apis.vmap_impl

    def vmap_impl(function: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kw: Any):
        call = (function, in_dims, out_dims, randomness, chunk_size)
        outer = _threads.running
        if outer is not None:
            return outer.mapped(*call, args, kw)
        if not torch._C._is_tracing() or in_transform():
            return original(*call, *args, **kw)
        try:
            with _Broadcast() as whole:
                return whole.result(whole.mapped(*call, args, kw))
        except _NotScalar:
            return original(*call, *args, **kw)

    torch_apis.vmap_impl = vmap_impl
    try:
        yield
    finally:
        torch_apis.vmap_impl = original


class _Broadcast(TorchFunctionMode):
    """Runs a mapped function once, for all elements; vectors of the innermost map lie along the first axis.

    Each tensor that stands for single numbers has one axis for each map around it, the outermost last, of one element
    where it is the same for all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._numbers: dict[int, torch.Tensor] = {}
        """The tensors that stand for one number in the mapped function, by ``id()``."""
        self._results: dict[int, tuple[torch.Tensor, list[Any]]] = {}
        """Results of maps by ``id()``, with the size of each map that they come from, the outermost first."""

    def __enter__(self) -> _Broadcast:
        _threads.running = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _threads.running = None

    def mapped(
        self,
        function: Callable[..., Any],
        in_dims: Any,
        out_dims: Any,
        randomness: str,
        chunk_size: int | None,
        args: tuple,
        kwargs: dict,
    ) -> torch.Tensor:
        """Return what ``torch.vmap`` would, with the axes in another order."""
        axes = (in_dims,) * len(args) if isinstance(in_dims, int) else in_dims
        if (out_dims, randomness, chunk_size, kwargs) != (0, "error", None, {}) or not isinstance(axes, tuple):
            raise _NotScalar
        self._depth += 1
        size, given = None, []
        for argument, axis in zip(args, axes, strict=True):
            if axis is not None:
                size, argument = self._vector(argument, axis, size)
            given.append(argument)
        if size is None:
            raise _NotScalar
        result = function(*given)
        self._depth -= 1
        inner = self._results.get(id(result), (result, []))[1]
        if not inner and not self._is_number(result):
            raise _NotScalar
        self._results[id(result)] = result, [size, *inner]
        return result

    def _vector(self, argument: Any, axis: Any, known: Any) -> tuple[Any, torch.Tensor]:
        """Return the size of a mapped argument, and the tensor that stands for one of its elements."""
        if axis != 0 or not isinstance(argument, torch.Tensor) or argument.dim() != 1 or self._is_ours(argument):
            raise _NotScalar
        size: Any = argument.shape[0]
        if known is not None and int(known) != int(size):
            raise _NotScalar
        return size, self._noted(argument.reshape(-1, *(1,) * self._depth))

    def result(self, result: torch.Tensor) -> torch.Tensor:
        """Return the result of all maps with its axes in the order that ``torch.vmap`` gives them."""
        _, sizes = self._results[id(result)]
        self._results.clear()
        self._numbers.clear()
        whole = result.expand(*reversed(sizes), 1)
        return whole.permute(*reversed(range(len(sizes))), len(sizes)).squeeze(-1)

    # -- which functions ---------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func, kwargs = called_method(func), kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            return self._element(func, *args)
        if name in _CHANGES or name.endswith("_") and not name.endswith("__"):
            raise _NotScalar  # a change, which torch.vmap would make again
        given = (*args, *kwargs.values())
        if not any(map(self._is_ours, _tensors(given))):
            return func(*args, **kwargs)
        if name == "__get__" and getattr(func.__self__, "__name__", "") in _PROPERTIES:
            return func(*args, **kwargs)
        if name in _CONSTANTS and self._is_number(args[0]) and tuple(args[1:2]) == ((),):
            return func(*args, **kwargs)
        if name not in _POINTWISE or "out" in kwargs or any(isinstance(item, (list, tuple)) for item in given):
            raise _NotScalar
        numbers = [item for item in given if isinstance(item, torch.Tensor)]
        if not all(map(self._is_number, numbers)) or self._other_types(numbers):
            raise _NotScalar
        return self._noted(func(*args, **kwargs))

    def _element(self, func: Any, tensor: torch.Tensor, index: Any) -> Any:
        """Return the elements of `tensor` at numbers; its axes must all be indexed, or the result is no number."""
        indices = index if isinstance(index, tuple) else (index,)
        if not any(map(self._is_ours, (tensor, *_tensors(indices)))):
            return func(tensor, index)
        if self._is_ours(tensor) or tensor.dim() != len(indices):
            raise _NotScalar
        for item in indices:
            if isinstance(item, torch.Tensor):
                if not self._is_number(item) or item.dtype not in _INTEGERS:
                    raise _NotScalar
            elif not isinstance(item, int) or isinstance(item, bool):
                raise _NotScalar
        # torch's own mode for look-ups in a map, if one is active, lets this form through
        return self._noted(func(tensor, (*indices, ...)))

    def _noted(self, result: Any) -> torch.Tensor:
        if not isinstance(result, torch.Tensor):
            raise _NotScalar
        self._numbers[id(result)] = result
        return result

    def _is_ours(self, tensor: Any) -> bool:
        return id(tensor) in self._numbers or id(tensor) in self._results

    def _is_number(self, value: Any) -> bool:
        """Return whether a value stands for single numbers; a tensor without axes is one for all elements."""
        if id(value) in self._results or not isinstance(value, torch.Tensor):
            return False
        return id(value) in self._numbers or value.dim() == 0

    def _other_types(self, numbers: list[torch.Tensor]) -> bool:
        """Return whether tensors of no axis have other types than ours, which have axes here and none in a map.

        The type of a result depends on that.
        """
        ours = {number.dtype for number in numbers if id(number) in self._numbers}
        return any(number.dtype not in ours for number in numbers)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
