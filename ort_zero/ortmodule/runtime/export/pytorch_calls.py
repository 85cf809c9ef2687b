"""Runs Python code as one operator of a trace, and so as one node of the graph: excluded submodules, and functions.

:mod:`.excluded_modules` records the calls; :mod:`ort_zero.ortmodule.runtime.operators.aten_op` makes the nodes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from ort_zero.errors import ExportError
from ort_zero.ortmodule.compat import trace_state
from ort_zero.ortmodule.compat.torch_modules import (
    CALL,
    is_scripted,
    scripted_weights,
    uncached_parametrizations,
    without_infrastructure_hooks,
)
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.export import argument_writes, pytree, structures
from ort_zero.ortmodule.runtime.export.argument_writes import ArgumentWrites, NotCarried
from ort_zero.ortmodule.runtime.export.attribute_reads import unrecorded
from ort_zero.ortmodule.runtime.export.checkpoint_marks import plain_calls
from ort_zero.ortmodule.runtime.export.left_behind import (
    LeftBehind,
    Slot,
    parameters_stay_registered,
    put_back_weights,
    put_in_place,
)
from ort_zero.ortmodule.runtime.export.numbered_calls import NumberedCalls
from ort_zero.ortmodule.runtime.export.plain_lookups import plain_lookups
from ort_zero.ortmodule.runtime.export.scaled_weights import take_over_scaled, with_copies_of_scaled
from ort_zero.zero3_hooks.hook_manager import paused

MISSING = object()


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


OPERATOR = "ort_zero::submodule"

CALLS: NumberedCalls[PyTorchCall] = NumberedCalls("submodule")
"""The calls that :data:`OPERATOR` stands for."""


class PyTorchCall:
    """One way in which Python code is called from the graph: everything but the tensors.

    Args:
        name: name of the code, for messages.
        reason: why it runs in PyTorch.
        arguments: structure of its arguments.
    """

    def __init__(self, name: str, reason: str, arguments: tuple):
        self.number = CALLS.add(self)
        self.name = name
        self.reason = reason
        self.arguments = arguments
        self.results: Any = None
        """Structure of what it returns, as of the last run; None before the first."""
        self.places: Any = None
        """Structure of what it leaves behind besides, as of the last run; None before the first."""
        self.count = 0
        """Number of tensors of what it returns; those of what it leaves behind come after."""
        self.owner: torch.nn.Module | None = None
        """The module that holds the code; None for the model itself."""
        self.drop_caches = False
        """Whether caches of keys and values come back as None, as they do from a graph for training."""
        self.without_hooks = False
        """Whether it takes gradients in a way that saved-tensor hooks make impossible (``torch.func.grad``)."""

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the code; return the tensors of its result."""
        with trace_state.plain_autograd() as in_trace:
            if not in_trace or self.without_hooks:
                return self._run(tensors)
            try:
                with saved_tensors_hooks(_unchanged, _unchanged):
                    return self._run(tensors)
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
            self.without_hooks = True
            return self._run(tensors)

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found, results = self._flattened(self._value(tensors))
        left, places = pytree.flatten(self._left(), drop_caches=self.drop_caches)
        if self.results is None or not any(tensor.is_meta for tensor in tensors):
            # a trial that finds out shapes has devices of its own among its results
            if self.results is not None and (results != self.results or places != self.places):
                raise self._other_results(results)
            self.results, self.places, self.count = results, places, len(found)
        self._note_left(places)
        return found + left

    def _flattened(self, value: Any) -> tuple[list[torch.Tensor], structures.Structure]:
        """Return the tensors and the structure of what the code has returned."""
        return pytree.flatten(value, drop_caches=self.drop_caches)

    def result_for(self, tensors: Sequence[torch.Tensor], given: pytree.Call, args: tuple, kwargs: dict) -> Any:
        """Return what the last run returns to its caller.

        Args:
            tensors: outputs of the node.
            given: the flattened call.
            args: the caller's positional arguments.
            kwargs: its keyword arguments.
        """
        return pytree.unflatten(tensors, self.results, given.objects)

    def _left(self) -> list[Any]:
        """Return what the last run has left behind besides its result, and has a gradient."""
        return []

    def _note_left(self, structure: Any) -> None:
        """Remember where that is."""

    def take_left(self) -> list[tuple[list[Slot], Any]]:
        """Return where the runs since the last call have left something behind, and the structure of that."""
        return []

    def _value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the code returns for these tensors."""
        raise NotImplementedError

    def _other_results(self, results: Any) -> BaseException:
        """Return the error for `results`, whose structure is another one than when the graph was made.

        The module that holds the code can run in PyTorch as well, and deal with either structure there.
        """
        if argument_writes.has_changes(self.results) or argument_writes.has_changes(results):
            return self._not_carried(NotCarried("writes something else into its arguments from run to run"))
        then, now = structures.described(self.results), structures.described(results)
        if self.owner is not None:
            return self._moves_owner(f"returns now {then}, now {now}, or of other parts")
        return ExportError(
            f"{self.name}, which runs in PyTorch inside the graph, returned something else than when the graph was "
            f"made ({then} then, {now} now); return tensors only"
        )

    def _moves_owner(self, what: str) -> ValueReadError:
        """Return the error that lets the module that holds the code run in PyTorch as well."""
        return ValueReadError(self.owner, f"calls {self.name}, which {what}", self.reason)

    def _not_carried(self, error: NotCarried) -> BaseException:
        """Return the error for a write into an argument that cannot be a result."""
        if self.owner is not None:
            return self._moves_owner(str(error))
        return ExportError(
            f"{self.name}, which runs in PyTorch inside the graph, {error}, which its caller in the graph cannot "
            "see; write tensors into a dict or a list, or return them"
        )


class FunctionCall(PyTorchCall):
    """One call of a function."""

    def __init__(self, name: str, reason: str, function: Callable, arguments: tuple):
        super().__init__(name, reason, arguments)
        self.function = function

    def _value(self, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs, _ = pytree.unflatten_call(tensors, self.arguments)
        return self.function(*args, **kwargs)


class ModuleCall(PyTorchCall):
    """One way in which an excluded submodule is called; its parameters are the last of the tensors."""

    def __init__(
        self,
        path: str,
        reason: str,
        module: torch.nn.Module,
        names: list[str],
        arguments: tuple,
        *,
        owner: torch.nn.Module | None = None,
        drop_caches: bool = False,
    ):
        super().__init__(path, reason, arguments)
        self.owner, self.drop_caches = owner, drop_caches
        self.module = module
        self.names = names
        self.modes: tuple[bool, ...] = ()
        """Mode (``training``) of the module and of each one in it when it is called."""
        self.own_forward: Any = MISSING
        """The module's attribute ``forward``, if it has one besides that of its class."""
        self._writes: ArgumentWrites | None = None
        self._changed: list[int] = []
        """Indices of the tensors among the arguments that the module changes in place."""
        self._slots: list[Slot] = []
        self._runs: list[tuple[list[Slot], Any]] = []

    def _value(self, tensors: Sequence[torch.Tensor]) -> Any:
        count = len(tensors) - len(self.names)
        # ONNX Runtime's memory must not change; and autograd lets nobody change what it takes for a view
        given = [t.clone() if self.results is None or i in self._changed else t for i, t in enumerate(tensors[:count])]
        args, kwargs, objects = pytree.unflatten_call(given, self.arguments)
        constants = structures.constants_in_call(self.arguments)
        self._writes = ArgumentWrites(args, kwargs, objects, given, constants, drop_caches=self.drop_caches)
        module = self.module
        with contextlib.ExitStack() as stack:
            stack.enter_context(plain_lookups(module))  # copying recurrent layers looks their weights up too
            weights, scaled = with_copies_of_scaled(module, dict(zip(self.names, tensors[count:], strict=True)))
            if any(tensor.is_meta for tensor in tensors):
                module = _copy_of(module)  # a trial that finds out shapes is to leave no traces
            contexts = unrecorded(), paused(), plain_calls(), self._as_itself(module)
            for context in (*contexts, uncached_parametrizations(), _in_modes(module, self.modes)):
                stack.enter_context(context)
            if is_scripted(module):
                with scripted_weights(module, weights):
                    return module(*args, **kwargs)
            stack.enter_context(without_infrastructure_hooks(module))
            left = LeftBehind(module)
            with parameters_stay_registered(module):
                result = functional_call(module, weights, args, kwargs)
            put_back_weights(module, weights)
            put_in_place(module, {id(copy): t for copy, t in zip(given, tensors[:count], strict=True) if copy is not t})
            take_over_scaled(scaled)
            self._slots = left.slots()
        return result

    def _flattened(self, value: Any) -> tuple[list[torch.Tensor], structures.Structure]:
        writes, self._writes = self._writes, None
        assert writes is not None
        if self.results is None:
            self._changed = writes.changed()
        try:
            return writes.flatten(value)
        except NotCarried as error:
            raise self._not_carried(error) from None

    def result_for(self, tensors: Sequence[torch.Tensor], given: pytree.Call, args: tuple, kwargs: dict) -> Any:
        try:
            return argument_writes.unflatten(tensors, self.results, given, args, kwargs, self.drop_caches)
        except NotCarried as error:
            raise self._not_carried(error) from None

    def _left(self) -> list[Any]:
        return [slot.value for slot in self._slots]

    def _note_left(self, structure: Any) -> None:
        if self._slots:
            self._runs.append((self._slots, structure))
            self._slots = []

    def take_left(self) -> list[tuple[list[Slot], Any]]:
        """Return where the runs since the last call have left tensors with a gradient, and the values' structure."""
        runs, self._runs = self._runs, []
        return runs

    def _as_itself(self, module: torch.nn.Module) -> AbstractContextManager:
        """Let `module`, which is the module or its copy, call its own forward."""
        stack = contextlib.ExitStack()
        if not is_scripted(module):
            stack.enter_context(attribute_of(module, "forward", self.own_forward))
        stack.enter_context(attribute_of(module, CALL, MISSING))
        return stack


@contextlib.contextmanager
def _in_modes(module: torch.nn.Module, modes: Sequence[bool]) -> Iterator[None]:
    """Let `module` and those in it be in the modes of the call: a forward may switch them in between."""
    changed = [child for child, mode in zip(module.modules(), modes, strict=False) if child.training is not mode]
    for child in changed:
        child.training = not child.training
    try:
        yield
    finally:
        for child in changed:
            child.training = not child.training


def _copy_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of `module` with its parameters, and buffers without data; `module` if it cannot be copied."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in module.parameters()}
    shared |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    try:
        return copy.deepcopy(module, shared)
    except Exception:
        return module


@contextlib.contextmanager
def attribute_of(module: torch.nn.Module, name: str, value: Any) -> Iterator[None]:
    """Let `module` have an attribute of its own besides that of its class, or none if it is `MISSING`."""
    before = module.__dict__.pop(name, MISSING)
    if value is not MISSING:
        module.__dict__[name] = value
    try:
        yield
    finally:
        module.__dict__.pop(name, None)
        if before is not MISSING:
            module.__dict__[name] = before
