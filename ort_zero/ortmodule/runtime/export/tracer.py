"""Runs the user's module for the exporter, and notes what running it does besides returning a result.

:class:`.runtime.graph_builder.GraphBuilder` makes one :class:`Tracer` for each export; ORTModule's flattened
module calls :meth:`Tracer.run_module` in place of the module.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from ort_zero.compat.torch_modules import version_of
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat import trace_state, tracing
from ort_zero.ortmodule.compat.size_numbers import SizeNumbers
from ort_zero.ortmodule.compat.torch_autograd import leaves_behind
from ort_zero.ortmodule.compat.torch_modules import traceable_parametrizations
from ort_zero.ortmodule.compat.trace_aliases import Evaluations
from ort_zero.ortmodule.compat.trace_sizes import SizeReads
from ort_zero.ortmodule.compat.traced_numbers import NumberReadError
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.export import advanced_iterators, left_behind, pytree, structures
from ort_zero.ortmodule.runtime.export.argument_changes import ArgumentChanges
from ort_zero.ortmodule.runtime.export.attribute_inputs import AttributeInputError, AttributeInputs
from ort_zero.ortmodule.runtime.export.attribute_paths import Place
from ort_zero.ortmodule.runtime.export.attribute_reads import AttributeReads
from ort_zero.ortmodule.runtime.export.attribute_state import AttributeState
from ort_zero.ortmodule.runtime.export.attribute_writes import AttributeWrite, Change, NotWritable, Outputs
from ort_zero.ortmodule.runtime.export.buffer_changes import BufferChange, BufferChanges
from ort_zero.ortmodule.runtime.export.callables import callables_in
from ort_zero.ortmodule.runtime.export.random_draws import RandomDraws
from ort_zero.ortmodule.runtime.export.result_views import ResultViews, views_among
from ort_zero.ortmodule.runtime.export.unchanged_weights import UnchangedWeights
from ort_zero.ortmodule.statistics import reader_marks
from ort_zero.ortmodule.utils.new_objects import NewObjects


@dataclass(slots=True)
class Effects:
    """The effects of running a module besides its result, which a graph does not have."""

    results: int = 0
    """Number of tensors of the result; those of the effects are further outputs of the graph, behind them."""
    changed: list[int] = field(default_factory=list)
    """Indices of the tensor arguments that the module changes in place; their new values come after those of
    :attr:`writes`."""
    changed_with_gradient: list[int] = field(default_factory=list)
    """Those of them whose new value has a gradient."""
    attributes: list[tuple[Place, bool]] = field(default_factory=list)
    """Attributes that the module changes for the next call, and whether in place; their new values come after."""
    buffers: list[BufferChange] = field(default_factory=list)
    """Buffers that the module changes; their new values come after."""
    writes: list[AttributeWrite] = field(default_factory=list)
    """Attributes and containers that the module writes."""
    written: int = 0
    """Number of tensors that they need besides the results; these come first."""
    left: list[tuple[int, int]] = field(default_factory=list)
    """Number of the call of each node in PyTorch that leaves tensors with a gradient in its attributes, and the number
    of these; they come behind those of :attr:`writes`, and count as :attr:`written`."""
    views: ResultViews | None = None
    """Which of these are views of each other, of arguments or of weights; None for none."""
    dtypes: list[torch.dtype] = field(default_factory=list)
    """Dtype of each of these; ONNX Runtime computes some in another one."""
    complex: list[int] = field(default_factory=list)
    """Indices of the outputs that are complex numbers; the graph has pairs of real ones along a last axis."""
    guards: list[tuple[list, ValueReadError]] = field(default_factory=list)
    """Values that Python code took from tensors, and where; the values in a call come last."""
    counting: list[torch.nn.Module] = field(default_factory=list)
    """Normalisation modules that count their batches."""
    modes: list[tuple[torch.nn.Module, bool]] = field(default_factory=list)
    """Modules that the forward leaves in another mode (``training``)."""
    switched: list[tuple[str, bool]] = field(default_factory=list)
    """Names of the parameters that the forward freezes, or frees, and whether they want gradients then."""

    @property
    def first_guard(self) -> int:
        """Number of the graph's outputs before the values of the guards."""
        return self.results + self.written + len(self.changed) + len(self.attributes) + len(self.buffers)


class ArgumentInputError(BaseException):
    """Numbers among the arguments cannot be inputs of the graph: they are wanted for Python values.

    Not an Exception: no ``except`` of a model may take it for one of its own.
    """

    def __init__(self, names: Sequence[str], why: str):
        super().__init__(why)
        self.names = tuple(names)


class Tracer:
    """Follows one export of a module from inside of its forward.

    The trace is made with gradients wherever there could be any, whatever is frozen at the moment: the exported model
    then serves when a layer is set free, or an argument wants a gradient.

    Args:
        training: whether the graph has gradients.
        call: the call that is exported.
        parameters: parameters of the module's ``forward``.
        readers: readers of the subscribers that want to see values.
        drop_caches: whether caches of keys and values are left out of the result.
        all_inputs: whether arguments are traced with gradients that want none in this call.
        pytorch_context: makes a context in which the module runs as PyTorch would run it.
        inputs: attributes that the graph takes as inputs; None for none.
        settled: attributes whose changes by the forward itself do not count.
        state: returns the attributes as they were before the export.
        put_back: attributes and containers that have their values of before the export when the module is traced.
        by_value: numbers that the forward changes for the next call, and of which the graph holds for one value.
    """

    def __init__(
        self,
        training: bool,
        call: pytree.Call,
        parameters: Sequence[inspect.Parameter],
        readers: list[reader_marks.GraphReaders],
        *,
        drop_caches: bool,
        all_inputs: bool = True,
        pytorch_context: Callable[[], AbstractContextManager] = contextlib.nullcontext,
        inputs: AttributeInputs | None = None,
        settled: Collection[Place] = (),
        state: Callable[[], AttributeState | None] = lambda: None,
        put_back: Collection[Place] = (),
        by_value: Collection[Place] = (),
    ):
        self._state = state
        self._grad_enabled = torch.is_grad_enabled()
        self._put_back = put_back
        self._by_value = by_value
        self._modes: list[tuple[torch.nn.Module, bool]] = []
        """Mode of each module at the time of the call."""
        self._new_objects = NewObjects()
        """Objects that were made in the trace."""
        self._frozen: frozenset[int] = frozenset()
        """``id()`` of the parameters that are frozen at the time of the call."""
        self._wanted: list[tuple[torch.nn.Parameter, bool]] = []
        """Whether each parameter wants a gradient at the time of the call."""
        self._trainable: list[tuple[torch.nn.Parameter, bool]] = []
        """Whether each parameter wants a gradient when the module is traced."""
        self.weights = UnchangedWeights(torch.nn.Module())
        """The weights as they were before the export."""
        self.inputs = inputs
        self.settled = settled
        self._pytorch_context = pytorch_context
        self.training = training
        self.drop_caches = drop_caches
        self.call = call
        self.numbers = pytree.number_arguments(call.structure, parameters)
        """Index of the tensor of each argument that is a number for Python, by the argument's name."""
        self.readers = readers
        self.all_inputs = all_inputs
        self.trace_error: Exception | None = None
        """What the module raised while it was traced; None if nothing."""
        self.attributes: AttributeReads | None = None
        """What Python code has read besides the arguments; None before the trace."""
        self.not_written: list[Place] = []
        """Attributes whose values cannot be outputs of the graph."""
        self.schema: Any = None
        """Structure of the result of the trace, in which numbers that are computed from sizes are tensors."""
        self._structure: Any = None
        """Structure of the result when the module ran as PyTorch would run it."""
        self.sizes: SizeReads | None = None
        """What it has taken from sizes; None before the trace."""
        self.effects = Effects()
        self.spare_results = 0
        """Number of outputs, the last ones, that the graph does not need: caches that it leaves out, detached. With
        them the export may serve a graph that returns them, see :mod:`ort_zero.ortmodule.runtime.shared_exports`."""
        self.arguments_reached: frozenset[str] = frozenset()
        """Names of the arguments that a backward through the results leads to."""
        self.leaves_reached: frozenset[int] = frozenset()
        """``id()`` of all other leaf tensors that it leads to."""
        self.asks_for_gradients = False
        """Whether Python code of the module asks which tensors want a gradient."""
        self._has_drawn = False
        """Whether Python code of the module drew random numbers when it ran as PyTorch would run it."""
        self.users_error: BaseException | None = None
        """What the module raised when it ran as PyTorch would run it; None if nothing."""
        # the exporter takes copies of these, after the module has run on others once
        self.arguments = [
            (tensor.clone() if tensor.is_inference() else tensor.detach()).requires_grad_(tensor.requires_grad)
            for tensor in call.tensors
        ]
        self.outside: list[torch.nn.Module] = []
        """Modules whose buffers change outside of the graph, since PyTorch runs them."""
        self._computed = [i for i, t in enumerate(call.tensors) if t.requires_grad and not t.is_leaf]
        """Indices of the arguments that the module may change in place although they want a gradient."""

    @property
    def graph_inputs(self) -> dict[str, torch.Tensor]:
        """The inputs that the exporter is given, by name: arguments of the call, then attributes."""
        given = dict(zip(self.call.names, self.arguments, strict=True))
        if self.inputs is not None:
            given.update(zip(self.inputs.names.values(), self.inputs.tensors, strict=True))
        return given

    @property
    def differentiable(self) -> frozenset[str]:
        """Names of the arguments that may want a gradient of what is exported."""
        return frozenset(
            name for name, argument in zip(self.call.names, self.arguments, strict=True) if argument.requires_grad
        )

    @contextlib.contextmanager
    def unchanged_modes(self, module: torch.nn.Module) -> Iterator[None]:
        """Give `module` and all in it the modes (``training``) of before the block again."""
        self._modes = [(child, child.training) for child in module.modules()]
        try:
            yield
        finally:
            self._put_modes_back()

    @contextlib.contextmanager
    def everything_trainable(self, module: torch.nn.Module) -> Iterator[None]:
        """Let all floating-point weights of `module` want gradients in the block, if the graph has gradients.

        What the module itself switches does not outlast the block.
        """
        before = self._wanted = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._frozen = frozenset(id(parameter) for parameter, wanted in before if not wanted)
        self._trainable = [(p, wanted or self.training and p.is_floating_point()) for p, wanted in before]
        try:
            _set_trainable(self._trainable)
            yield
        finally:
            _set_trainable(before)

    def run_module(self, module: torch.nn.Module, tensors: tuple) -> tuple[list[torch.Tensor], Any]:
        """Run the module on its arguments, put together; return the tensors of the result, and its structure."""
        count = len(self.call.names)
        tensors, attributes = tensors[:count], tensors[count:]
        if not torch.jit.is_tracing():
            handed = self._handed(tensors)
            values = [t.item() if i in self.numbers.values() else t for i, t in enumerate(handed)]
            args, kwargs, known = pytree.unflatten_call(values, self.call.structure)
            return self._run_in_pytorch(module, handed, args, kwargs, known)
        self._new_objects = NewObjects()
        with self._new_objects.noted():  # the containers among the arguments, which are built anew, among them
            if self.training:
                # the trace then tells what has a gradient; nothing needs to be kept for one
                with torch.enable_grad(), trace_state.saved_through(_keeps_nothing, _never_unpacked):
                    return self._run_traced(module, tensors, attributes)
            # where nothing wants a gradient, code may ask whether the mode is on all the same
            with torch.set_grad_enabled(self._grad_enabled):
                return self._run_traced(module, tensors, attributes)

    def _handed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the module is given: the tensors, and of those that it may change in place copies.

        An input of a trace is a leaf, and PyTorch lets nobody change a leaf that wants a gradient.
        """
        with torch.enable_grad():
            return [t.clone() if i in self._computed and t.requires_grad else t for i, t in enumerate(tensors)]

    def _run_in_pytorch(
        self, module: torch.nn.Module, given: Sequence[torch.Tensor], args: tuple, kwargs: dict, known: dict
    ) -> tuple[list, Any]:
        """Run the module as PyTorch would; an error here is the user's own."""
        versions = [version_of(tensor) for tensor in given]
        draws = RandomDraws(module)
        _set_trainable(self._wanted)
        try:
            # modules that compute gradients in their forward fail without gradients only
            with (
                torch.set_grad_enabled(self.training or self._grad_enabled),
                self._pytorch_context(),
                self.weights.noticed(),
            ):
                value = module(*args, **kwargs)
        except Exception as error:
            self.users_error = error
            raise
        finally:
            self.weights.restore()
            _set_trainable(self._trainable)
        self._has_drawn = draws.any()
        self._computed = [i for i in self._computed if version_of(given[i]) != versions[i]]
        if self.training and self.all_inputs:
            for argument, tensor, version in zip(self.arguments, given, versions, strict=True):
                # PyTorch lets nobody change in place what is a leaf with gradient
                if version_of(tensor) == version and argument.is_floating_point():
                    argument.requires_grad_()
            for i in self.numbers.values():
                self.arguments[i].requires_grad_(False)
        state = self._state()
        if state is not None:
            state.note_numbers()
        tensors, self._structure = pytree.flatten(value, drop_caches=self.drop_caches, known=known)
        return tensors[:1], self._structure  # the exporter names as many outputs, and the trace may have fewer

    def _run_traced(self, module: torch.nn.Module, given: tuple, inputs: tuple) -> tuple[list, Any]:
        """Run the module for the tracer; what a graph does not do by itself becomes more outputs of it.

        Args:
            module: the user's module.
            given: the tensors of the call as the tracer hands them out.
            inputs: attributes that are inputs of the graph.
        """
        handed = self._handed(given)
        args, kwargs, known = pytree.unflatten_call(handed, self.call.structure)
        versions = [version_of(tensor) for tensor in handed]
        input_versions = [version_of(tensor) for tensor in inputs]
        numbers = [given[i] for i in self.numbers.values()]
        numbers += [inputs[i] for i in self.inputs.numbers] if self.inputs else []
        traced = tracing.TracedInputs(
            arguments=given,
            names=self.call.names,
            attributes=inputs,
            numbers=numbers,
            frozen=self._frozen if self.training else frozenset(),
            originals={
                id(tensor): original
                for tensors in (given, handed)
                for tensor, original in zip(tensors, self.call.tensors, strict=True)
            },
        )
        placed = self.inputs.placed(inputs) if self.inputs else contextlib.nullcontext()
        buffers = BufferChanges(module, self.outside)
        state = self._state()
        if state is not None:
            state.put_back(self._put_back)
        containers = ArgumentChanges(args, kwargs, known, drop_caches=self.drop_caches)
        self._put_modes_back()
        _set_trainable(self._trainable)
        advanced_iterators.rewind()
        draws = RandomDraws(module)  # the first run may have made generators
        lines = draws.lines_followed() if self._has_drawn else contextlib.nullcontext()
        with placed, tracing.watched(traced, draws) as seen, lines, left_behind.collected() as left:
            numbers_of_sizes = seen.size_numbers
            attributes = self.attributes = AttributeReads(
                module,
                seen.running,
                numbers_of_sizes.enter,
                numbers_of_sizes.plain,
                callables_in(structures.constants_in_call(self.call.structure)),
                self._new_objects,
            )
            try:
                with attributes.recording(), traceable_parametrizations():
                    value = module(*args, **kwargs)
            except Exception as error:
                # of the two reasons why no graph can hold this code the error is the one that a trace may cause itself
                seen.refuse_draws()
                self.trace_error = error
                raise
            except NumberReadError as error:
                raise self._no_inputs(error) from None
            settled = {*self.settled, *(self.inputs.names if self.inputs else ())}
            attributes.finish(settled, seen.used, state, self._by_value)
            states = self.inputs.changed(inputs, input_versions) if self.inputs else []
            changed_buffers = buffers.found()
        modes = [(child, child.training) for child, mode in self._modes if child.training is not mode]
        self.sizes = seen.sizes
        self.asks_for_gradients = seen.gradients.any
        seen.guards.sort(key=lambda guard: guard.read.of_attribute)  # those that all ranks have come first
        changed = [i for i, tensor in enumerate(handed) if version_of(tensor) != versions[i]]
        changes = [*attributes.changes, *containers.found()]
        paths = self._own_paths(containers, handed)
        held = {id(t): name for name, t in chain(module.named_parameters(), module.named_buffers())}
        taken: dict[str, Any] = {
            "drop_caches": self.drop_caches,
            "known": known,
            "sizes": numbers_of_sizes,
            "held": held,
        }
        tensors, schema = pytree.flatten(value, **taken, given=paths)
        writes, written = self._writes(module, tensors, handed, inputs, attributes, changes, numbers_of_sizes)
        if not tensors and not written:  # a graph has an output
            written = pytree.flatten(value, **taken)[0][:1]
        if self._structure is not None:
            schema = structures.with_numbers(schema, self._structure)
        self.schema = schema
        results = len(tensors)
        outputs = tensors + written
        views, bases = views_among(outputs, handed, held, seen.aliases)
        written += bases
        written += [tensor for _, found in left for tensor in found]
        tensors = tensors + written
        self._note_leaves([*tensors, *(handed[i] for i in changed)], given)
        tensors = [seen.anchored(tensor, given) for tensor in tensors]
        self.effects = Effects(
            results=results,
            writes=writes,
            written=len(written),
            views=ResultViews(views, Evaluations(self.sizes.program)) if views else None,
            dtypes=[tensor.dtype for tensor in tensors],
            complex=[i for i, tensor in enumerate(tensors) if tensor.is_complex()],
            left=[(call, len(found)) for call, found in left],
            changed=changed,
            changed_with_gradient=[i for i in changed if handed[i].requires_grad],
            attributes=[(place, in_place) for place, in_place, _ in states],
            buffers=[change for change, _ in changed_buffers],
            guards=[(guard.value, guard.read) for guard in seen.guards],
            modes=modes,
            switched=[
                (held[key], p.requires_grad)
                for key, (p, wanted) in seen.switches.first.items()
                if key in held and p.requires_grad is not wanted
            ],
            counting=[m for m in seen.normalised if m.num_batches_tracked is not None],
        )
        more = [seen.anchored(handed[i], given) for i in changed] + [
            seen.anchored(value, given) for *_, value in states
        ]
        more += [seen.anchored(value, given) for _, value in changed_buffers]
        more += [guard.tensor.detach().flatten() for guard in seen.guards]
        more += reader_marks.joined_tokens(self.readers)
        spare = self._caches(value, known, results_and_more=[*tensors, *more])
        self.spare_results = len(spare)
        return tensors + more + [seen.anchored(tensor, given).detach() for tensor in spare], schema

    def _caches(self, value: Any, known: dict, results_and_more: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of a result that are left out of the graph's, for other graphs of the module."""
        if not self.drop_caches or self.readers:
            return []
        try:
            every, _ = pytree.flatten(value, drop_caches=False, known=known)
        except Exception as error:  # attributes of a cache may raise anything; who returns it will be told
            get_logger().debug("caches are not kept for another graph: %s: %s", type(error).__name__, error)
            return []
        returned = {id(tensor) for tensor in results_and_more}
        return [tensor for tensor in every if id(tensor) not in returned]

    def _own_paths(self, containers: ArgumentChanges, given: Sequence[torch.Tensor]) -> dict[int, tuple]:
        """Return the paths of tensors and containers that the caller gets back as its own when they are results."""
        others = {id(given[i]) for i in self.numbers.values()}
        return {key: path for key, path in containers.paths.items() if key not in others}

    def _writes(
        self,
        module: torch.nn.Module,
        results: list[torch.Tensor],
        given: Sequence[torch.Tensor],
        inputs: tuple,
        attributes: AttributeReads,
        changes: Sequence[Change],
        sizes: SizeNumbers,
    ) -> tuple[list[AttributeWrite], list[torch.Tensor]]:
        """Return what the module has written, into attributes and arguments, and the tensors of that which are no
        results."""
        constants = {id(tensor) for tensor in (*module.parameters(), *module.buffers())} | attributes.held_before
        constants -= {id(tensor) for tensor in inputs}  # another one in the next call
        self.not_written += attributes.times
        outputs = Outputs(results, given, constants, self._state(), sizes)
        writes = []
        for change in changes:
            try:
                writes.append(outputs.write(change, drop_caches=self.drop_caches))
            except NotWritable:
                self.not_written.append(change.place)
        return writes, outputs.tensors

    def _put_modes_back(self) -> None:
        """Give all modules the mode that they have at the time of the call."""
        for child, mode in self._modes:
            if child.training is not mode:
                child.training = mode

    def _note_leaves(self, results: list[torch.Tensor], given: tuple) -> None:
        """Note where a backward through the results would lead."""
        leaves = leaves_behind(tensor.grad_fn for tensor in results)
        leaves += [tensor for tensor in results if tensor.requires_grad and tensor.is_leaf]
        arguments = {id(tensor): name for name, tensor in zip(self.call.names, given, strict=True)}
        self.arguments_reached = frozenset(arguments[id(leaf)] for leaf in leaves if id(leaf) in arguments)
        self.leaves_reached = frozenset(id(leaf) for leaf in leaves if id(leaf) not in arguments)

    def _no_inputs(self, error: NumberReadError) -> BaseException:
        """Return which arguments or attributes cannot be inputs, and why."""
        names = list(self.numbers)
        arguments = [names[i] for i in sorted(error.origins) if i < len(names)]
        if arguments:
            return ArgumentInputError(arguments, f"the code {error}")
        assert self.inputs is not None
        places = list(self.inputs.names)
        read = [places[self.inputs.numbers[i - len(names)]] for i in sorted(error.origins)]
        return AttributeInputError(read, f"the code {error}")


def _keeps_nothing(tensor: torch.Tensor) -> None:
    """Save nothing for a backward."""


def _never_unpacked(nothing: None) -> torch.Tensor:
    if not torch.jit.is_tracing():
        raise RuntimeError(
            "a backward reached a tensor that the forward has left in an attribute or a list while its graph was made; "
            "the graph does not write it at each step: return it from forward instead"
        )
    raise RuntimeError("the module computes gradients inside its forward, which an ONNX graph cannot contain")


def _set_trainable(parameters: Sequence[tuple[torch.nn.Parameter, bool]]) -> None:
    for parameter, wanted in parameters:
        if parameter.requires_grad is not wanted:
            parameter.requires_grad_(wanted)
