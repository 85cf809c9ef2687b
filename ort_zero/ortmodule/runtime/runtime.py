"""Runs one user's module in ONNX Runtime: owns its graphs, its guards and its agreement with the other ranks.

:mod:`ort_zero.ortmodule.wrap` makes one :class:`Runtime` for each model; ORTModule's forward calls it. A forward
call goes through these steps, and those with (*) concern all ranks of the ZeRO group::

    call -> take arguments apart -> decide (guards.decide) -> (*) vote -> export, gradient graph, collectives, session
         -> (*) exchange of digests or errors, if a rank built anything -> run -> (*) check guards on values

Who does what: :mod:`.forward_call` carries out one call, :mod:`.rank_protocol` says what the ranks agree on and when,
:mod:`.graph_builder` builds graphs, :mod:`.status` reports.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ort_zero import env
from ort_zero.compat.deepspeed_parameters import is_partitioned
from ort_zero.config import OrtModuleConfig
from ort_zero.errors import DeviceError, ExportError, LayoutError, RankError
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.compat import torch_ddp
from ort_zero.ortmodule.recompute.block_recomputation import BlockRecomputation
from ort_zero.ortmodule.recompute.optimizer import MemoryOptimizer
from ort_zero.ortmodule.recompute.options import BLOCKS, OFF, RecomputeRequest
from ort_zero.ortmodule.recompute.peak_check import PeakCheck
from ort_zero.ortmodule.recompute.trial import Trial, TrialEndedError, TrialMonitor
from ort_zero.ortmodule.runtime import calls_in_torch, run_observer, status, whole_calls
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph
from ort_zero.ortmodule.runtime.calls_in_torch import CallsInTorch
from ort_zero.ortmodule.runtime.divided_model import divide, run_divided
from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.runtime.export.attribute_inputs import as_tensor, float_dtype
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.export_cache.store import AUTO, opened
from ort_zero.ortmodule.runtime.forward_call import ForwardCall
from ort_zero.ortmodule.runtime.graph_builder import GraphBuilder
from ort_zero.ortmodule.runtime.graph_processing import TRACE
from ort_zero.ortmodule.runtime.guards.attribute_guard import AttributeGuard
from ort_zero.ortmodule.runtime.guards.module_guard import ModuleGuard
from ort_zero.ortmodule.runtime.guards.value_guards import GuardFailures
from ort_zero.ortmodule.runtime.operators import torch_fallback
from ort_zero.ortmodule.runtime.rank_agreement import RankAgreement
from ort_zero.ortmodule.runtime.rank_protocol import Scope
from ort_zero.ortmodule.runtime.shared_exports import SharedExports
from ort_zero.ortmodule.runtime.submodule_graphs import SubmoduleGraphs, callable_parts
from ort_zero.ortmodule.runtime.transitions import GraphTransitionManager, TransitionHistory
from ort_zero.ortmodule.runtime.zero3 import gathered_weights
from ort_zero.ortmodule.runtime.zero3.gradient_sums import GradientSums
from ort_zero.ortmodule.runtime.zero3.kept_weights import KeptWeights
from ort_zero.ortmodule.statistics import reader_marks
from ort_zero.statistics.collect.subscribed_model import SubscribedModel, subscribed_models_in


class Runtime:
    """The state and the services with which one ORTModule under DeepSpeed runs.

    Args:
        module: the user's module.
        config: the section's ``ortmodule`` part.
        stage: ZeRO stage of the engine.
        memory_efficient_gradients: hand each gradient to its parameter the moment it exists, also below ZeRO-3.
        memory: the recomputation of activations that is asked for; None for none.
        trial: the trial of ``ort-zero memory plan`` that this process is part of; None outside of one.
        part_of: the runtime of the model that holds `module`, whose own forward runs in PyTorch; None for a model.

    Raises:
        ConfigError: a pattern of ``exclude`` matches nothing, or ``cache_dir`` cannot be written to.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: OrtModuleConfig,
        stage: int,
        memory_efficient_gradients: bool = False,
        memory: RecomputeRequest | None = None,
        trial: Trial | None = None,
        part_of: Runtime | None = None,
    ):
        self.module = module
        self._part_of = part_of
        self._divides = config.split == "auto" and config.fallback == "raise" and trial is None
        """Whether PyTorch runs the module's own code where no graph can hold it, and its submodules have graphs."""
        self._divides = self._divides and (memory is None or memory.mode in (OFF, BLOCKS))  # a budget is for the whole
        self._memory_request = memory
        self.submodule_graphs: SubmoduleGraphs | None = None
        """The graphs of the submodules, where the module's own code runs in PyTorch; None where it does not."""
        self.memory_efficient_gradients = memory_efficient_gradients
        self.config = config
        self.stage = stage
        self.in_step = True
        """Whether all ranks call the model at the same time; without an engine only DDP makes sure of it."""
        self.group: Any = None
        """Process group of the ranks that share the model; None for the default one."""
        self.kept_weights = KeptWeights()
        self.is_profiled: Callable[[], bool] = lambda: False
        """Whether DeepSpeed counts the operations of this step, which PyTorch runs then on all ranks."""
        self.ranks = RankAgreement(fallback=config.fallback == "warn" or self._divides)
        self.sums: GradientSums = part_of.sums if part_of is not None else GradientSums(self.ranks.agree_on_backward)
        self.fallback_reason: str | None = None
        """The reason why PyTorch runs the model; None while ONNX Runtime does."""
        self.excluded = ExcludedModules(module, config.exclude)
        self.excluded.divisible = self._divisible
        self.guard_failures = GuardFailures()
        self.slow_attributes: set[str] = set()
        """Warnings about attributes whose each new value is exported."""
        self.history = TransitionHistory()
        self._cache = opened(config.cache_dir)
        self.memory: MemoryOptimizer | BlockRecomputation | None = None
        if memory is not None and memory.mode == BLOCKS:
            self.memory = BlockRecomputation(memory, [reader_marks.MARK])
        elif memory is not None and memory.mode != OFF:
            named = config.cache_dir not in (None, AUTO)
            plans = Path(str(config.cache_dir)) if named else env.cache_dir() / "plans"
            self.memory = MemoryOptimizer(memory, plans, self.ranks.share_plan, walk=trial is not None)
        self._trial_monitor: TrialMonitor | None = trial.monitor(type(module).__name__) if trial is not None else None
        self.modes: dict[bool, GraphTransitionManager] = {}
        """The holder of the graphs with gradients (True) and of those without (False), in every mode of the module."""
        self.runs: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        """Number of completed session runs with gradients (True) and without, by ``"forward"`` and ``"backward"``."""
        self._module_guard: ModuleGuard | None = None
        self.attribute_guard = AttributeGuard(module)
        self._subscribed: list[SubscribedModel] = []
        """The subscribed models whose root is this module or lies below it, in this call."""
        self.graph_subscribers: list[SubscribedModel] = []
        """Those of the subscribed models with a subscriber that wants to see tensors of the graph in this call."""
        self.calls_in_torch: CallsInTorch = part_of.calls_in_torch if part_of is not None else CallsInTorch(module)
        self._parameters = pytree.parameters_of(module.forward)
        self.last_wanted_gradients = True
        """Whether the call that runs, or the last one, wants gradients; the module's own mode is another matter."""
        self.check_graph: Callable[[Runtime, BuiltGraph], None] | None = None
        """Called with this runtime and each graph that is about to run; may raise ExportError, so that it does not."""
        self.announce: Callable[[Runtime], None] | None = None
        """Called once with this runtime, when the first training graph has run or PyTorch takes over."""
        self.graph_recorder: Callable[[BuiltGraph], Callable[[], None]] | None = None
        """Called with each new graph before its first run; returns what is called after each half of a run."""

    # -- called by ORTModule ----------------------------------------------------------------------------------------

    def call(
        self, managers: Mapping[bool, ort_compat.Manager], args: tuple, kwargs: dict, run_in_torch: Callable[[], Any]
    ) -> Any:
        """Run a forward call; an error that is not the user's own becomes one clear error on all ranks.

        With ``"fallback": "warn"`` a graph that one rank cannot build makes all ranks run PyTorch from then on.
        """
        with calls_in_torch.expected():
            if not torch.is_inference_mode_enabled():
                return self._call(managers, args, kwargs, run_in_torch)
            # a trace in that mode does not know views from other tensors, and ZeRO's weights must not be made in it
            with torch.inference_mode(False), torch.no_grad():
                return self._call(managers, args, kwargs, run_in_torch)

    def _call(
        self, managers: Mapping[bool, ort_compat.Manager], args: tuple, kwargs: dict, run_in_torch: Callable[[], Any]
    ) -> Any:
        if self._trial_monitor is not None:
            self._trial_monitor.call()
        if self.fallback_reason is not None:
            return run_in_torch()
        if self.submodule_graphs is not None:
            return run_divided(self, self.submodule_graphs, run_in_torch)
        first, profiled = self._module_guard is None, self.is_profiled()
        why = whole_calls.reason_in_state(self.module, self.stage, first=first, profiled=profiled)
        if why is not None:
            return self._run_call_in_torch(run_in_torch, why)
        manager = managers[self.wants_gradients(args, kwargs)]
        self.last_wanted_gradients = manager.training
        alone = not self.in_step and not torch_ddp.in_forward()
        if self.stage != 3 and (self._part_of is not None or not self._guard().any_trainable()):
            alone = True  # there are no gradients to reduce, or the module's caller decides whether it is called
        self.ranks.begin(self.group, self.stage, manager.training, alone=alone)
        self._guard().follows_replaced = self.ranks.state.scope is not Scope.ALONE
        torch_fallback.take_failure()
        self._begin_step()
        transitions = self.find_mode(manager)
        transitions.begin_call()
        in_torch = functools.partial(self._run_call_in_torch, run_in_torch)
        collectives = self.stage == 3 or self.memory_efficient_gradients
        why_in_torch = None if collectives else whole_calls.reason_in_arguments(args, kwargs)
        if why_in_torch is not None and self.ranks.state.scope is Scope.ALONE:
            return in_torch(why_in_torch)
        call = ForwardCall(self, manager, transitions, in_torch, why_in_torch)
        try:
            with torch_fallback.memory_owners(self._memory_owner_of()):
                return call.run(args, kwargs)
        except TrialEndedError:
            raise
        except BaseException as error:
            clear, fall_back = call.failed(error)
            if self._trial_monitor is not None:
                self._trial_monitor.failed(clear)
            if not fall_back:
                if clear is error:
                    raise
                raise clear from error
        if self.config.fallback == "raise":
            return divide(self, clear, run_in_torch)
        return self._fall_back(str(clear), run_in_torch)

    def current(self, training: bool) -> BuiltGraph | None:
        """Return the graph of the last call with gradients (`training`) or without; None before the first one."""
        return self.modes[training].current if training in self.modes else None

    def run_module(self, module: torch.nn.Module, tensors: tuple) -> tuple[list[torch.Tensor], Any]:
        """Run the module for the exporter, on its arguments, put together."""
        builder = self.modes[self.last_wanted_gradients].builder
        assert builder.tracer is not None, "only an export runs the flattened module"
        before, started = builder.seconds.get(TRACE, 0.0), time.perf_counter()
        try:
            return builder.tracer.run_module(module, tensors)
        finally:
            builder.seconds[TRACE] = before + time.perf_counter() - started

    # -- called by the forward call ---------------------------------------------------------------------------------

    def find_mode(self, manager: ort_compat.Manager) -> GraphTransitionManager:
        """Return what holds the graphs of the manager's mode."""
        module_guard = self._guard()
        if manager.training not in self.modes:
            builder = GraphBuilder(
                self.module,
                self.config,
                manager,
                self.excluded,
                self.sums,
                self._cache,
                self.memory_efficient_gradients,
                self.memory,
                self.attribute_guard,
                SharedExports(self.graphs),
            )
            self.modes[manager.training] = GraphTransitionManager(
                builder, module_guard, self.attribute_guard, self.history, self.config.graph_cache_size
            )
        self.modes[manager.training].builder.processor.kept_weights = self.kept_weights
        manager.device = module_guard.device
        return self.modes[manager.training]

    def take_apart(
        self, manager: ort_compat.Manager, args: tuple, kwargs: dict, numbers: Collection[str] = ()
    ) -> pytree.Call:
        """Return the tensors of a call, and the structure of everything else.

        Args:
            manager: ORT's, of the mode.
            args: positional arguments.
            kwargs: keyword arguments.
            numbers: names of the arguments whose numbers are tensors without axes.

        Raises:
            DeviceError: a tensor is on another device than the module.
            TypeError: an argument has a type whose contents cannot be guarded.
        """
        device = manager.device
        dtype = float_dtype(self.module) if numbers else torch.float32

        def number_tensor(number: float) -> torch.Tensor:
            return as_tensor(number, dtype, device)

        call = pytree.flatten_call(args, kwargs, self._parameters, numbers, number_tensor)
        wanted = device.type
        for name, tensor in zip(call.names, call.tensors, strict=True):
            kind = tensor.device.type
            if kind == "meta" or (kind != wanted and wanted != "cpu"):
                raise DeviceError(
                    f"argument {name} is on device {tensor.device}, but the module is on {device}: move it there"
                )
        return call

    @property
    def trainable(self) -> bytes:
        """``requires_grad`` of each parameter, as the module guard last saw it."""
        return self._module_guard.trainable if self._module_guard is not None else b""

    def graphs(self) -> Iterator[BuiltGraph]:
        """Yield the graphs of all modes."""
        for mode in self.modes.values():
            yield from mode.graphs

    def operators_without_symbolic(self) -> dict[str, str]:
        """Return why an operator that has no working symbolic runs in PyTorch, by its name."""
        policies = (mode.builder.fallback_policy for mode in self.modes.values())
        return {name: why for policy in policies for name, why in policy.without_symbolic.items()}

    def observe_runs(self, graph: BuiltGraph) -> None:
        """Count the runs of a new graph, check their memory, and let them raise what a node raised."""
        self.calls_in_torch.follow()  # modules may have come
        device = self._module_guard.device if self._module_guard is not None else torch.device("cpu")
        check = None
        if graph.memory is not None and not sum(self.runs[True].values()):
            # later graphs find the arena grown already
            check = PeakCheck(graph.memory, type(self.module).__name__, device)
        trial_monitor = self._trial_monitor if self.last_wanted_gradients else None
        run_observer.observe(
            graph,
            self.runs[self.last_wanted_gradients],
            device=device,
            peak_check=check,
            trial_monitor=trial_monitor,
            seconds=self.history.completed[-1].steps,
            ran=self.graph_recorder(graph) if self.graph_recorder is not None else None,
        )

    def graph_is_ready(self, graph: BuiltGraph) -> None:
        """Note that a graph is about to run.

        Raises:
            TrialEndedError: ``ort-zero memory plan`` wants to know nothing more.
            ExportError: :attr:`check_graph` does not let it run.
        """
        if self.check_graph is not None:
            self.check_graph(self, graph)
        if self._trial_monitor is not None:
            self._trial_monitor.built(self.last_wanted_gradients, graph.memory)

    def end_call(self, graph: BuiltGraph, result: Any, args: tuple, kwargs: dict) -> None:
        """Show subscribers what the call was given and returned; announce what runs after the first training graph."""
        if self.announce is not None and self.last_wanted_gradients:
            self._announce()
        for readers in graph.exported.readers:
            readers.show_arguments(args, kwargs)
        for model in self._subscribed:
            model.end_step(result)

    def note_second_order(self) -> None:
        """Note that PyTorch computes gradients that are to be differentiated themselves."""
        self.calls_in_torch.note_second_order()

    def takes_over(self, error: BaseException, building: bool) -> bool:
        """Return whether PyTorch may run the module, or its own code, after an error.

        Args:
            error: what is to be raised otherwise.
            building: whether a graph was being made.
        """
        if self.config.fallback == "warn":
            return isinstance(error, (ExportError, RankError))
        if not self._divides or self.check_graph is not None:
            return False
        if self._part_of is None and not callable_parts(self.module, self.excluded.reasons):
            return False  # nothing would run in ONNX Runtime
        if isinstance(error, RankError):
            return True  # if that rank wants so as well
        divides = building or self._part_of is not None or isinstance(error, LayoutError)
        return isinstance(error, ExportError) and not error.concerns_parts and divides

    # -- reports ----------------------------------------------------------------------------------------------------

    def memory_summary(self) -> list[tuple[str, str]]:
        """Return what the newest training graph computes again, and what that brings, line by line."""
        return status.memory_summary(self.memory)

    def after_step(self) -> None:
        """Note nothing: the first run of a graph announces the model."""

    def status(self) -> dict[str, Any]:
        """Return what runs and why, as plain values."""
        return status.report(
            self.module,
            stage=self.stage,
            fallback_reason=self.fallback_reason,
            excluded=self.excluded,
            modes=self.modes,
            runs=self.runs,
            transitions=self.history.completed,
            memory=self.memory,
            called_in_torch=self.calls_in_torch.methods if self._part_of is None else {},
            submodule_graphs=self.submodule_graphs,
        )

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _guard(self) -> ModuleGuard:
        """Return the guard of the module; it begins with the first call."""
        if self._module_guard is None:
            self._module_guard = ModuleGuard(self.module)
        return self._module_guard

    def wants_gradients(self, args: tuple, kwargs: dict) -> bool:
        """Return whether autograd would record this call: the mode of the module has no part in it."""
        if not torch.is_grad_enabled():
            return False
        if self._guard().any_trainable():
            return True
        try:
            tensors = pytree.flatten_call(args, kwargs, self._parameters).tensors
        except TypeError:
            return False  # the call itself raises it, for all ranks
        return any(tensor.requires_grad for tensor in tensors)

    def _run_call_in_torch(self, run_in_torch: Callable[[], Any], why: str) -> Any:
        """Run a single call in PyTorch, for a reason that :mod:`.calls_in_torch` knows."""
        self.forget_step()
        self.calls_in_torch.note_whole_call(why)
        return run_in_torch()

    def _begin_step(self) -> None:
        self._subscribed = subscribed_models_in(self.module)
        for model in self._subscribed:
            model.begin_step("onnxruntime")
        self.graph_subscribers = [
            model for model in self._subscribed if any(one.acts_on_tensors() for one in model.active)
        ]

    def _fall_back(self, reason: str, run_in_torch: Callable[[], Any]) -> Any:
        """Run this call and all later ones in PyTorch."""
        self.fallback_reason = reason
        self.forget_step()
        get_logger().warning("running in PyTorch: %s", reason)
        self._announce()
        return run_in_torch()

    def has_run(self) -> bool:
        """Return whether ONNX Runtime has run the module, or a part of it."""
        parts = self.submodule_graphs.parts.values() if self.submodule_graphs is not None else ()
        return any(count.total() for count in self.runs.values()) or any(part.has_run() for part in parts)

    @property
    def is_part(self) -> bool:
        """Whether the module is a submodule of a model whose own forward runs in PyTorch."""
        return self._part_of is not None

    def runtime_of_part(self, module: torch.nn.Module, config: OrtModuleConfig) -> Runtime:
        """Return the runtime of a submodule, which shares the sums of gradients and the counts of calls."""
        part = Runtime(module, config, self.stage, self.memory_efficient_gradients, self._memory_request, part_of=self)
        part.group, part.in_step, part.kept_weights = self.group, self.in_step, self.kept_weights
        return part

    def _divisible(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """Return what in `module` may have graphs of its own, if the graph that is being built is given up for them."""
        ranks = self.ranks.state
        if not self._divides or self.check_graph is not None or not ranks.builds or ranks.scope is Scope.EVERY_CALL:
            return []
        return [part for _, part in callable_parts(module)]

    def forget_step(self) -> None:
        """Let PyTorch begin the step of the subscribers anew."""
        for model in self._subscribed:
            model.step -= 1

    def announce_gradients(self) -> None:
        """Announce what runs, once, if it has run with gradients."""
        wanted_gradients = torch.is_grad_enabled() and self._guard().any_trainable()
        if self.announce is not None and wanted_gradients and self.has_run():
            self._announce()

    def _announce(self) -> None:
        """Call :attr:`announce`, once; an error in it is no reason to end a training."""
        announce, self.announce = self.announce, None
        try:
            if announce is not None:
                announce(self)
        except Exception:
            get_logger().debug("no summary", exc_info=True)

    def _memory_owner_of(self) -> Callable[[torch.Tensor], Any]:
        """Return a function that finds the weight behind a tensor, for nodes that run in PyTorch.

        See :func:`ort_zero.ortmodule.runtime.operators.torch_fallback.memory_owners`.
        """
        here: set[int] = set()

        def owner_of(tensor: torch.Tensor) -> Any:
            if any(graph.executor is not None and graph.executor.plan.gathers_weights for graph in self.graphs()):
                return gathered_weights.weight_at(tensor)
            if not here:
                for parameter in self.module.parameters():
                    if not is_partitioned(parameter):
                        # ZeRO-1 and 2 lay weights into one storage; for ORT's tensors each begins one of its own
                        here.update((parameter.untyped_storage().data_ptr(), parameter.data_ptr()))
            return torch_fallback.PERSISTENT if tensor.untyped_storage().data_ptr() in here else None

        return owner_of
