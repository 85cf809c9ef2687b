"""Run one model unit by unit, and report on it: the object behind a model of the compile backend."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ort_zero import log
from ort_zero.compat import torch_compile
from ort_zero.compat.torch_modules import modules_of, named_modules_of
from ort_zero.compile import explain, sessions
from ort_zero.compile.deferred_logits import DeferringHead, is_head
from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.head_loss import ProductsOf
from ort_zero.compile.memory import MemoryBudget
from ort_zero.compile.records import ModelRecord
from ort_zero.compile.settings import Settings
from ort_zero.errors import ExportError
from ort_zero.statistics.collect import subscribed_model
from ort_zero.statistics.collect.graph_capture import mark_places
from ort_zero.units.agreement import Runner, agreement
from ort_zero.units.caches import leave_out_caches
from ort_zero.units.class_forward import ClassForward
from ort_zero.units.finding import Unit, find_units, multiplies
from ort_zero.units.unit_forward import UnitForward, is_compiled, replace_forward, restore_forward
from ort_zero.units.unit_trial import UnitTrial, UnitTrials

_MIN_SHARE = 0.5
"""Share of floating-point operations in ONNX Runtime below which a warning says so."""
_DIFFERENTIATED = "a backward was differentiated (create_graph=True), and compiled graphs have no second derivative"

_models: MutableMapping[nn.Module, CompiledModel] = WeakIdKeyDictionary()
"""The compiled models, each as long as the user's module lives; copies and pickles of the module do not hold them."""


class CompiledModel:
    """A model whose units run in ONNX Runtime; as :class:`ort_zero.backends.interface.RunningModel`.

    Args:
        module: the user's module.
        settings: how it runs.
        units: the units to compile.
        stage: ZeRO stage of the engine, 0 without one.
        raises: a compilation that fails raises, rather than leaving the unit in PyTorch.
        memory: what forwards may keep for backwards.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        units: Sequence[Unit],
        stage: int,
        raises: bool,
        memory: MemoryBudget | None = None,
    ):
        self._module = weakref.ref(module)
        self._fallback_reason: str | None = None
        self.announce: Any = None
        self.graph_recorder: Any = None
        self.stage = stage
        announce = weakref.WeakMethod(self._announce_model)  # Dynamo's graphs hold the record, and may outlive this
        self.record = ModelRecord(
            memory=memory or MemoryBudget(), on_first_step=lambda: (call := announce()) and call()
        )
        self.failures: dict[str, str] = {}
        self._raises = raises
        self._units = [(unit.path, weakref.ref(unit.module)) for unit in units]
        self._excluded = {unit.path: unit.excluded for unit in units}
        # libraries change classes later: fully_shard, parametrizations
        self._classes = {unit.path: type(unit.module).__name__ for unit in units}
        self._compiled: dict[Any, tuple[Callable[..., Any], ProductsOf]] = {}
        self._settings = settings
        self._trials = UnitTrials(agreement)
        self._slower: set[str] = set()
        """Paths of the units that were slower as a whole, compiled."""
        self._seen: MutableMapping[nn.Module, bool] = WeakIdKeyDictionary()
        for each in modules_of(module):
            self._seen[each] = True
        leave_out_caches(module)  # before the units: a model that is a unit itself stays compiled
        for unit in units:
            self._compile(unit)
        _models[module] = self
        if subscribed_model.subscribed_models_in(module):
            self.mark_units()

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
        for unit in self.unit_modules():
            forward = vars(unit).get("forward")
            if isinstance(forward, UnitForward):
                forward.is_suspended = wanted

    def unit_modules(self) -> list[nn.Module]:
        """Return the units that still live, in the order of ``named_modules``."""
        return [unit for _, reference in self._units if (unit := reference()) is not None]

    @property
    def call(self) -> Callable[..., Any]:
        """The forward of the user's module."""
        return self.module.forward

    @call.setter
    def call(self, function: Callable[..., Any]) -> None:
        self.module.forward = function

    def mark_units(self) -> None:
        """Mark the units, so that Dynamo captures the hooks of statistics in them."""
        for unit in self.unit_modules():
            mark_places(unit)

    def compile_again(self) -> None:
        """Have Dynamo trace the units anew: they have other hooks, or keep less for their backwards."""
        self._compiled.clear()
        self.record.are_stale = True
        for path, reference in self._units:
            unit = reference()
            if unit is not None and is_compiled(unit):
                self._compile(Unit(path, unit, self._excluded[path]))

    def _compile(self, unit: Unit) -> None:
        name = self._classes[unit.path]

        def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
            key = (function, unit.excluded)
            if key not in self._compiled:
                compiler = Compiler(self._settings, self.record, unit.excluded, name)
                noted = compiler.recompilations
                compiled = torch_compile.compile_function(
                    function, compiler, noted.note_guard_failure, noted.note_guards
                )
                in_ort = self._settings.place == "ort"
                self._compiled[key] = ClassForward(function, compiled, in_ort), compiler.products_of
            compiled, products_of = self._compiled[key]
            where = self._settings.loss_devices
            if not where or not is_head(unit.module):
                return compiled
            return DeferringHead(compiled, products_of, self.record.note_loss, where)

        reference = weakref.ref(self)

        def failed(error: Exception) -> None:
            model = reference()
            if model is not None:
                model.note_failure(unit.path, error)

        def differentiated() -> None:
            model = reference()
            if model is not None:
                model.note_second_derivative()

        record, trials = self.record, self._trials

        def trial_of(module: nn.Module, inputs: Any) -> UnitTrial | None:
            segments = record.placed_segments(name)
            if segments is None or is_head(module):
                return None
            trial = trials.of(module, inputs, segments)
            model = reference()
            if trial.runner is Runner.TORCH and model is not None:
                model.note_slower(unit.path)
            return trial

        # the loss that a head makes cheaper is not in the head's own time
        is_slower = (lambda: False) if is_head(unit.module) else functools.partial(record.goes_to_torch, name)
        replace_forward(unit.module, compile_function, failed, is_slower, differentiated, trial_of)

    def note_second_derivative(self) -> None:
        """Note that a backward of a unit is differentiated; PyTorch runs the model from now on.

        Raises:
            ExportError: the section has ``"fallback": "raise"``.
        """
        if self._raises:
            raise ExportError(f'{_DIFFERENTIATED}; set "fallback": "warn" to run the model in PyTorch')
        if self.fallback_reason is None:
            self.fallback_reason = _DIFFERENTIATED
            log.get_logger().warning("PyTorch runs %s: %s", type(self.module).__name__, _DIFFERENTIATED)

    def note_slower(self, path: str) -> None:
        """Note that PyTorch runs a unit from now on, since the compiled form of the unit is slower."""
        self._slower.add(path)
        name = self._classes[path]
        if all(each in self._slower for each, _ in self._units if self._classes[each] == name):
            self.record.units_in_torch.add(name)

    def note_failure(self, path: str, error: Exception) -> None:
        """Note that a unit could not be compiled; PyTorch runs the unit.

        Raises:
            ExportError: the section has ``"fallback": "raise"``.
        """
        cause = getattr(error, "inner_exception", error)  # Dynamo puts what a backend raises into a text of its own
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:400]
        if self._raises:
            raise ExportError(
                f'{path or "the model"} cannot be compiled: {reason}; exclude it, or set "fallback": "warn" to run '
                "it in PyTorch"
            ) from error
        self.failures[path] = reason
        log.get_logger().warning("%s runs in PyTorch on this rank: %s", path or "the model", reason)

    def after_step(self) -> None:
        """Announce the model after the engine's first step."""
        self.record.end_first_step()

    def _announce_model(self) -> None:
        explain.end_if_asked(self.record, self.status)
        chosen = self.record.memory.is_open and self.record.memory.choose()
        announce, self.announce = self.announce, None
        if announce is not None:
            announce(self)
        share = self.record.flop_share()
        if share is not None and share < _MIN_SHARE and self._settings.place == "ort":
            log.get_logger().warning(
                "ONNX Runtime runs %.0f %% of the floating-point operations of %s; ort-zero explain says why",
                100 * share,
                type(self.module).__name__,
            )
        if chosen:
            self.compile_again()

    def status(self) -> dict[str, Any]:
        """Return the model's entry in ``ort_zero.status()["models"]``, as plain values."""
        units = [(path, unit) for path, ref in self._units if (unit := ref()) is not None]
        compiled = self.record.as_dict()
        failures = {**self._uncaptured(), **self.failures, **self._added()}
        in_ort = compiled["segments"] - compiled["segments_in_torch"]
        return {
            "module": type(self.module).__name__,
            "engine": "compile",
            "backend": "onnxruntime" if in_ort else "torch" if self.record.graphs else "not called yet",
            "zero_stage": self.stage,
            "fallback_reason": self.fallback_reason,
            "fallbacks": len(failures) + (self.fallback_reason is not None),
            "units": [path for path, unit in units if is_compiled(unit)],
            "unit_classes": [type(unit).__name__ for _, unit in units],
            "failures": failures,
            "sessions": sessions.count(),
            "graph_runs": dict(self.record.runs),
            "graphs": {},
            "transitions": self.record.transitions(),
            "in_torch": compiled.pop("reasons"),
            "compiled": {**compiled, "settled": self._is_settled()},
            "memory": [self.record.memory.as_dict()],
        }

    def _is_settled(self) -> bool:
        """Return True once it is decided which runtime runs each segment, and which units go back to PyTorch."""
        can_go_back = self._settings.place == "measured" and self.record.memory.recompute == "off"
        waiting = [
            forward
            for unit in self.unit_modules()
            if isinstance(forward := vars(unit).get("forward"), UnitForward)
            and isinstance(forward.compiled, ClassForward)
            and can_go_back
            and not forward.is_settled
        ]
        return self.record.is_placed and not waiting

    def _uncaptured(self) -> dict[str, str]:
        """Return the units that Dynamo has been asked to compile, and of which it captured no graph."""
        captured = {graph.unit for graph in self.record.graphs}
        compiled = {path: getattr(getattr(unit(), "forward", None), "compiled", None) for path, unit in self._units}
        return {
            path: "Dynamo captured no graph of it"
            for path, forward in compiled.items()
            if isinstance(forward, ClassForward) and forward.has_run and self._classes[path] not in captured
        }

    def _added(self) -> dict[str, str]:
        """Return the new modules with weights of products that no unit holds, and why PyTorch runs them."""
        compiled = {id(each) for unit in self.unit_modules() for each in modules_of(unit)}
        return {
            path: "came into the model after it was compiled; ort_zero.wrap(model) once more compiles it"
            for path, each in (named_modules_of(self.module) if self.module is not None else ())
            if id(each) not in compiled and each not in self._seen and multiplies(each, below=False)
        }

    def memory_summary(self) -> Sequence[tuple[str, str]]:
        """Return what forwards keep for backwards, once the budget is chosen."""
        return self.record.memory.summary()


def _hooks_changed(root: nn.Module) -> None:
    parts = set(map(id, modules_of(root)))
    for model in list(_models.values()):
        if not parts.isdisjoint(map(id, model.unit_modules())):
            model.mark_units()
            model.compile_again()


subscribed_model.hooks_changed.append(_hooks_changed)


def compile_model(
    module: nn.Module,
    settings: Settings,
    *,
    stage: int = 0,
    exclude: Sequence[str] = (),
    max_elements: int | None = None,
    raises: bool = False,
    memory: MemoryBudget | None = None,
) -> tuple[CompiledModel, list[Unit]]:
    """Compile the units of a model in place, and return what runs the model, and the units.

    Args:
        module: the user's model; its units get compiled forwards.
        settings: how it runs.
        stage: ZeRO stage of the engine, 0 without one.
        exclude: glob patterns of module paths that stay in PyTorch.
        max_elements: the largest number of parameter elements of a unit.
        raises: a compilation that fails raises.
        memory: what forwards may keep for backwards.

    Raises:
        ConfigError: a pattern of `exclude` matches no module.
    """
    options: Any = {"stands_alone": is_head} if settings.loss_devices else {}
    units = find_units(module, exclude=exclude, max_elements=max_elements, **options)
    return CompiledModel(module, settings, units, stage, raises, memory), units
