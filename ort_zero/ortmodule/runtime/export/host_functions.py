"""Lets functions that draw random numbers from Python or NumPy run as operators of the graph, at each run of it.

Speech models mask spans of their input with such a function (SpecAugment): it takes sizes, and returns an array that
becomes a tensor by ``torch.tensor``. What it drew while it was traced would be a constant. So the function becomes one
operator that PyTorch runs, and the module that calls it stays in the graph. :mod:`.random_draws` finds the function,
the forward call adds it here, the graph builder exports inside of :meth:`HostFunctions.as_operators`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat import tracing
from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.runtime.export.pytorch_calls import FunctionCall


class HostCall(FunctionCall):
    """One call of a function that draws random numbers.

    Args:
        function: the function, which returns tensors or arrays.
        reason: why it runs in PyTorch.
        arguments: structure of its arguments.
        numbers: indices of the tensors among them that are Python numbers outside of the trace.
    """

    def __init__(self, function: FunctionType, reason: str, arguments: tuple, numbers: frozenset[int]):
        super().__init__(f"{function.__module__}.{function.__qualname__}()", reason, function, arguments)
        self._numbers = numbers
        self._read = tracing.read_here(f"calls {self.name}, which draws random numbers and returns no arrays of a kind")
        self._dtypes: list[torch.dtype] = []

    def _value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the function returns, with tensors in place of arrays.

        Raises:
            TypeError: the tensors have no data, as when shapes are tried.
            ValueReadError: the function changes a tensor in place, or returns something else than in the trace.
        """
        if any(tensor.is_meta for tensor in tensors):
            raise TypeError(f"{self.name} is not tried on tensors without data")
        versions = [version_of(tensor) for tensor in tensors]
        values: Any = [int(t) if i in self._numbers else t for i, t in enumerate(tensors)]
        result = super()._value(values)
        if versions != [version_of(tensor) for tensor in tensors]:
            raise self._read
        found: list[torch.Tensor] = []
        result = self._as_tensors(result, {id(tensor) for tensor in tensors}, found)
        dtypes = [tensor.dtype for tensor in found]
        self._dtypes = self._dtypes or dtypes
        if dtypes != self._dtypes:
            raise self._read
        return result

    def _as_tensors(self, value: Any, given: set[int], found: list[torch.Tensor]) -> Any:
        if type(value) is tuple:
            return tuple(self._as_tensors(part, given, found) for part in value)
        if isinstance(value, np.ndarray):
            try:
                value = torch.from_numpy(np.ascontiguousarray(value))
            except TypeError:
                raise self._read from None  # such as an array of text
        if not isinstance(value, torch.Tensor):
            raise self._read
        found.append(value.clone() if id(value) in given else value)
        return found[-1]


class HostFunctions:
    """The functions of one model that run as operators because they draw random numbers."""

    def __init__(self) -> None:
        self._reasons: dict[FunctionType, str] = {}
        self._calls: list[HostCall] = []

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def __str__(self) -> str:
        return ", ".join(f"{function.__qualname__}()" for function in self._reasons)

    def add(self, function: FunctionType, reason: str) -> bool:
        """Let a function run as an operator; return False if it does so already, which was no help then."""
        if function in self._reasons:
            return False
        self._reasons[function] = reason
        get_logger().info("%s() runs in PyTorch at each step: it %s", function.__qualname__, reason)
        return True

    @contextlib.contextmanager
    def as_operators(self) -> Iterator[None]:
        """Let the tracer see one operator in place of each call of the functions, under whatever name."""
        if not self:
            yield
            return
        operators: dict[int, Callable] = {id(function): self._operator(function) for function in self._reasons}
        operators[id(torch.from_numpy)] = _from_numpy(torch.from_numpy)
        changed = [
            (namespace, name, value)
            for namespace in [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
            for name, value in list(namespace.items())
            if id(value) in operators
        ]
        for namespace, name, value in changed:
            namespace[name] = operators[id(value)]
        try:
            yield
        finally:
            for namespace, name, value in changed:
                namespace[name] = value

    def _operator(self, function: FunctionType) -> Callable:
        """Return what calls `function`, while it is traced as one operator."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.jit.is_tracing():
                return function(*args, **kwargs)
            if any(isinstance(value, torch.nn.Module) for value in (*args, *kwargs.values())):
                raise tracing.read_here(f"calls {function.__qualname__}(), which draws random numbers, with a module")
            given = pytree.flatten_call(args, kwargs, [])
            numbers = frozenset(i for i, t in enumerate(given.tensors) if tracing.is_number_of_sizes(t))
            call = HostCall(function, self._reasons[function], given.structure, numbers)
            self._calls.append(call)
            with tracing.drawing_at_each_run():
                # a node without inputs is no node
                found = torch.ops.ort_zero.submodule(list(given.tensors) or [torch.zeros(())], call.number)
            return pytree.unflatten(found, call.results, given.objects)

        return call


def _from_numpy(function: Callable) -> Callable:
    """Return ``torch.from_numpy`` that also takes what is a tensor in the trace only."""

    def from_numpy(array: Any) -> torch.Tensor:
        return array if isinstance(array, torch.Tensor) else function(array)

    return from_numpy
