"""Follows numbers that are tensors for the duration of a trace: finds where PyTorch takes one for a Python number.

An attribute whose number is an input of the graph is a tensor without axes while the module is traced. Arithmetic takes
it as it is. Other functions take the number out of it (``F.dropout(x, p)``), and the trace then holds a constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ort_zero.ortmodule.compat.frames import user_line

_C: Any = torch._C
_METADATA = frozenset(
    "dim ndimension size numel nelement stride storage_offset element_size data_ptr is_floating_point is_complex "
    "is_signed is_contiguous get_device __get__ __len__ __hash__ is_tensor is_storage type_as "
    "is_same_size __dir__ requires_grad_ retain_grad".split()
)
"""Names of functions that look at what kind of tensor they are given, and not at its value."""
_READS = frozenset("item tolist numpy __int__ __float__ __index__ __complex__ __array__ __format__ __repr__".split())

OUT_OF_PLACE = {f"{plain}_": plain for plain in "add sub mul div floor_divide remainder pow".split()} | {
    f"__i{plain}__": f"__{plain}__" for plain in "add sub mul truediv floordiv mod pow".split()
}
"""Names of operators that change their first argument, and of those that only compute: numbers do not change."""


class NumberReadError(BaseException):
    """Python or PyTorch takes the number out of a tensor that stands for an attribute.

    Not an Exception: no ``except`` of a model may take it for one of its own.
    """

    def __init__(self, origins: frozenset[int], what: str):
        super().__init__(f"{what} ({user_line()})")
        self.origins = origins
        """Indices of the numbers that it depends on."""


class TracedNumbers:
    """The tensors that stand for numbers in one trace, and all that is computed from these alone.

    Args:
        tensors: tensors without axes.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        # the tensors are held, or others could get their ids
        self._known = {id(tensor): (tensor, frozenset([i])) for i, tensor in enumerate(tensors)}

    def among(self, args: tuple, kwargs: Mapping[str, Any]) -> frozenset[int]:
        """Return the indices of the numbers among the arguments of a function."""
        found: frozenset[int] = frozenset()
        if self._known:
            for tensor in _tensors_in((args, kwargs)):
                found |= self._known.get(id(tensor), (None, frozenset()))[1]
        return found

    def is_number(self, tensor: Any) -> bool:
        """Return whether a tensor was computed from numbers alone."""
        return id(tensor) in self._known

    def refuse_read(self, func: Any, args: tuple, origins: frozenset[int]) -> None:
        """Raise if `func` makes a Python value of its first argument, a number."""
        name = getattr(func, "__name__", "")
        if name in _READS and args and self.is_number(args[0]):
            raise NumberReadError(origins, f"takes it for a Python value ({name.strip('_')})")

    def out_of_place(self, func: Any, args: tuple) -> Any:
        """Return the function that does for numbers what `func` does for tensors."""
        plain = OUT_OF_PLACE.get(getattr(func, "__name__", ""))
        return getattr(torch.Tensor, plain) if plain is not None and args and self.is_number(args[0]) else func

    def follow(self, func: Any, args: tuple, kwargs: Mapping[str, Any], result: Any, origins: frozenset[int]) -> None:
        """Check that the trace of a call depends on the numbers it was given; remember a result that is a number too.

        Raises:
            NumberReadError: it does not: the function has taken a number out of its tensor.
        """
        name = getattr(func, "__name__", "")
        results = list(_tensors_in(result))
        if not results and (name in _METADATA or name == "__bool__" or result is NotImplemented):
            return
        given = list(_tensors_in((args, kwargs)))
        if result is None:  # x[index] = number
            results = given[:1]
        wanted = {_value(tensor).unique() for tensor in given if self.is_number(tensor)}
        others = {_value(tensor).unique() for tensor in given} - wanted if result is not None else set()
        wanted -= {_value(tensor).unique() for tensor in results}
        if wanted and not (results and _depends([_value(tensor) for tensor in results], wanted, others)):
            raise NumberReadError(origins, f"gives it to {name or func}, which wants a Python number")
        if all(self.is_number(tensor) for tensor in given):
            for tensor in results:
                if tensor.dim() == 0:
                    self._known.setdefault(id(tensor), (tensor, origins))


def _value(tensor: torch.Tensor) -> Any:
    return _C._get_value_trace(tensor)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, slice):
        yield from _tensors_in((value.start, value.stop, value.step))


def _depends(values: list[Any], wanted: set[int], others: set[int]) -> bool:
    """Return whether traced values depend on all of the values `wanted`, as far as they do not depend on `others`."""
    stack, seen = list(values), {value.unique() for value in values}
    missing = set(wanted)
    while stack and missing:
        node = stack.pop().node()
        if node.kind() == "prim::Param":
            continue
        for given in node.inputs():
            number = given.unique()
            missing.discard(number)
            if number not in seen and number not in others and number not in wanted:
                seen.add(number)
                stack.append(given)
    return not missing
