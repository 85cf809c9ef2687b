"""Operators of torch that stand for one call of Python code in a trace: they have tensors and the call's number.

A trace holds tensors and plain numbers only. So everything else about a call stays in an object, which the operator
finds by its number for as long as somebody, as a rule the graph, holds it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

_library = torch.library.Library("ort_zero", "FRAGMENT")


class Call(Protocol):
    """A call of Python code from a graph."""

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the code on the tensors of the call; return the tensors of its result."""


CallT = TypeVar("CallT", bound=Call)


class NumberedCalls(Generic[CallT]):
    """The calls that one operator stands for.

    Args:
        name: name of the operator, without its namespace.
    """

    def __init__(self, name: str):
        self._numbers = itertools.count()
        self._calls: weakref.WeakValueDictionary[int, CallT] = weakref.WeakValueDictionary()
        # conservative: what it makes of constants is no constant, and two equal calls may draw different random numbers
        _library.define(f"{name}(Tensor[] inputs, int call) -> Tensor[]", "CONSERVATIVE")
        _library.impl(name, self._run, "CompositeImplicitAutograd")

    def add(self, call: CallT) -> int:
        """Return the number by which the operator finds `call` from now on."""
        number = next(self._numbers)
        self._calls[number] = call
        return number

    def numbered(self, number: int) -> CallT:
        """Return the call that the operator's ``call`` argument stands for."""
        return self._calls[number]

    def _run(self, inputs: list[torch.Tensor], call: int) -> list[torch.Tensor]:
        return self._calls[call].run(inputs)
