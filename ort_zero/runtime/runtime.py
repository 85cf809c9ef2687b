"""One ORTModule under DeepSpeed: its calls, what ranks tell each other about them, and what has run.

A forward call of a rank goes through these steps; those with (*) concern all ranks of the ZeRO group::

    call -> take apart -> decide (graph.transitions) -> (*) vote -> export, gradient graph, bridge, session
         -> (*) exchange of digests or errors, if a rank built anything -> run: gathers, reduces

Under ZeRO-3 every call votes, since a rank that exports while another one gathers would hang both. Below ZeRO-3 the
graph has no collectives: only the first training graph is agreed on, so that an export that fails on one rank stops
all of them.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ort_zero import env
from ort_zero.compat import ortmodule as ort_compat
from ort_zero.compat.deepspeed_parameters import is_partitioned
from ort_zero.compat.torch_onnx import Unexportable
from ort_zero.compat.tracing import ValueReadError
from ort_zero.config import OrtModuleConfig
from ort_zero.distributed import collectives
from ort_zero.errors import BridgeError, ExportError, RankError
from ort_zero.log import get_logger
from ort_zero.recompute.optimizer import MemoryOptimizer
from ort_zero.recompute.options import OFF, Request
from ort_zero.recompute.peak_check import PeakCheck
from ort_zero.recompute.planning_session import EndedError, Watch
from ort_zero.recompute.planning_session import Session as MemorySession
from ort_zero.runtime.built_graph import Graph
from ort_zero.runtime.error_messages import explain
from ort_zero.runtime.export import pytree
from ort_zero.runtime.export.excluded_modules import KeptInTorch
from ort_zero.runtime.export_cache.store import ExportCache
from ort_zero.runtime.graph_builder import Builder
from ort_zero.runtime.guards.keys import Action, Transition
from ort_zero.runtime.guards.module_guard import ModelWatch
from ort_zero.runtime.operators import torch_fallback
from ort_zero.runtime.transitions import GraphTransitionManager, History, counted
from ort_zero.runtime.zero3 import gather_reduce
from ort_zero.statistics.collect.subscriber_manager import Session, sessions_of

GUARD_FAILURES = 3
"""So often a graph is made again because a value changed that Python code reads; then its module stays in PyTorch."""
REUSE, BUILD = 0, 1
"""What a rank votes for."""


class GuardFailedError(BaseException):
    """A graph does not hold for this call; not an Exception, so that no handler of an Exception takes it."""

    def __init__(self, read: ValueReadError):
        super().__init__(str(read))
        self.read = read


class Runtime:
    """The seams of one ORTModule.

    Args:
        module: the user's module.
        config: the section's ``ortmodule`` part.
        stage: ZeRO stage of the engine.
        memory_efficient_gradients: hand each gradient to its parameter the moment it exists, also below ZeRO-3.
        memory: what of the activations is to be computed again.
        session: of ``ort-zero memory plan``, which looks at some steps.

    Raises:
        ConfigError: a pattern of ``exclude`` matches nothing, or ``cache_dir`` cannot be written to.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: OrtModuleConfig,
        stage: int,
        memory_efficient_gradients: bool = False,
        memory: Request | None = None,
        session: MemorySession | None = None,
    ):
        self.module = module
        self.memory_efficient_gradients = memory_efficient_gradients
        self.config = config
        self.stage = stage
        self.group: Any = None
        self.prefetch_elements = 0
        self.sums = gather_reduce.Sums(self._agree_on_backward)
        self.fallback_reason: str | None = None
        self.kept = KeptInTorch(module, config.exclude)
        self.history = History()
        self._cache = ExportCache(config.cache_dir) if config.cache_dir is not None else None
        self.memory: MemoryOptimizer | None = None
        if memory is not None and memory.mode != OFF:
            plans = Path(config.cache_dir) if config.cache_dir is not None else env.cache_dir() / "plans"
            self.memory = MemoryOptimizer(memory, plans, self._on_first_rank, walk=session is not None)
        self._looked_at: Watch | None = session.watch(type(module).__name__) if session is not None else None
        self.modes: dict[bool, GraphTransitionManager] = {}
        """Whether for training, to what holds the graphs."""
        self.runs: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        """Completed runs of sessions, by ``"forward"`` and ``"backward"``."""
        self._watch: ModelWatch | None = None
        self._sessions: list[Session] = []
        """Those who subscribed to this module or a part of it, in this call."""
        self._watching: list[Session] = []
        """Those of them who want to see tensors in this call."""
        self._parameters = pytree.parameters_of(module.forward)
        self._guard_failures: Counter = Counter()
        self._agreed_once = False
        self._several = False
        self._training = True
        """Whether the call that runs wants gradients; the module's own mode is another matter."""
        self._must_vote = self._must_exchange = self._building = False
        self._new: Graph | None = None
        """The graph that this call has made."""
        self._forced: str | None = None
        """Why the graph of this call does not hold, although it fits."""
        self._reasons: tuple[str, ...] = ()
        """Of the transition of this call."""
        self.announce: Callable[[Runtime], None] | None = None
        """Called once with this runtime, when the first training graph has run or PyTorch takes over."""

    def call(self, manager: ort_compat.Manager, args: tuple, kwargs: dict, run_in_torch: Callable[[], Any]) -> Any:
        """Run a forward call; an error that is not the user's own becomes one clear error on all ranks.

        With ``"fallback": "warn"`` a graph that one rank cannot build makes all ranks run PyTorch from then on.
        """
        if self._looked_at is not None:
            self._looked_at.call()
        self._must_exchange = self._building = False
        self._new = None
        self._forced = None
        self._training = manager.training
        if self.fallback_reason is not None:
            return run_in_torch()
        self._several = collectives.world_size(self.group) > 1
        self._must_vote = self._several and (self.stage == 3 or (manager.training and not self._agreed_once))
        torch_fallback.take_failure()
        self._begin_step()
        transitions = self.find_mode(manager)
        transitions.calls += 1
        try:
            # before the vote: a rank that fails after it leaves the others alone with their collectives
            call = self.take_apart(manager, args, kwargs)
            while True:
                # ranks that build the same graph learn the same, or wait for this one
                try:
                    with torch_fallback.sources(self._sources()):
                        graph = self._graph_for(transitions, call)
                        if self._looked_at is not None:
                            self._looked_at.built(self._training, graph.memory)
                        result = self._run(manager, graph, call)
                        if self.announce is not None and manager.training:
                            self._announce()
                        return self._end_step(graph, result, args, kwargs)
                except ValueReadError as read:
                    self._keep_in_torch(read)
                except Unexportable as why:
                    self._keep_in_torch(ValueReadError(self.kept.module_at(why.path), "calls an operator", str(why)))
                except GuardFailedError as failed:
                    self._guard_failed(failed.read)
                except Exception as error:
                    if not self._building or not transitions.builder.routes.learn(str(error)):
                        raise
                    self._forced = str(error).splitlines()[0]
        except EndedError:
            raise
        except BaseException as error:
            clear: BaseException = self._failed(transitions, error)
            if self._looked_at is not None:
                self._looked_at.failed(clear)
            if self.config.fallback != "warn" or not isinstance(clear, (ExportError, RankError)):
                if clear is error:
                    raise
                raise clear from error
        self.fallback_reason = str(clear)
        for session in self._sessions:
            session.step -= 1  # PyTorch begins it anew
        get_logger().warning("running in PyTorch: %s", self.fallback_reason)
        self._announce()
        return run_in_torch()

    def run_module(self, module: torch.nn.Module, tensors: tuple) -> tuple[list[torch.Tensor], Any]:
        """Run the module for the exporter, on its arguments, put together."""
        return self.modes[self._training].builder.tracer.run_module(module, tensors)

    # -- one call ---------------------------------------------------------------------------------------------------

    def find_mode(self, manager: ort_compat.Manager) -> GraphTransitionManager:
        """Return what holds the graphs of the manager's mode."""
        if self._watch is None:
            self._watch = ModelWatch(self.module)
        if manager.training not in self.modes:
            builder = Builder(
                self.module,
                self.config,
                manager,
                self.kept,
                self.sums,
                self._cache,
                self.memory_efficient_gradients,
                self.memory,
            )
            self.modes[manager.training] = GraphTransitionManager(
                builder, self._watch, self.history, self.config.graph_cache_size
            )
        self.modes[manager.training].builder.prefetch_elements = self.prefetch_elements
        manager.device = self._watch.device
        return self.modes[manager.training]

    def take_apart(self, manager: ort_compat.Manager, args: tuple, kwargs: dict) -> pytree.Call:
        """Return the tensors of a call, and the structure of everything else."""
        call = pytree.flatten_call(args, kwargs, self._parameters)
        device = manager.device
        wanted = device.type
        for name, tensor in zip(call.names, call.tensors, strict=True):
            kind = tensor.device.type
            if kind == "meta" or (kind != wanted and wanted != "cpu"):
                raise ExportError(
                    f"argument {name} is on device {tensor.device}, but the module is on {device}: move it there"
                )
        return call

    def _graph_for(self, transitions: GraphTransitionManager, call: pytree.Call) -> Graph:
        """Return the graph that runs a call. All ranks under ZeRO-3, and for the first training graph."""
        observed = transitions.observe(call, self._watching)
        transition = transitions.check(observed)
        if self._forced is not None:
            transition = Transition(Action.EXPORT, (self._forced,), forced=True)
            self._must_exchange = self._must_exchange or (self._several and self.stage == 3)
            self._forced = None
        if self._must_vote:
            self._vote(transitions, transition)
        self._building, self._new = transition.action.builds, None
        self._reasons = transition.reasons
        graph = transitions.enter(transition, observed, call, self._watching)
        if self._building:
            self._new = graph
            self._guard_runs(graph)
        if self._must_exchange:
            self._exchange(graph.digest, None)
            self._agreed_once = True
        return graph

    def _vote(self, transitions: GraphTransitionManager, transition: Transition) -> None:
        """Learn what the other ranks are about to do. All ranks."""
        code = BUILD if transition.action.builds else REUSE
        ready = next((g for g in transitions.graphs if g.known.number == transition.graph), None)
        digest = zlib.crc32(ready.digest.encode()) if ready is not None and code == REUSE else 0
        votes = collectives.votes(code, zlib.crc32(self._watch.trainable), self.group, digest)
        self._must_vote = False
        if any(vote.code == collectives.FAILED for vote in votes):
            collectives.raise_if_others_failed(collectives.exchange(None, self.group), "preparing the inputs")
        odd = [rank for rank, vote in enumerate(votes) if vote.digest != votes[0].digest]
        if odd:
            raise ExportError(
                f"ranks {odd} have other parameters frozen than rank 0, so their gradients could not be reduced "
                "together: set requires_grad alike on every rank"
            )
        self._must_exchange = any(vote.code == BUILD for vote in votes)
        if not self._must_exchange and self.stage == 3:
            self._refuse_mixed([vote.graph for vote in votes])

    def _run(self, manager: ort_compat.Manager, graph: Graph, call: pytree.Call) -> Any:
        """Run a graph, do what the module does besides returning a result, and return that."""
        inputs = graph.info.construct_inputs(dict(zip(call.names, call.tensors, strict=True)))
        tensors = manager.run(graph.session, inputs)
        effects = graph.effects
        more = tensors[effects.results :]
        guarded = len(effects.changed) + len(effects.guards)  # behind them there may be a token
        self._check_guards(effects.guards, more[len(effects.changed) : guarded])
        with torch.no_grad():
            for i, value in zip(effects.changed, more, strict=False):
                call.tensors[i].copy_(value)
            for module in effects.counting:
                module.num_batches_tracked.add_(1)  # an update in place that the exporter leaves out
        return graph.info.restore_outputs(tensors, call.objects)

    def _check_guards(self, guards: list[tuple[list, ValueReadError]], tensors: Any) -> None:
        """Raise unless Python would take the values that it took when the graph was made. All ranks under ZeRO-3."""
        if not guards:
            return
        same = [value == now.tolist() for (value, _), now in zip(guards, tensors, strict=True)]
        failed = -1 if all(same) else same.index(False)
        if self.stage == 3 and self._several:
            # one answer for all: each rank counts how often a guard has failed
            failed = max(vote.digest for vote in collectives.votes(REUSE, failed, self.group))
        if failed >= 0:
            raise GuardFailedError(guards[failed][1])

    def _guard_runs(self, graph: Graph) -> None:
        """Count the runs of a new graph, and raise what a node of it raised rather than ORT's words about it."""
        table, runs = graph.table, self.runs[self._training]
        check = None
        if graph.memory is not None and not sum(self.runs[True].values()):
            # later graphs find the arena grown already
            check = PeakCheck(graph.memory, type(self.module).__name__, self._watch.device)

        looked_at = self._looked_at if self._training else None

        def around(phase: str, run: Callable[[], Any]) -> Any:
            if check is not None:
                check.before(phase)
            if looked_at is not None:
                looked_at.before(phase, self._watch.device)
            try:
                result = run()
            except BaseException as error:
                raise _own_error(table, error) from None
            runs[phase] += 1
            if check is not None:
                check.after(phase)
            if looked_at is not None:
                looked_at.after(phase)
            return result

        ort_compat.guard_agent(graph.session.agent, around)

    # -- subscribers ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._sessions = sessions_of(self.module)
        for session in self._sessions:
            session.begin("onnxruntime")
        self._watching = [s for s in self._sessions if any(subscriber.acts_on_places() for subscriber in s.active)]

    def _end_step(self, graph: Graph, result: Any, args: tuple, kwargs: dict) -> Any:
        for tapped in graph.exported.taps:
            tapped.given(args, kwargs)
        for session in self._sessions:
            session.end(result)
        return result

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Let whoever waits for it tell what runs; a failure of that is no reason to end a training."""
        announce, self.announce = self.announce, None
        try:
            if announce is not None:
                announce(self)
        except Exception:
            get_logger().debug("no summary", exc_info=True)

    def _guard_failed(self, read: ValueReadError) -> None:
        """Make the graph again for the value that Python takes now; what changes often stays in PyTorch."""
        self._must_vote = False
        path = self.kept.path_of(read.module)
        self._forced = f"{path} {read}, and the value has changed"
        self._guard_failures[str(read)] += 1
        if self._guard_failures[str(read)] > GUARD_FAILURES:
            self._keep_in_torch(read)

    def _keep_in_torch(self, read: ValueReadError) -> None:
        """Keep the submodule that reads values in PyTorch.

        Raises:
            ExportError: it is the model itself.
        """
        if not self.kept.add(read.module, str(read)):
            raise ExportError(
                f"{type(self.module).__name__} cannot run in ONNX Runtime: its forward {read}, which a graph "
                "cannot hold; move that code into a submodule, which then stays in PyTorch by itself, or run the "
                'model in PyTorch with "ort_zero": {"ortmodule": {"enabled": false}}'
            ) from None
        self._forced = self._forced or f"{self.kept.path_of(read.module)} stays in PyTorch"
        share = self.kept.share()
        log = get_logger().warning if share > 0.5 else get_logger().info
        log("%s stays in PyTorch (%.0f %% of the parameters so far): it %s",
            self.kept.path_of(read.module), 100 * share, read)  # fmt: skip

    def _sources(self) -> Callable[[torch.Tensor], Any]:
        """Return who tells which memory is a weight's, for nodes that run in PyTorch; see :mod:`.in_torch`."""
        here: set[int] = set()

        def source_of(tensor: torch.Tensor) -> Any:
            tables = (graph.table for mode in self.modes.values() for graph in mode.graphs)
            if any(table is not None and table.plan.takes_weights for table in tables):
                return gather_reduce.lent_at(tensor)
            if not here:
                whole = (p for p in self.module.parameters() if not is_partitioned(p))
                here.update(p.untyped_storage().data_ptr() for p in whole)
            return torch_fallback.STAYS if tensor.untyped_storage().data_ptr() in here else None

        return source_of

    def _exchange(self, digest: str | None, error: str | None) -> None:
        self._must_exchange = False
        reports = collectives.exchange((digest, error), self.group)
        collectives.raise_if_others_failed([r[1] for r in reports], "building the ONNX graph")
        if error is None and self.stage == 3:
            self._refuse_mixed([r[0] for r in reports])

    def _on_first_rank(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns on the first rank. All ranks, while they make their first training graph."""
        if not self._several or self._agreed_once or not self._must_exchange:
            return make()
        first = torch.distributed.get_rank(self.group) == 0
        reports = collectives.exchange(("plan", make() if first else None), self.group)
        if any(kind is None for kind, _ in reports):
            self._must_exchange = False  # whoever failed has told, and is gone
            errors = [words if kind is None else None for kind, words in reports]
            collectives.raise_if_others_failed(errors, "building the ONNX graph")
        return reports[0][1]

    def _agree_on_backward(self, digest: int) -> None:
        """Raise unless all ranks reduce the same gradients: ZeRO-2 fills its buckets as they come, and asks nobody."""
        if self.stage != 2 or collectives.world_size(self.group) == 1:
            return
        votes = collectives.votes(REUSE, digest, self.group)
        odd = [rank for rank, vote in enumerate(votes) if vote.digest != votes[0].digest]
        if odd:
            raise BridgeError(
                f"ranks {odd} have gradients of other parameters than rank 0 in this backward, and ZeRO-2 would mix "
                "them up: let every rank use the same parameters, or use ZeRO-1"
            )

    def _refuse_mixed(self, digests: list) -> None:
        """Raise on all ranks if their graphs would not perform the same collectives."""
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise ExportError(
                f"ranks {odd} run a graph with other weights or another order than rank 0, so their collectives "
                "would not match: give every rank inputs of one structure (the same arguments, None or not)"
            )

    def _failed(self, transitions: GraphTransitionManager, error: BaseException) -> BaseException:
        """Tell the ranks that wait for this one, leave a clean state, return the error to raise."""
        for mode in self.modes.values():
            for graph in mode.graphs:
                if graph.table is not None:
                    with contextlib.suppress(Exception):
                        graph.table.drain()
        # the first run of a graph is the last part of making it
        building = self._must_vote or self._must_exchange or self._building
        transitions.builder.output.replay()
        if self._building:
            transitions.forget(self._new)
        tracer = transitions.builder.tracer
        users = tracer is not None and error is tracer.users_error
        clear = explain(error, self.module) if building and not users else error
        if self._building and isinstance(clear, ExportError) and transitions.graphs:
            clear = ExportError(f"{clear} [a new graph was needed: {'; '.join(self._reasons)}; earlier ones are kept]")
        waiting, self._must_vote = self._must_vote, False
        if waiting:
            collectives.votes(collectives.FAILED, 0, self.group)
            collectives.exchange(str(clear), self.group)
        elif self._must_exchange:
            self._exchange(None, str(clear))
        return clear

    def memory_summary(self) -> list[tuple[str, str]]:
        """Return what the newest training graph computes again, and what that brings, line by line."""
        return self.memory.decisions[-1].in_words() if self.memory is not None and self.memory.decisions else []

    def status(self) -> dict[str, Any]:
        """Return what runs and why, as plain values."""
        graphs = {}
        for training, mode in self.modes.items():
            if not mode.calls:
                continue
            counts = Counter(mode.retired)
            for graph in mode.graphs:
                counts.update(counted(graph))
            now = mode.current
            built = [d for d in self.history.done if d.mode == mode.mode and d.transition.action.builds]
            graphs[mode.mode] = {
                "exports": mode.exports,
                "kept": len(mode.graphs),
                "nodes": now.nodes if now else 0,
                "python_ops": now.python_ops if now else 0,
                "inputs": len(now.info.onnx_graph_input_names) if now else 0,
                "seconds": round(built[-1].seconds, 3) if built else 0.0,
                "bridge": now.bridge if now else None,
                "runs": dict(self.runs[training]),
                **{name: counts[name] for name in ("gathers", "gathered_elements", "reduces")},
            }
        return {
            "module": type(self.module).__name__,
            "zero_stage": self.stage,
            "backend": "torch" if self.fallback_reason else "onnxruntime",
            "fallbacks": int(self.fallback_reason is not None),
            "fallback_reason": self.fallback_reason,
            "in_torch": {
                **self.kept.reasons,
                **{name: why for mode in self.modes.values() for name, why in mode.builder.routes.taken.items()},
            },
            "graphs": graphs,
            "transitions": [done.as_dict() for done in self.history.done],
            "memory": [decision.as_dict() for decision in self.memory.decisions] if self.memory is not None else [],
        }


def _own_error(table: gather_reduce.Table | None, error: BaseException) -> BaseException:
    """Return the error that a node raised, rather than ORT's words about it."""
    own = torch_fallback.take_failure()
    if table is not None:
        own, table.error = table.error or own, None
    if own is None:
        return error
    if table is None:
        return own
    with contextlib.suppress(Exception):
        table.drain()
    return own
