"""Run one model unit by unit, and report on it: the object behind a model whose units an engine runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, MutableMapping, Sequence
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ort_zero import log
from ort_zero.compat import torch_compile
from ort_zero.compat.torch_compile import saves_plainly, tensors_in
from ort_zero.compat.torch_modules import modules_of, named_modules_of
from ort_zero.errors import ExportError
from ort_zero.runtimes import registry
from ort_zero.runtimes.agreement import agreement
from ort_zero.runtimes.clocks import clock_of
from ort_zero.runtimes.runner import Runner
from ort_zero.runtimes.unit_trial import UnitTrial, sizes_of, start_key, trial_key
from ort_zero.units.caches import has_cache, leave_out_caches, without_cache
from ort_zero.units.class_forward import ClassForward
from ort_zero.units.engine import Engine, GraphCompiler
from ort_zero.units.finding import Unit, multiplies
from ort_zero.units.unit_forward import UnitForward, UnitRunner, is_compiled, replace_forward, restore_forward

_DIFFERENTIATED = "a backward was differentiated (create_graph=True), and compiled graphs have no second derivative"

_models: MutableMapping[nn.Module, UnitsModel] = WeakIdKeyDictionary()
"""The compiled models, each as long as the user's module lives; copies and pickles of the module do not hold them."""


class UnitsModel:
    """A model whose units run in ONNX Runtime.

    Args:
        stage: ZeRO stage of the engine, 0 without one.
        raises: a compilation that fails raises, rather than leaving the unit in PyTorch.
    """

    def __init__(self, module: nn.Module, engine: Engine[Any], units: Sequence[Unit], stage: int, raises: bool):
        self._module = weakref.ref(module)
        self.engine = engine
        self._fallback_reason: str | None = None
        self.announce: Callable[[UnitsModel], None] | None = None
        """Called with this object after its first step, and once it is settled later where all runs."""
        self.stage = stage
        self._is_announced = False
        after_step = weakref.WeakMethod(self._after_step)  # Dynamo's graphs hold the engine, and may outlive this
        engine.on_step = lambda: (call := after_step()) is None or call()
        self.failures: dict[str, str] = {}
        self.raises = raises
        self.units = [RunningUnit(unit) for unit in units]
        self.compiled: dict[Any, tuple[ClassForward, GraphCompiler]] = {}
        self.trials: dict[str, UnitTrial] = {}
        self.started: dict[str, dict[Any, bool]] = {}
        """Whether units are compiled, by class and sizes: first the smallest and the largest one of each class."""
        self._seen: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()
        for each in modules_of(module):
            self._seen[each] = True
        leave_out_caches(module)  # before the units, since one of them may be the model itself
        for unit in self.units:
            replace_forward(unit.reference(), EngineRunner(self, unit))
        _models[module] = self

    @property
    def module(self) -> Any:
        """The user's module; None once it has been freed."""
        return self._module()

    @property
    def fallback_reason(self) -> str | None:
        """Why PyTorch runs the whole model; setting a reason gives the units their own forwards back."""
        return self._fallback_reason

    @fallback_reason.setter
    def fallback_reason(self, reason: str | None) -> None:
        self._fallback_reason = reason
        for unit in self.unit_modules():
            restore_forward(unit)

    def suspend(self, wanted: bool) -> None:
        """Have PyTorch run the units while `wanted`, as in the step that DeepSpeed's flops profiler counts."""
        for _, forward in self._forwards():
            forward.is_suspended = wanted

    def _living(self) -> list[tuple[RunningUnit, nn.Module]]:
        """Return the units that still live, in the order of ``named_modules``, with their modules."""
        return [(unit, module) for unit in self.units if (module := unit.reference()) is not None]

    def _forwards(self) -> list[tuple[RunningUnit, UnitForward]]:
        """Return the living units whose own forwards are replaced, with the forwards in their place."""
        pairs = [(unit, getattr(module, "forward", None)) for unit, module in self._living()]
        return [(unit, forward) for unit, forward in pairs if isinstance(forward, UnitForward)]

    def unit_modules(self) -> list[nn.Module]:
        """Return the units that still live, in the order of ``named_modules``."""
        return [module for _, module in self._living()]

    def compile_again(self) -> None:
        """Have Dynamo trace the units anew: they have other hooks, or keep less for their backwards."""
        self.compiled.clear()
        self.engine.is_stale = True
        for unit, module in self._living():
            if is_compiled(module):
                replace_forward(module, EngineRunner(self, unit))

    def _after_step(self) -> bool:
        """Announce the model after the first step, and once it is settled where all runs; return whether it is."""
        is_first, self._is_announced = not self._is_announced, True
        is_settled = self.engine.is_settled(self._units_are_settled())
        for call in registry.after_step:
            call(self, is_settled)
        must_compile_again = is_first and self.engine.after_first_step(type(self.module).__name__)
        if self.announce is not None and (is_first or is_settled):
            self.announce(self)
        if must_compile_again:
            self.compile_again()
        return is_settled

    def _units_are_settled(self) -> bool:
        """Return True once it is decided which units go back to PyTorch since they are slower."""
        return all(forward.is_settled for _, forward in self._forwards() if isinstance(forward.compiled, ClassForward))

    def status(self) -> dict[str, Any]:
        """Return the model's entry in ``ort_zero.status()["models"]``, as plain values."""
        units = [(unit.path, module) for unit, module in self._living()]
        not_captured = self._not_captured()
        failures = {**not_captured, **self.failures, **self._added()}
        return {
            "module": type(self.module).__name__,
            "engine": self.engine.name,
            "zero_stage": self.stage,
            "fallback_reason": self.fallback_reason,
            "fallbacks": len(failures) + (self.fallback_reason is not None),
            "units": [path for path, unit in units if is_compiled(unit)],
            "unit_classes": [type(unit).__name__ for _, unit in units],
            "failures": failures,
            "graph_runs": dict(self.engine.runs),
            "transitions": self.engine.transitions(),
            "runners": self._runners(not_captured),
            **self.engine.status(self._units_are_settled()),
        }

    def _not_captured(self) -> dict[str, str]:
        """Return the units that Dynamo has captured no graph of, or none with gradients, and so PyTorch trains them."""
        compiled = [(unit, each.compiled) for unit, each in self._forwards() if isinstance(each.compiled, ClassForward)]
        captured = {graph.unit for graph in self.engine.graphs}
        trained = {graph.unit for graph in self.engine.graphs if graph.direction != "inference"}
        return {
            unit.path: "Dynamo captured no graph of it, as of a module that checkpoints its own calls"
            for unit, of_class in compiled
            if (of_class.has_run and unit.unit_class not in captured)
            or (of_class.has_trained and unit.unit_class not in trained)
        }

    def _runners(self, not_captured: Container[str]) -> dict[str, Any]:
        """Return by class of units how many of them each runner runs, and the times of a forward and a backward."""
        classes: dict[str, Any] = {}
        for unit, module in self._living():
            runner = Runner.TORCH
            if is_compiled(module) and unit.path not in not_captured:
                decided = unit.trial.runner if unit.trial is not None else None
                runner = decided or self.engine.first_runner
            of_class = classes.setdefault(unit.unit_class, {"units": {}, "ms": {}})
            of_class["units"][runner.value] = of_class["units"].get(runner.value, 0) + 1
            of_class["ms"].update(unit.trial.milliseconds if unit.trial is not None else {})
        return classes

    def _added(self) -> dict[str, str]:
        """Return the new modules with weights of products that no unit holds, and why PyTorch runs them."""
        compiled = {id(each) for unit in self.unit_modules() for each in modules_of(unit)}
        return {
            path: "came into the model after it was compiled; ort_zero.wrap(model) once more compiles it"
            for path, each in (named_modules_of(self.module) if self.module is not None else ())
            if id(each) not in compiled and each not in self._seen and multiplies(each, below=False)
        }


class RunningUnit:
    """What a model notes of one unit."""

    def __init__(self, unit: Unit):
        self.path, self.exclude = unit.path, unit.excluded
        self.reference: Any = weakref.ref(unit.module)
        self.unit_class = type(unit.module).__name__  # libraries change it later: fully_shard, parametrizations
        self.trial: UnitTrial | None = None
        """The trial that decides what runs the unit; None before the unit is timed."""


class EngineRunner(UnitRunner):
    """Compiles one unit by the engine of a model, and decides when PyTorch runs the unit.

    The model does not hold it, so that both are freed without a collection.
    """

    def __init__(self, model: UnitsModel, unit: RunningUnit):
        self._model, self._unit = model, unit
        self.graph_node = model.engine.graph_node

    def form(self, unit: nn.Module, function: Callable[..., Any], runner: Runner | None = None) -> Callable[..., Any]:
        engine, compiled = self._model.engine, self._model.compiled
        if has_cache(unit):
            function = without_cache(function)
        runner = runner or engine.first_runner
        key = function, self._unit.exclude, runner
        if key not in compiled:
            compiler = engine.compiler(self._unit.unit_class, self._unit.exclude, runner)
            noted = compiler.recompilations
            run = torch_compile.compile_function(function, compiler, noted.note_guard_failure, noted.note_guards)
            compiled[key] = ClassForward(function, run, engine.compiles_evaluations), compiler
        of_class, compiler = compiled[key]
        return compiler.forward_of(unit, of_class)

    def failed(self, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)  # Dynamo puts what a backend raises into a text of its own
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:400]
        if self._model.raises:
            raise ExportError(
                f'{self._unit.path or "the model"} cannot be compiled: {reason}; exclude it, or set "fallback": '
                '"warn" to run it in PyTorch'
            ) from error
        self._model.failures[self._unit.path] = reason
        log.get_logger().warning("%s runs in PyTorch on this rank: %s", self._unit.path or "the model", reason)

    def differentiated(self) -> None:
        if self._model.raises:
            raise ExportError(f'{_DIFFERENTIATED}; set "fallback": "warn" to run the model in PyTorch')
        if self._model.fallback_reason is None:
            self._model.fallback_reason = _DIFFERENTIATED
            log.get_logger().warning("PyTorch runs %s: %s", type(self._model.module).__name__, _DIFFERENTIATED)

    def goes_to_torch(self, unit: nn.Module) -> bool:
        return self._model.engine.goes_to_torch(unit, self._unit.unit_class)

    def _start_key(self, unit: nn.Module, inputs: Any) -> str | None:
        """Return the key under which it is kept what runs the unit; None where all is to be compiled."""
        tensors = tensors_in(inputs)
        if not tensors or not self._model.engine.starts_as_kept:
            return None
        return start_key(unit, inputs, self._model.engine.runners_on(tensors[0].device))

    def starts_in(self, unit: nn.Module, inputs: Any) -> Runner | None:
        model, unit_class, key = self._model, self._unit.unit_class, self._start_key(unit, inputs)
        if key is None:
            return model.engine.first_runner
        if (kept := agreement().placement(key)) is not None:
            if kept[0] is not Runner.TORCH:
                self._unit.trial = UnitTrial(key, agreement())
                self._say_runs(self._unit.trial)
            elif not any(is_compiled(each) for each in self._units_alike() if each is not unit):
                model.engine.leave_to(Runner.TORCH, unit_class, "it was faster at an earlier start")
            return kept[0]
        if unit_class not in model.started:
            of_class = sorted(map(sizes_of, self._units_alike()))
            model.started[unit_class] = {of_class[0]: False, of_class[-1]: False}
        started, sizes = model.started[unit_class], sizes_of(unit)
        if sizes in started or not saves_plainly():
            started[sizes] = True
            return model.engine.first_runner
        if not (all(started.values()) and model.engine.is_tried(unit, unit_class)):
            return None
        if self.goes_to_torch(unit):
            self.keep(unit, inputs, Runner.TORCH)
            return Runner.TORCH
        started.update(dict.fromkeys(map(sizes_of, self._units_alike()), True))
        return model.engine.first_runner

    def _units_alike(self) -> list[nn.Module]:
        """Return the living units of this unit's class."""
        units = (each.reference() for each in self._model.units if each.unit_class == self._unit.unit_class)
        return [unit for unit in units if unit is not None]

    def keep(self, unit: nn.Module, inputs: Any, runner: Runner, gain: float = 0.0) -> None:
        engine = self._model.engine
        is_kept = runner is not engine.first_runner and not engine.has_failed(self._unit.unit_class)
        if is_kept and (key := self._start_key(unit, inputs)) is not None:
            agreement().keep(key, runner, gain)

    def gone_to_torch(self) -> None:
        engine = self._model.engine  # it may be the last unit, and then no graph's run ends the step
        engine.call_on_step(not any(map(is_compiled, self._model.unit_modules())))

    def trial_of(self, unit: nn.Module, inputs: Any) -> UnitTrial | None:
        model, unit_class, trial = self._model, self._unit.unit_class, self._unit.trial
        engine = model.engine
        tensors = tensors_in(inputs)
        if trial is None or trial.key in model.trials:  # else the unit has started as kept
            graphs = engine.timed_keys(unit, unit_class)
            if graphs is None or not tensors:
                return None
            device = tensors[0].device
            runners = engine.runners_on(device)
            key = trial_key(unit, inputs, runners, graphs)
            if key not in model.trials:
                model.trials[key] = UnitTrial(key, agreement(), runners, clock_of(device), engine.slowdown)
            trial = self._unit.trial = model.trials[key]
        for runner, reason in engine.lost(unit_class).items():
            trial.leave_out(runner, reason)
        self._say_runs(trial)
        return trial

    def _say_runs(self, trial: UnitTrial) -> None:
        """Say what runs the unit, and all units of its class, unless it is what runs them at first."""
        engine, unit_class = self._model.engine, self._unit.unit_class
        if trial.runner is not None and trial.runner is not engine.first_runner:
            engine.say_runs(trial.runner, unit_class, f"{unit_class} {self._unit.path} and its equals", trial.reason)
            trials = [each.trial for each in self._model.units if each.unit_class == unit_class]
            if all(each is not None and each.runner is trial.runner for each in trials):
                engine.leave_to(trial.runner, unit_class, trial.reason)
