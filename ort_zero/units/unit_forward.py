"""Put a compiled forward in place of a unit's own, on the instance: the unit keeps its class, hooks and names."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ort_zero.compat.deepspeed import full_size
from ort_zero.compat.torch_compile import called_module, in_backward, is_dynamos, is_taken_apart, saves_plainly
from ort_zero.compat.torch_modules import parameters_of
from ort_zero.runtimes.runner import Runner
from ort_zero.runtimes.unit_trial import UnitTrial
from ort_zero.units.second_derivatives import Call

_NAME = "forward"
IN_GRAPH = "raised_in_graph"
"""Attribute of exceptions that a graph has raised: their tracebacks end at the unit's first line."""
_ASKED = frozenset(1 << n for n in range(3, 40))
"""Numbers of calls at which a unit asks whether it goes back to PyTorch, or is timed from now on."""
_WATCHED = 64
"""Number of first calls whose backwards are watched for ``create_graph=True``; some penalties come every 16 steps."""


class UnitRunner:
    """Compiles the forward of units, and keeps them compiled; a subclass may decide that PyTorch runs a unit."""

    graph_node: str | None = None
    """What the names of the graphs' autograd nodes begin with; None: no backward is watched for ``create_graph``."""

    def form(self, unit: nn.Module, function: Callable[..., Any], runner: Runner | None = None) -> Callable[..., Any]:
        """Return the compiled form of a function of the unit and its arguments; called again for another function.

        A trial of the unit names the `runner` at each of its calls; None is what runs units at first.
        """
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """Raise the error of a compilation that failed; a subclass may return, and PyTorch runs the unit."""
        raise error

    def goes_to_torch(self, unit: nn.Module) -> bool:
        """Return True if PyTorch runs the unit from now on."""
        return False

    def starts_in(self, unit: nn.Module, inputs: Any) -> Runner | None:
        """Return what runs a unit from now on: ``TORCH``, or what compiles it; asked at the unit's first training call.

        None: PyTorch runs the call, and the next one asks again, since units like this one are tried first.
        """
        return Runner.ONNXRUNTIME

    def keep(self, unit: nn.Module, inputs: Any, runner: Runner, gain: float = 0.0) -> None:
        """Keep for later starts what runs the unit, and the seconds that it saves."""

    def gone_to_torch(self) -> None:
        """Note that PyTorch runs a unit from now on."""

    def trial_of(self, unit: nn.Module, inputs: Any) -> UnitTrial | None:
        """Return the trial of a call with the unit and its arguments; None for a call that is not to be timed."""
        return None

    def differentiated(self) -> None:
        """Note that a backward of the unit is to be differentiated; called only with a :attr:`graph_node`."""


class UnitForward:
    """The forward of one unit: calls the compiled function of the unit's class.

    A deep copy of the unit gets a copy that runs the copied unit. A pickle holds the unit's own forward instead, so
    that it can be loaded without ort_zero. A shallow copy, which has this object from the original, loses it at its
    first call and runs its own forward.
    """

    def __init__(
        self,
        unit: nn.Module,
        runner: UnitRunner,
        original: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
    ):
        self.unit = unit
        self.runner = runner
        self.compiled: Callable[..., Any] | None = compiled or runner.form(unit, original)
        self.original = original
        self.calls = 0
        self.is_suspended = False
        """Whether PyTorch runs the unit for now."""
        self.has_started = False
        """Whether the unit is compiled since a training call, which need not be its first one."""
        self.is_timed = False
        """Whether calls are timed, by each runner in turn."""
        self.is_settled = True
        """Whether it is decided what runs the unit; no training call, nothing to decide."""
        functools.update_wrapper(self, original, updated=())
        self.__signature__ = inspect.signature(types.MethodType(original, unit))

    @property
    def __code__(self) -> Any:
        """The code of the unit's own forward, of which ``torch.export`` notes the line."""
        function: Any = inspect.unwrap(self.original)
        return function.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit."""
        if is_taken_apart((*args, *kwargs.values())):
            return self._run_plainly(self.unit, args, kwargs)
        module = called_module(1)
        if module is not None and module is not self.unit and vars(module).get(_NAME) is self:
            del vars(module)[_NAME]
            return self._run_plainly(module, args, kwargs)
        if self.compiled is None or self.is_suspended:
            return self._run_plainly(self.unit, args, kwargs)
        if not isinstance(self.original, _OwnForward) and type(self.unit).forward is not self.original:
            self.original = type(self.unit).forward
            self.compiled = self.runner.form(self.unit, self.original)
        self.calls += 1
        # not in a backward: activation checkpointing must compute again what the forward has computed
        trial = None
        if not self.has_started and torch.is_grad_enabled() and not in_backward():
            if not self._starts_compiled((args, kwargs)):
                return self._run_plainly(self.unit, args, kwargs)
        elif (self.is_timed or self.calls in _ASKED) and not in_backward():
            trial = self._trial((args, kwargs))
            if self.compiled is None:
                self.runner.gone_to_torch()
                return self._run_plainly(self.unit, args, kwargs)
        form: Any = self.compiled
        call, node = None, self.runner.graph_node
        if self.calls <= _WATCHED and node is not None and torch.is_grad_enabled() and saves_plainly():
            call = Call(self.unit, self.original, (args, kwargs), self.runner.differentiated)
        try:
            if trial is not None:
                runner = trial.turn()
                form = self._form(runner)
                results = trial.run(runner, form, self.unit, args, kwargs)
            else:
                results = form(self.unit, *args, **kwargs)
            if call is not None and node is not None and form is not self.original:
                call.watch(results, node)
            return results
        except Exception as error:
            if not (is_dynamos(error) or getattr(error, IN_GRAPH, False)):
                raise
            failure = error
        # outside of the handler: what this raises is the user's own error, with the user's line
        results = self._run_plainly(self.unit, args, kwargs)
        if any(parameter.numel() < full_size(parameter) for parameter in parameters_of(self.unit)):
            return results  # a call outside of the engine's forward; the next one within it is compiled
        self.runner.failed(failure)
        self.compiled = None
        return results

    def _run_plainly(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the forward that a module has without ort_zero."""
        if isinstance(self.original, _OwnForward):
            return self.original.function(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _form(self, runner: Runner) -> Callable[..., Any]:
        return self.original if runner is Runner.TORCH else self.runner.form(self.unit, self.original, runner)

    def _starts_compiled(self, inputs: Any) -> bool:
        """Return True if the unit is compiled from now on; False if PyTorch runs the call, or all calls."""
        self.is_settled = False
        runner = self.runner.starts_in(self.unit, inputs)
        if runner is Runner.TORCH:
            self.compiled = None
            self.runner.gone_to_torch()
        elif runner is not None or self.calls >= _WATCHED:
            self.has_started, self.calls = True, 1
            if runner is Runner.INDUCTOR:
                self.compiled, self.is_settled = self._form(runner), True
        return self.has_started

    def _trial(self, inputs: Any) -> UnitTrial | None:
        """Return the trial that a call belongs to, or None; hand the unit to the runner that a trial has decided on."""
        if getattr(self.compiled, "must_stay_compiled", False):
            self.is_settled = True
            return None
        if self.calls in _ASKED and self.runner.goes_to_torch(self.unit):
            self.compiled = None
            self.runner.keep(self.unit, inputs, Runner.TORCH)
            return None
        if not torch.is_grad_enabled():
            return None
        trial = self.runner.trial_of(self.unit, inputs)
        if trial is not None and not saves_plainly():
            self.is_settled = True
            return None
        self.is_timed = trial is not None and trial.runner is None
        self.is_settled = trial is not None and trial.runner is not None
        if trial is not None and trial.runner is not None:
            self.compiled = None if trial.runner is Runner.TORCH else self._form(trial.runner)
            self.runner.keep(self.unit, inputs, trial.runner, trial.gain)
        return trial if self.is_timed else None

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitForward:
        unit = memo.get(id(self.unit), self.unit)
        return UnitForward(unit, self.runner, self.original, self.compiled or self.original)

    def __reduce__(self) -> Any:
        if isinstance(self.original, _OwnForward):
            return functools.partial, (self.original.function,)
        return getattr, (self.unit, _NAME)  # the class's forward: when this is loaded, the instance has no other


def replace_forward(unit: nn.Module, runner: UnitRunner) -> None:
    """Replace the forward of a unit by its compiled form."""
    current = vars(unit).get(_NAME)
    if isinstance(current, UnitForward):
        original = current.original
    elif current is not None:
        original = _OwnForward(current)
    else:
        original = type(unit).forward
    setattr(unit, _NAME, UnitForward(unit, runner, original))


def restore_forward(unit: nn.Module) -> None:
    """Put a unit's own forward back."""
    current = vars(unit).get(_NAME)
    if isinstance(current, UnitForward):
        delattr(unit, _NAME)
        if isinstance(current.original, _OwnForward):
            setattr(unit, _NAME, current.original.function)


class _OwnForward:
    """A forward that a library has set on the instance, with the unit as an argument that it ignores."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        functools.update_wrapper(self, function, updated=())

    def __call__(self, unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def is_compiled(unit: nn.Module) -> bool:
    """Return True while a compiled forward stands in for the unit's own, whatever wraps the compiled one."""
    current: Any = vars(unit).get(_NAME)
    current = inspect.unwrap(current, stop=lambda function: isinstance(function, UnitForward))
    return isinstance(current, UnitForward) and current.compiled is not None
