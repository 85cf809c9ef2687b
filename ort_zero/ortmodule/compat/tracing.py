"""Observes a module while it is traced: corrects what the tracer gets wrong, finds what no trace can hold."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from ort_zero.compat.deepspeed_parameters import is_partitioned
from ort_zero.ortmodule.compat.frames import is_only_message
from ort_zero.ortmodule.compat.impure_calls import is_time, notice_time, noticed
from ort_zero.ortmodule.compat.replaced_methods import called_method
from ort_zero.ortmodule.compat.size_calls import counted_axis, have_one_shape, note_call, numbers_among, uses_of
from ort_zero.ortmodule.compat.size_lists import with_open_lists
from ort_zero.ortmodule.compat.size_numbers import SizeNumbers
from ort_zero.ortmodule.compat.torch_modules import has_backward_hooks, is_batch_norm
from ort_zero.ortmodule.compat.trace_aliases import Aliases
from ort_zero.ortmodule.compat.trace_gradients import UNANSWERED, GradientReads, property_read
from ort_zero.ortmodule.compat.trace_operators import assign, complex_number, computed_after, copied
from ort_zero.ortmodule.compat.trace_origins import Origin, Origins
from ort_zero.ortmodule.compat.trace_sizes import ELEMENTS, TRUTH, SizeReads
from ort_zero.ortmodule.compat.trace_state import trace_goes_on
from ort_zero.ortmodule.compat.trace_switches import GradientSwitches
from ort_zero.ortmodule.compat.trace_views import PUTS_DATA, Views, changed_by
from ort_zero.ortmodule.compat.traced_calls import (
    BOOKKEEPING,
    CHECKING,
    COUNTING,
    COUNTS,
    EMBEDDINGS,
    EQUALITIES,
    FORMATTING,
    MOST_VALUES,
    READS,
    STORAGES,
    TAKE_NO_BOOLS,
    forward_line,
    is_called_by_us,
    is_read_by_ort,
    is_users_call,
    switched,
    user_line,
)
from ort_zero.ortmodule.compat.traced_numbers import NumberReadError, TracedNumbers
from ort_zero.ortmodule.compat.traced_vmap import vmap_by_broadcasting
from ort_zero.ortmodule.compat.value_reads import Guard, ValueReadError

_C: Any = torch._C


class Seen(Protocol):
    """Facts about a module that its trace does not hold."""

    guards: list[Guard]
    """The values that Python code took from tensors."""
    normalised: list[torch.nn.Module]
    """Normalisation modules that count their batches, listed once for each call."""
    used: set[int]
    """``id()`` of the tensors that functions of torch were given."""
    sizes: SizeReads
    """What Python code took from sizes."""
    size_numbers: SizeNumbers
    """The tensors that are Python numbers outside of the trace."""
    aliases: Aliases
    """The tensors that share memory."""
    switches: GradientSwitches
    """The parameters whose ``requires_grad`` was switched."""
    gradients: GradientReads
    """What the code has asked about gradients."""

    def anchored(self, result: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a result that depends on the arguments."""

    def running(self) -> torch.nn.Module | None:
        """Return the innermost module that runs."""

    def refuse_draws(self) -> None:
        """Raise ValueReadError if the code that ran last has drawn random numbers."""


class Draws(Protocol):
    """Tells what the traced code draws from generators that the tracer does not know."""

    function: Any
    """The function that made tensors or arrays of what :meth:`since_last` told of last; None if unknown."""

    def since_last(self) -> tuple[str, str] | None:
        """Return what was drawn since the last call, and where ("" if unknown); None for nothing."""

    def any(self) -> bool:
        """Return whether anything was drawn since the last look, traced or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedInputs:
    """The inputs of a graph as the tracer hands them to the module."""

    arguments: Sequence[torch.Tensor] = ()
    """Tensors among the arguments of the call."""
    names: Sequence[str] = ()
    """Their names."""
    attributes: Sequence[torch.Tensor] = ()
    """Attributes that are inputs of the graph."""
    numbers: Sequence[torch.Tensor] = ()
    """Those of both kinds that stand for numbers of Python: tensors without axes."""
    frozen: frozenset[int] = frozenset()
    """``id()`` of the parameters that want no gradient."""
    originals: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The tensors of the call by the ``id()`` of those that the module is given."""


NO_INPUTS = TracedInputs()


class _Observer(TorchFunctionMode):
    def __init__(self, inputs: TracedInputs, draws: Draws | None) -> None:
        super().__init__()
        self.modules: list[torch.nn.Module] = []
        self.guards: list[Guard] = []
        self.normalised: list[torch.nn.Module] = []
        self.used: set[int] = set()
        self.origins = Origins()
        self._draws = draws
        self._numbers = TracedNumbers(list(inputs.numbers))
        self._views = Views()
        self.switches = GradientSwitches(inputs.frozen)
        self.gradients = GradientReads(inputs.frozen, inputs.originals)
        self._normalised: dict[torch.nn.Module, tuple[torch.Tensor, bool]] = {}
        """Last result and mode of each module that keeps running statistics: its calls change them in turn."""
        self._inside: Any = None
        """The function of torch that runs, whose own reads no mode is told of; None outside of all."""
        self._sized = next((tensor for tensor in inputs.arguments if tensor.dim()), None)
        self.sizes = SizeReads(
            inputs.arguments,
            inputs.names,
            inputs.attributes,
            self.origins,
            self.running,
            self._guard_sizes,
            self._guard_inside,
        )
        self.size_numbers = SizeNumbers(self._take_number, self.sizes.value_of, inputs.numbers)
        self.sizes.numbers = self.size_numbers
        self.aliases = Aliases(self._number_step, self.sizes.shape_step)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        func = called_method(func)
        asked = property_read(func)
        if asked and is_users_call(sys._getframe(1)):
            answer = self._asked_for_gradient(asked, args[0])
            if answer is not UNANSWERED:
                return answer
        wanted = switched(func, args, kwargs)
        if wanted is None:
            args, kwargs = self.switches.put_into(args, kwargs)
        elif torch.jit.is_tracing() and not is_called_by_us():
            problem = self.switches.note(args[0], wanted)
            if problem is not None:
                raise ValueReadError(self.running(), problem, user_line())
        if func in TAKE_NO_BOOLS:
            # the exporter's passes know no such operator with a Python bool
            args = tuple(int(a) if isinstance(a, bool) else a for a in args)
            kwargs = {name: int(a) if isinstance(a, bool) else a for name, a in kwargs.items()}
        if any(isinstance(a, complex) for a in args) and isinstance(args[0], torch.Tensor):
            args = tuple(complex_number(a, args[0]) if isinstance(a, complex) else a for a in args)
        origins = self._numbers.among(args, kwargs)
        if origins:
            self._numbers.refuse_read(func, args, origins)
            func = self._numbers.out_of_place(func, args)
        read = self._read(func, args, kwargs)
        if read is not None:
            self._guard(func, args[0], read)
        if not torch.jit.is_tracing():
            return func(*args, **kwargs)
        func, args, kwargs = with_open_lists(self.size_numbers.out_of_place(func, args), args, kwargs)
        given = (*args, *kwargs.values())
        if getattr(getattr(func, "__self__", None), "__name__", "") not in BOOKKEEPING:
            self._note_used(given)
        self._refuse_arguments(given)
        self._refuse_untraceable(func, args, kwargs)
        if func in COUNTING and isinstance(module := self.running(), torch.nn.modules.batchnorm._NormBase):
            if args[0] is module.num_batches_tracked:
                self.normalised.append(module)
        if func in EQUALITIES and have_one_shape(self.sizes, args[0], given[1]):
            same = EQUALITIES[func](*args, **kwargs).all()
            self._guard_if_data(torch.Tensor.__bool__, same, "compares tensors for Python")
            self.sizes.note(same, TRUTH)
        uses = [(t, uses_of(t)) for t in given[1:] if self._may_become_number(t)]
        sizes = [(t, uses_of(t)) for t in numbers_among((args, kwargs))]
        outer, self._inside = self._inside, func if read is None else None
        try:
            with trace_goes_on():
                result = self._called(func, args, kwargs)
        finally:
            self._inside = outer
        self._views.note(func, args, kwargs, result)
        self.aliases.note(func, args, kwargs, result)
        note_call(self.sizes, func, args, kwargs, result, sizes)
        for number, before in uses:
            # the trace has no use of a tensor that was taken for a Python number
            if isinstance(result, torch.Tensor) and (uses_of(number) == before or func in CHECKING):
                self._guard_if_data(torch.Tensor.__float__, number, "takes a tensor for a Python float")
        _correct(result)
        self.size_numbers.follow(func, args, result)
        if origins:
            self._numbers.follow(func, args, kwargs, result, origins)
        return result

    def _asked_for_gradient(self, name: str, tensor: torch.Tensor) -> Any:
        """Return what PyTorch would answer, see :class:`GradientReads`; raise for what changes with each backward."""
        if not torch.jit.is_tracing():
            return UNANSWERED
        if name != "grad":
            return self.gradients.answer(name, tensor)
        if isinstance(tensor, torch.nn.Parameter):
            raise ValueReadError(self.running(), "reads the gradient of a parameter", user_line())
        return UNANSWERED

    def _number_step(self, tensor: torch.Tensor) -> int | None:
        return self.sizes.number_step(tensor) if self.size_numbers.includes(tensor) else None

    def _take_number(self, number: torch.Tensor) -> None:
        """Note that Python code takes a number that is computed from sizes; raise for one that is an input."""
        origins = self._numbers.among((number,), {})
        if origins:
            raise NumberReadError(origins, "takes it for a Python value")
        self._guard_if_data(torch.Tensor.item, number, "takes a size for a Python number")
        self.sizes.note(number, ELEMENTS)

    def _guard_sizes(self, tensors: list[torch.Tensor], what: str) -> None:
        """Guard as values what depends on sizes that only a run of the graph can tell."""
        read = ValueReadError(self.running(), what, user_line())
        read.of_sizes = True
        for tensor in tensors:
            if tensor.numel() > MOST_VALUES:
                raise read
            self.guards.append(Guard(self._not_constant(tensor), tensor.detach().flatten().tolist(), read))

    def _not_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as ORT cannot fold it: a size may be the same for all batches, and ORT wants no constant
        results."""
        if self._sized is None:
            return tensor
        nothing: Any = self._sized.size(0) * 0  # a tensor while a trace is made
        return tensor ^ (nothing != 0) if tensor.dtype == torch.bool else tensor + nothing.to(tensor.dtype)

    def _called(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Call a function in the form that the exporter gets right."""
        copy = copied(func, args, kwargs)
        if copy is not None:
            return copy
        target = changed_by(func, args, kwargs)
        if target is not None and _C._get_value_trace(target).node().kind() == "prim::Param":
            # of several changes of an input the exporter loses some
            _C._set_value_trace(target, _C._get_value_trace(target.clone()))
        if func is torch.Tensor.__setitem__:
            whole = self._views.slice_of(args[0])
            if whole is None:
                return assign(*args)
            changed = args[0].clone()  # the exporter follows what is assigned to a slice, but not to a part of one
            assign(changed, *args[1:])
            return self._called(func, (*whole, changed), {})
        whole = self._views.slice_of(target) if target is not None and target is not kwargs.get("out") else None
        if target is not None and whole is not None:
            # the exporter follows a change of a slice only where one line of the program takes and changes it
            changed = target.clone()
            self._called(func, (changed, *args[1:]), kwargs)
            self._called(torch.Tensor.__setitem__, (*whole, changed), {})
            _C._set_value_trace(target, _C._get_value_trace(changed))
            return target
        if func is torch.Tensor.copy_ and args[0].dim() and args[0]._base is None and len(args) > 1:
            assign(args[0], (slice(None),) * args[0].dim(), args[1])
            return args[0]
        return func(*args, **kwargs)

    def _refuse_untraceable(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Raise for a hook that is to see the gradient of a value inside the graph, and for changes that it would lose.

        The hooks of parameters see the gradients that leave the graph.
        """
        problem = self._views.problem(func, args, kwargs)
        if func is torch.Tensor.register_hook and not isinstance(args[0], torch.nn.Parameter) and not is_called_by_us():
            problem = "puts a hook on the gradient of a tensor"
        if func in EMBEDDINGS and (args[3] if len(args) > 3 else kwargs.get("max_norm")) is not None:
            problem = "scales rows of its weight in place (max_norm)"
        if func in STORAGES and is_users_call(sys._getframe(1)):
            problem = "looks at the memory of a tensor"
        if problem is not None:
            read = ValueReadError(self.running(), problem, user_line())
            read.of_partition = problem == PUTS_DATA and is_partitioned(args[0])
            raise read

    def anchored(self, result: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `result`, computed from a size of an argument if nothing else is: ORT wants no constant results."""
        value = _C._get_value_trace(result)
        sized = next((tensor for tensor in given if tensor.dim()), None)
        if sized is None or value.node().kind() == "prim::Param" or self._depends_on_inputs(value):
            return result
        nothing: Any = sized.size(0) * 0  # a tensor while a trace is made
        return result ^ (nothing != 0) if result.dtype == torch.bool else result + nothing.to(result.dtype)

    def begin_module(self, module: torch.nn.Module, args: tuple) -> tuple:
        """Note that a module is called; return the arguments for it."""
        self.refuse_draws()
        earlier, mode = self._normalised.get(module, (None, module.training))
        if mode != module.training:
            raise ValueReadError(module, "is called in train() and in eval()", user_line())
        self.modules.append(module)
        if earlier is None or not args or not isinstance(args[0], torch.Tensor):
            return args
        return (computed_after(args[0], earlier), *args[1:])

    def end_module(self, module: torch.nn.Module, result: Any) -> None:
        """Note that the call of the innermost module is over."""
        self.refuse_draws()
        del self.modules[-1]
        in_graph = "forward" not in vars(module)  # else PyTorch runs it
        if torch.jit.is_tracing() and in_graph and is_batch_norm(module) and isinstance(result, torch.Tensor):
            self._normalised[module] = result, module.training

    def refuse(self, what: str, where: str = "", function: Any = None) -> None:
        """Raise for code whose result no graph can hold; not for a submodule that runs in PyTorch inside the graph."""
        if torch.jit.is_tracing():
            read = ValueReadError(self.running(), what, where or user_line(), random=True)
            read.function = function
            raise read

    def refuse_draws(self) -> None:
        """Raise if the code that ran last has drawn random numbers that the tracer takes for constants."""
        drawn = self._draws.since_last() if self._draws is not None else None
        if self._draws is not None and drawn is not None:
            self.refuse(drawn[0], drawn[1] or forward_line(self.running()), self._draws.function)

    def forget_draws(self) -> None:
        """Let what was drawn since the last look not count."""
        if self._draws is not None:
            self._draws.any()

    def _refuse_arguments(self, given: Sequence[Any]) -> None:
        for argument in given:
            if isinstance(argument, torch.Generator):
                # ONNX Runtime draws from generators of its own
                self.refuse("draws random numbers from a torch.Generator")
            elif is_time(argument) or (isinstance(argument, (list, tuple)) and any(map(is_time, argument))):
                notice_time()

    def _note_used(self, given: Sequence[Any]) -> None:
        for argument in given:
            if isinstance(argument, torch.Tensor):
                self.used.add(id(argument))
            elif isinstance(argument, (list, tuple)):
                self.used.update(id(item) for item in argument if isinstance(item, torch.Tensor))

    def _may_become_number(self, argument: Any) -> bool:
        """Return True for a tensor that a function of PyTorch may take for a Python float."""
        return (
            isinstance(argument, torch.Tensor)
            and argument.dim() == 0
            and argument.is_floating_point()
            and not self._numbers.is_number(argument)
        )

    def running(self) -> torch.nn.Module | None:
        """Return the innermost module that runs, None outside of all."""
        return self.modules[-1] if self.modules else None

    def _depends_on_inputs(self, value: Any) -> bool:
        stack, seen = [value], set()
        while stack:
            node = stack.pop().node()
            if node.kind() == "prim::Param":
                return True
            for given in node.inputs():
                if given.unique() not in seen:
                    seen.add(given.unique())
                    stack.append(given)
        return False

    def _guard(self, func: Any, tensor: torch.Tensor, read: ValueReadError) -> None:
        """Note what Python takes from `tensor`; raise for what changes with every batch."""
        if func in COUNTS:
            if len(self.modules) > 1:
                raise read  # such as a loop over the experts that were hit
            count: Any = tensor.size(0)  # a tensor while a trace is made
            tensor = count
        elif tensor.numel() > MOST_VALUES:
            raise read
        elif self._numbers.is_number(tensor):
            read.of_attribute = True
            tensor = tensor != 0  # all that is asked for of a number; see TracedNumbers.refuse_read
        self.guards.append(Guard(tensor, tensor.detach().flatten().tolist(), read))

    def _guard_inside(self, method: Any, tensor: torch.Tensor, frame: FrameType, truth: bool) -> None:
        """Guard what a function of PyTorch, or one that it is given, reads: this mode is off meanwhile."""
        if self._inside is None:
            return
        formats = self._inside in FORMATTING
        if (formats or not truth) and is_only_message(frame, text=formats):
            return
        self._guard_if_data(method, tensor, READS.get(method, "takes a tensor for a Python value"))

    def _read(self, func: Any, args: tuple, kwargs: dict) -> ValueReadError | None:
        """Return what `func` does if its result is Python's and depends on data.

        Raises:
            ValueReadError: the result depends on random numbers alone, so that it changes all the time.
        """
        mode = "shape" if func in COUNTS else "value"
        what = COUNTS.get(func) or READS.get(func)
        if what is None or not isinstance(args[0], torch.Tensor) or not torch.jit.is_tracing():
            return None
        # what data decides the size of, nonzero() and the like, is the first axis
        if mode == "shape" and counted_axis(func, args, kwargs) % max(1, args[0].dim()) != 0:
            return None
        return self._dependence(args[0], mode, what)

    def _dependence(self, tensor: torch.Tensor, mode: str, what: str) -> ValueReadError | None:
        """Return what Python does with a tensor if data decides about it; raise if random numbers alone do."""
        origin = self.origins.of(_C._get_value_trace(tensor), mode)
        if origin is Origin.FIXED or is_read_by_ort():
            return None
        if origin is Origin.RANDOM:
            self.refuse(what.replace("a tensor", "a random tensor"))
        return ValueReadError(self.running(), what, user_line(), random=origin.is_random)

    def _guard_if_data(self, func: Any, tensor: torch.Tensor, what: str) -> None:
        """Guard the values of a tensor that a function of PyTorch has read, if data decides about them."""
        read = self._dependence(tensor, "value", what)
        if read is not None:
            self._guard(func, tensor, read)


def _correct(result: Any) -> None:
    """Note in the trace which results have a gradient; the tracer forgets it for convolutions."""
    if isinstance(result, torch.Tensor):
        if result.requires_grad and torch.jit.is_tracing():
            value = _C._get_value_trace(result)
            if not value.requiresGrad():
                value.inferTypeFrom(result)
    elif isinstance(result, (tuple, list)):
        for item in result:
            _correct(item)


_observers: list[_Observer] = []
"""The observers of the modules that are traced at the moment, innermost last."""


def innermost_module() -> torch.nn.Module | None:
    """Return the innermost module whose forward runs at the moment, traced or not; None if none does."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            return owner
        frame = frame.f_back
    return None


def depends_on_inputs(tensor: torch.Tensor) -> bool:
    """Return True if a tensor of the trace is computed from the graph's inputs, weights included."""
    return bool(_observers) and _observers[-1]._depends_on_inputs(_C._get_value_trace(tensor))


def is_number_of_sizes(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is a Python number outside of the trace: one that is computed from sizes."""
    if not _observers or tensor.dim() or tensor.dtype != torch.int64 or not depends_on_inputs(tensor):
        return False
    return _observers[-1].origins.of(_C._get_value_trace(tensor), "value") is Origin.FIXED


@contextlib.contextmanager
def drawing_at_each_run() -> Iterator[None]:
    """Let the code in the block draw random numbers, as it is going to do at each run of the graph."""
    observer = _observers[-1]
    observer.refuse_draws()
    yield
    observer.forget_draws()


def read_here(what: str) -> ValueReadError:
    """Return the error that keeps the innermost module in PyTorch, since its code, at its line, does `what`."""
    return ValueReadError(innermost_module(), what, user_line())


@contextlib.contextmanager
def watched(inputs: TracedInputs = NO_INPUTS, draws: Draws | None = None) -> Iterator[Seen]:
    """Observe the module that is traced in the block; yield what the trace does not hold.

    Args:
        inputs: what the module is given, and numbers among it.
        draws: tells what is drawn from generators of random numbers that the tracer does not know.

    Raises:
        ValueReadError: Python code inside depends on more than single values of tensors, or on random numbers.
        NumberReadError: code inside takes a number among the inputs for a Python value.
    """
    observer = _Observer(inputs, draws)
    thread = threading.get_ident()

    def begin(module: torch.nn.Module, args: tuple) -> tuple:
        if threading.get_ident() != thread:
            return args  # a module that another thread of the program runs meanwhile
        if torch.jit.is_tracing() and has_backward_hooks(module):
            raise ValueReadError(module, "has hooks that see gradients", f"of {type(module).__name__}")
        return observer.begin_module(module, args)

    def end(module: torch.nn.Module, args: tuple, result: Any) -> None:
        if threading.get_ident() == thread:
            observer.end_module(module, result)

    before: Any = begin  # torch declares its hooks without a result
    hooks = [
        torch_module.register_module_forward_pre_hook(before),
        torch_module.register_module_forward_hook(end),
    ]
    _observers.append(observer)
    try:
        with (
            observer,
            observer.sizes.recording(),
            observer.size_numbers.behaving(),
            noticed(observer.refuse),
            vmap_by_broadcasting(),
        ):
            yield observer
    finally:
        _observers.remove(observer)
        for hook in hooks:
            hook.remove()
