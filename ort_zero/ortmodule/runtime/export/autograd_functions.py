"""Makes each call of an autograd Function one operator of the graph, which PyTorch runs.

The node calls the very ``apply`` that the module calls, under autograd: a Function may return None or numbers beside
tensors, take arguments of any type, change them in place, leave gradients out, and look at ``ctx.needs_input_grad``.
The tracer sees nothing of what a Function does inside. The graph builder exports inside of
:meth:`AutogradFunctions.as_operators`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.ortmodule.compat import traced_functions, tracing
from ort_zero.ortmodule.runtime.export.attribute_reads import unrecorded
from ort_zero.ortmodule.runtime.export.function_effects import FunctionEffects
from ort_zero.ortmodule.runtime.export.numbered_calls import NumberedCalls

OPERATOR = "ort_zero::function"

CALLS: NumberedCalls[AutogradFunctionCall] = NumberedCalls("function")
"""The calls that :data:`OPERATOR` stands for."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Stands for the i-th tensor of a call or of a result."""

    index: int


class AutogradFunctionCall:
    """One call of an autograd Function in a trace: everything but the tensors.

    Args:
        function: the autograd Function.
        apply: torch's own ``apply`` of it.
        arguments: args and kwargs, with a :class:`_Leaf` for each tensor.
        numbers: indices of the tensors that are Python numbers outside of the trace.
        buffers: indices of the tensors that are buffers of the model, which are changed where they are.
    """

    def __init__(
        self,
        function: type,
        apply: Callable[..., Any],
        arguments: tuple[tuple, dict],
        numbers: frozenset[int],
        buffers: frozenset[int],
    ):
        self.number = CALLS.add(self)
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.reason = "an autograd Function, whose code is Python"
        self.written: list[int] = []
        """Indices of the tensors that the Function changes in place; known after the trace."""
        self._apply = apply
        self._arguments = arguments
        self._number_arguments = numbers
        self._buffers = buffers
        self._read = tracing.read_here(f"calls the autograd Function {self.name}, which returns another kind of result")
        self._results: Any = None
        self._traced = False

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the Function; return the tensors among its results, and those that it has changed in place.

        Raises:
            TypeError: the tensors have no data, as when shapes are tried: user code runs on real ones only.
            ValueReadError: the results are others than in the trace.
        """
        if any(tensor.is_meta for tensor in tensors):
            raise TypeError(f"{self.name} is not tried on tensors without data")
        given = list(tensors)
        for i in self.written:
            if i not in self._buffers:
                given[i] = given[i].clone()  # it belongs to the graph
        versions = [version_of(tensor) for tensor in given]
        values = [int(t) if i in self._number_arguments else t for i, t in enumerate(given)]
        args, kwargs = _put_together(self._arguments, values)
        found: list[torch.Tensor] = []
        results = _taken_apart(self._apply(*args, **kwargs), found, {})
        if not self._traced:
            self._results, self._traced = results, True
            self.written = [i for i, (t, old) in enumerate(zip(given, versions, strict=True)) if version_of(t) != old]
        elif not _same(results, self._results):
            raise self._read
        return found + [given[i] for i in self.written]

    def results_of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the Function returns, put together of the tensors of :meth:`run`."""
        return _put_together(self._results, tensors)


class AutogradFunctions:
    """The calls of autograd Functions in the graphs of one model.

    Args:
        root: the model.
    """

    def __init__(self, root: torch.nn.Module):
        self._root = root
        self._buffers: set[int] = set()
        self._calls: list[AutogradFunctionCall] = []
        self._effects = FunctionEffects()

    @contextlib.contextmanager
    def as_operators(self) -> Iterator[None]:
        """Let the tracer see one operator in place of each call of an autograd Function."""
        self._buffers = {id(buffer) for buffer in self._root.buffers()}
        self._effects = FunctionEffects()
        try:
            with traced_functions.calls_go_to(self._traced, self._without_effects):
                yield
        finally:
            self._effects.put_back()

    @contextlib.contextmanager
    def _without_effects(self, function: type, args: tuple, is_node: bool) -> Iterator[None]:
        """Let a Function that is called in the block leave nothing outside of the model when the export is over.

        Args:
            function: the autograd Function.
            args: its arguments.
            is_node: whether a node of the graph calls it: then nothing is left as soon as the block ends.
        """
        reached = [*(getattr(function, name) for name in ("forward", "setup_context")), *args]
        self._effects.note(reached)
        if not is_node:
            yield
            return
        effects = FunctionEffects()
        effects.note(reached)
        try:
            with unrecorded():
                yield
        finally:
            effects.put_back()

    def _traced(self, function: type, apply: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call a Function as one operator of the trace.

        Raises:
            ValueReadError: the call cannot be an operator; the submodule that makes it can.
        """
        tensors: list[torch.Tensor] = []
        arguments = _taken_apart((args, kwargs), tensors, {})
        name = f"{function.__module__}.{function.__qualname__}"
        if not tensors:
            raise tracing.read_here(f"calls the autograd Function {name} without a tensor")
        for reason in _obstacles(args, kwargs):
            raise tracing.read_here(f"calls the autograd Function {name} with {reason}")
        if any(tensor.layout != torch.strided for tensor in tensors):
            raise tracing.read_here(f"calls the autograd Function {name} with a tensor that is not dense")
        call = AutogradFunctionCall(
            function,
            apply,
            arguments,
            numbers=frozenset(i for i, tensor in enumerate(tensors) if tracing.is_number_of_sizes(tensor)),
            buffers=frozenset(i for i, tensor in enumerate(tensors) if id(tensor) in self._buffers),
        )
        self._calls.append(call)
        found = torch.ops.ort_zero.function(tensors, call.number)
        if not found:
            raise tracing.read_here(f"calls the autograd Function {name}, which returns no tensor")
        results = call.results_of(found)
        for value in results if isinstance(results, tuple) else (results,):
            if not isinstance(value, (torch.Tensor, tuple, list, dict, *_PLAIN)):
                kind = type(value).__qualname__
                raise tracing.read_here(f"calls the autograd Function {name}, which returns a {kind}")
        return results


def _obstacles(args: tuple, kwargs: dict) -> Iterator[str]:
    """Yield what is among the arguments that an operator would not notice: weights and computed tensors."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (torch.Tensor, tuple, list, dict, *_PLAIN)):
            continue
        if any(any(True for _ in module.parameters()) for module in _modules_in(value)):
            yield "a module that has weights"
        held = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
        if any(isinstance(t, torch.Tensor) and tracing.depends_on_inputs(t) for t in held):
            yield f"a {type(value).__qualname__} that holds a computed tensor"


def _modules_in(value: Any) -> list[torch.nn.Module]:
    """Return the modules that an argument is, or is a method or a closure of."""
    found = [value, getattr(value, "__self__", None)]
    if inspect.isfunction(value) and value.__closure__:
        found += [cell.cell_contents for cell in value.__closure__ if _is_filled(cell)]
    return [part for part in found if isinstance(part, torch.nn.Module)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _taken_apart(value: Any, tensors: list[torch.Tensor], known: dict[int, _Leaf]) -> Any:
    """Return `value` with a :class:`_Leaf` for each tensor in its tuples, lists and dicts; collect the tensors."""
    if isinstance(value, torch.Tensor):
        leaf = known.get(id(value))
        if leaf is None:
            leaf = known[id(value)] = _Leaf(len(tensors))
            tensors.append(value)
        return leaf
    return _mapped(lambda part: _taken_apart(part, tensors, known), value)


def _put_together(structure: Any, values: Sequence[Any]) -> Any:
    """Return the value that :func:`_taken_apart` made `structure` of, with other tensors."""
    if isinstance(structure, _Leaf):
        return values[structure.index]
    return _mapped(lambda part: _put_together(part, values), structure)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(function(part) for part in value)
    if type(value) in (tuple, list):
        return type(value)(function(part) for part in value)
    if type(value) is dict:
        return {key: function(part) for key, part in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    """Return True if two structures differ in nothing but tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one is other or bool(one == other)
