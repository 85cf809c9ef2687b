"""One ORTModule under DeepSpeed: when its graphs are made, what is done to them, and what has run.

A forward call of a rank goes through these steps; those with (*) concern all ranks of the ZeRO group::

    call -> transition: ORT's check -> (*) vote -> export with stand-ins -> post-processing
         -> graph_built: plan, rewrite -> session_created -> (*) exchange of digests or errors
         -> run: gathers, reduces

Under ZeRO-3 every call votes, since a rank that exports while another one gathers would hang both. Below ZeRO-3 the
graph has no collectives: only the first training graph is agreed on, so that an export that fails on one rank stops
all of them.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from torch.autograd.graph import saved_tensors_hooks

from ort_zero import agreement, env
from ort_zero.bridge import ops
from ort_zero.bridge.plan import Plan, Weight, small_share
from ort_zero.bridge.plan import plan as make_plan
from ort_zero.bridge.rewrite import describe, rewrite
from ort_zero.bridge.zero_parameters import DeepSpeedParameters, full_shape, is_partitioned
from ort_zero.compat import ortmodule as ort_compat
from ort_zero.compat import torch_checkpoint, torch_onnx, tracing
from ort_zero.compat.torch_onnx import Unexportable
from ort_zero.compat.tracing import ValueReadError
from ort_zero.config import OrtModuleConfig
from ort_zero.errors import ExportError, RankError
from ort_zero.graph import in_torch, structure, taps
from ort_zero.graph.exported import complete_dropout
from ort_zero.graph.failures import explain
from ort_zero.graph.optimized import unfuse_for_cpu
from ort_zero.graph.routes import Routes, infer_python_op
from ort_zero.graph.standins import full_shape_weights, unchanged_buffers
from ort_zero.graph.submodules import KeptInTorch
from ort_zero.hooks.global_manager import Session, sessions_of
from ort_zero.hooks.manager import paused
from ort_zero.log import get_logger

GUARD_FAILURES = 3
"""So often a graph is made again because a value changed that Python code reads; then its module stays in PyTorch."""


class GuardFailedError(BaseException):
    """A graph does not hold for this call; not an Exception, so that ORT's own handlers let it pass."""

    def __init__(self, read: ValueReadError):
        super().__init__(str(read))
        self.read = read


STRUCTURE = "ort_zero_structure"
"""Name of the argument that tells upstream the structure of a call: another string, another graph."""


@dataclass(slots=True)
class GraphRecord:
    """One graph that runs, or ran until it was exported again."""

    mode: str
    """``"training"`` or ``"inference"``."""
    exports: int = 0
    nodes: int = 0
    python_ops: int = 0
    seconds: float = 0.0
    """Time from the decision to export until the session existed."""
    bridge: str | None = None
    runs: Counter = field(default_factory=Counter)
    """Completed runs of the ORT session, by ``"forward"`` and ``"backward"``."""


@dataclass(slots=True)
class Effects:
    """What running a module does besides returning its result, and a graph does not."""

    results: int = 0
    """Tensors of the result; those of the effects are further outputs of the graph."""
    changed: list[int] = field(default_factory=list)
    """Arguments that the module changes in place; their new values come first."""
    guards: list[tuple[list, ValueReadError]] = field(default_factory=list)
    """Values that Python code took from tensors, and where; what they are now comes after."""
    counting: list[torch.nn.Module] = field(default_factory=list)
    """Modules that count their batches."""


class Runtime:
    """The seams of one ORTModule.

    Args:
        module: the user's module.
        config: the section's ``ortmodule`` part.
        stage: ZeRO stage of the engine.
    """

    def __init__(self, module: torch.nn.Module, config: OrtModuleConfig, stage: int):
        self.module = module
        self.config = config
        self.stage = stage
        self.group: Any = None
        self.prefetch_elements = 0
        self.records = {True: GraphRecord("training"), False: GraphRecord("inference")}
        self.tables: dict[bool, ops.Table] = {}
        self.sums = ops.Sums()
        self.fallback_reason: str | None = None
        self.kept = KeptInTorch(module, config.exclude)
        self.routes = {mode: Routes(mode, ort_compat.register_function) for mode in (True, False)}
        self._sessions: list[Session] = []
        """Those who subscribed to this module or a part of it, in this call."""
        self._watching: list[Session] = []
        """Those of them who want to see tensors in this call."""
        self._taps: dict[bool, list[taps.Taps]] = {True: [], False: []}
        self._read_alone: dict[bool, set[str]] = {True: set(), False: set()}
        """Graph inputs that no result depends on."""
        self._given: tuple[tuple, dict] = (), {}
        self._parameters = structure.parameters_of(module.forward)
        self._structures: list[tuple] = []
        self._call: structure.Call | None = None
        self._effects = {True: Effects(), False: Effects()}
        self._guard_failures: Counter = Counter()
        self._agreed_once = False
        self._several = False
        self._training = True
        """Whether the call that runs wants gradients; the module's own mode is another matter."""
        self._must_vote = self._must_exchange = self._exporting = self._forced = False
        self._users_error: BaseException | None = None
        self._started = 0.0
        self._pending_digest: str | None = None

    @property
    def _device(self) -> torch.device:
        """Where the module is now; engines move it after it is wrapped."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    # -- the seams, in the order in which a call meets them ---------------------------------------------------------

    def call(
        self, manager: ort_compat.ManagerView, run: Callable[[], Any], run_in_torch: Callable[[], Any]
    ) -> Any:
        """Run a forward call; an error that is not the user's own becomes one clear error on all ranks.

        With ``"fallback": "warn"`` a graph that one rank cannot build makes all ranks run PyTorch from then on.
        """
        self._must_exchange = self._exporting = self._forced = False
        self._training = manager.training
        if self.fallback_reason is not None:
            return run_in_torch()
        self._several = agreement.world_size(self.group) > 1
        self._must_vote = self._several and (self.stage == 3 or (manager.training and not self._agreed_once))
        self._started = time.perf_counter()
        in_torch.take_failure()
        self._begin_step()
        try:
            while True:
                # ranks that build the same graph learn the same, or wait for this one
                try:
                    with in_torch.sources(self._sources()):
                        return self._end_step(run())
                except ValueReadError as read:
                    self._keep_in_torch(read)
                except Unexportable as why:
                    self._keep_in_torch(ValueReadError(self.kept.module_at(why.path), "calls an operator", str(why)))
                except GuardFailedError as failed:
                    self._guard_failed(failed.read)
                except Exception as error:
                    if not self._exporting or not self.routes[manager.training].learn(str(error)):
                        raise
                manager.forget_graph()
        except BaseException as error:
            clear: BaseException = self._failed(manager, error)
            if self.config.fallback != "warn" or not isinstance(clear, (ExportError, RankError)):
                if clear is error:
                    raise
                raise clear from error
        finally:
            self._call, self._given = None, ((), {})  # they hold the batch
        self.fallback_reason = str(clear)
        for session in self._sessions:
            session.step -= 1  # PyTorch begins it anew
        get_logger().warning("running in PyTorch: %s", self.fallback_reason)
        return run_in_torch()

    def transition(self, manager: ort_compat.ManagerView, proceed: Callable[[], Any]) -> Any:
        """Surround ORT's decision to export."""
        self._refuse_unsupported()
        return proceed()

    def needs_export(self, verdict: bool) -> bool:
        """Return True on all ranks if one of them has to export."""
        verdict = verdict or bool(self._watching) != bool(self._taps[self._training])
        if self._forced:
            self._forced = False
            self._must_exchange = self._must_exchange or (self._several and self.stage == 3)
            self._exporting = True
            return True
        if self._must_vote:
            votes = agreement.votes(int(verdict), self._trainable_digest(), self.group)
            self._must_vote = False
            if any(vote.code == agreement.FAILED for vote in votes):
                agreement.raise_if_others_failed(agreement.exchange(None, self.group), "preparing the inputs")
            odd = [rank for rank, vote in enumerate(votes) if vote.digest != votes[0].digest]
            if odd:
                raise ExportError(
                    f"ranks {odd} have other parameters frozen than rank 0, so their gradients could not be reduced "
                    "together: set requires_grad alike on every rank"
                )
            verdict = any(vote.code for vote in votes)
            self._must_exchange = verdict
        self._exporting = self._exporting or verdict
        return verdict

    @contextlib.contextmanager
    def exporting(self, flattened_module: torch.nn.Module):
        """Hold stand-ins and keep the buffers while the module is traced."""
        marked = self._taps[self._training] = [taps.Taps(session, self.module) for session in self._watching]
        with (
            paused(),
            torch_checkpoint.watch(self._refuse_checkpointing),
            self.kept.as_operators(),
            torch_onnx.routing(self.routes[self._training]),
            unchanged_buffers(flattened_module),
            full_shape_weights(flattened_module),
            taps.traced(marked),
        ):
            yield

    def exported(self, model: onnx.ModelProto) -> None:
        """Repair what the exporter is known to write incompletely."""
        complete_dropout(model)

    def without_gradient(self, model: onnx.ModelProto | None) -> set[str]:
        """Return the inputs that are there for subscribers alone."""
        if model is not None:
            self._read_alone[self._training] = taps.read_alone(model) if self._taps[self._training] else set()
        return self._read_alone[self._training]

    def flatten_call(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Take the arguments apart; what is no tensor is told by the number of its structure."""
        call = structure.flatten_call(args, kwargs, self._parameters)
        self._given = args, kwargs
        # before the vote: a rank that fails after it leaves the others alone with their collectives
        device = self._device
        for name, tensor in zip(call.names, call.tensors, strict=True):
            if tensor.device.type == "meta" or device.type not in ("cpu", tensor.device.type):
                raise ExportError(
                    f"argument {name} is on device {tensor.device}, but the module is on {device}: move it there"
                )
        self._call = call
        number = next((i for i, known in enumerate(self._structures) if known == call.structure), None)
        if number is None:
            number = len(self._structures)
            self._structures.append(call.structure)
        return {**dict(zip(call.names, call.tensors, strict=True)), STRUCTURE: str(number)}

    def infer_python_op(self, node: Any, input_shapes: list, input_types: list) -> list | None:
        """Return the shapes of the results of an operator that runs in PyTorch."""
        return infer_python_op(node, input_shapes, input_types)

    def run_module(self, module: torch.nn.Module, tensors: tuple) -> tuple[list[torch.Tensor], Any]:
        """Run the module on its arguments, put together; training leaves caches of keys and values out."""
        args, kwargs, known = structure.unflatten_call(tensors, self._call.structure)
        if torch.jit.is_tracing() and self._training:
            # the trace then tells what has a gradient; nothing needs to be kept for one
            with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, _never_unpacked):
                return self._traced(module, tensors, args, kwargs, known)
        if torch.jit.is_tracing():
            return self._traced(module, tensors, args, kwargs, known)
        return structure.flatten(self._tried(module, args, kwargs), drop_caches=self._training, known=known)

    def _tried(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
        """Run the module as PyTorch would; an error here is the user's own."""
        try:
            return module(*args, **kwargs)
        except Exception as error:
            if not self._training:
                self._users_error = error
                raise
        try:
            # modules that compute gradients in their forward fail without gradients only
            with torch.enable_grad():
                return module(*args, **kwargs)
        except Exception as error:
            self._users_error = error
            raise

    def _traced(
        self, module: torch.nn.Module, given: tuple, args: tuple, kwargs: dict, known: dict
    ) -> tuple[list, Any]:
        """Run the module for the tracer; what a graph does not do by itself becomes more outputs of it."""
        versions = [tensor._version for tensor in given]
        with tracing.watched() as seen:
            value = module(*args, **kwargs)
        tensors, schema = structure.flatten(value, drop_caches=self._training, known=known)
        tensors = [seen.anchored(tensor, given) for tensor in tensors]
        changed = [i for i, tensor in enumerate(given) if tensor._version != versions[i]]
        self._effects[self._training] = Effects(
            results=len(tensors),
            changed=changed,
            guards=[(guard.value, guard.read) for guard in seen.guards],
            counting=[m for m in seen.normalised if m.num_batches_tracked is not None],
        )
        more = [given[i].detach() for i in changed] + [guard.tensor.detach().flatten() for guard in seen.guards]
        more += taps.gathered(self._taps[self._training])
        return tensors + more, schema

    def _check_guards(self, guards: list[tuple[list, ValueReadError]], tensors: Any) -> None:
        """Raise unless Python would take the values that it took when the graph was made. All ranks under ZeRO-3."""
        if not guards:
            return
        same = [value == now.tolist() for (value, _), now in zip(guards, tensors, strict=True)]
        failed = -1 if all(same) else same.index(False)
        if self.stage == 3 and self._several:
            # one answer for all: each rank counts how often a guard has failed
            failed = max(vote.digest for vote in agreement.votes(0, failed, self.group))
        if failed >= 0:
            raise GuardFailedError(guards[failed][1])

    def restore_outputs(self, tensors: Any, schema: Any) -> Any:
        """Put the module's outputs together."""
        effects = self._effects[self._training]
        more = tensors[effects.results :]
        guarded = len(effects.changed) + len(effects.guards)  # behind them there may be a token
        self._check_guards(effects.guards, more[len(effects.changed) : guarded])
        with torch.no_grad():
            for i, value in zip(effects.changed, more, strict=False):
                self._call.tensors[i].copy_(value)
            for module in effects.counting:
                module.num_batches_tracked.add_(1)  # an update in place that the exporter leaves out
        return structure.unflatten(tensors, schema, self._call.objects)

    def graph_built(self, manager: ort_compat.ManagerView) -> None:
        """Rewrite the new graph if the module's weights are partitioned."""
        record = self.records[manager.training]
        # frozen parameters changed: the graph is built again without an export, on all ranks alike
        self._must_exchange = self._must_exchange or (self._several and self.stage == 3)
        self.tables.pop(manager.training, None)
        self._pending_digest = "no bridge"
        if self._device.type == "cpu":
            model = manager.model
            if unfuse_for_cpu(model):
                manager.model = model
        parameters = dict(manager.flattened_module.named_parameters())
        partitioned = {n: p for n, p in parameters.items() if is_partitioned(p)}
        if partitioned:
            weights = _weights(partitioned)
            plan = make_plan(
                manager.model, weights, training=manager.training, merge_elements=small_share(weights)
            )
            self._install(manager, plan, partitioned)
            record.bridge = describe(plan)
            self._pending_digest = plan.digest()
        model = manager.model
        if self._taps[manager.training]:
            taps.register(ort_compat.register_function)
            taps.place_readers(model)
            manager.model = model
        record.nodes = len(model.graph.node)
        record.python_ops = sum(node.op_type == "PythonOp" for node in model.graph.node)
        record.exports += self._exporting
        self._save(manager, model)

    def session_created(self, manager: ort_compat.ManagerView) -> None:
        """Agree with the other ranks on the new graph, and watch its runs."""
        if self._must_exchange:
            # ranks that compare values after each run talk then
            self._exchange(f"{self._pending_digest}, {len(self._effects[manager.training].guards)} guards", None)
            self._agreed_once = True
        record = self.records[manager.training]
        record.seconds = time.perf_counter() - self._started
        table = self.tables.get(manager.training)

        def around(phase: str, run: Callable[[], Any]) -> Any:
            try:
                result = run()
            except BaseException as error:
                raise _own_error(table, error) from None
            record.runs[phase] += 1
            return result

        manager.guard_agent(around)
        bridge = f", {record.bridge}" if record.bridge else ""
        get_logger().info(
            "%s %s graph ready in %.1f s: %d nodes, %d PythonOps%s",
            type(self.module).__name__, record.mode, record.seconds, record.nodes, record.python_ops, bridge,
        )  # fmt: skip

    def add_inputs(self, manager: ort_compat.ManagerView, trigger: str, inputs: dict, device: Any) -> None:
        """Add the trigger; it requires grad, so that autograd calls the backward."""
        inputs[trigger] = self.tables[manager.training].new_trigger(device)

    # -- subscribers ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._sessions = sessions_of(self.module)
        for session in self._sessions:
            session.begin("onnxruntime")
        self._watching = [s for s in self._sessions if any(subscriber.acts_on_places() for subscriber in s.active)]

    def _end_step(self, result: Any) -> Any:
        for tapped in self._taps[self._training]:
            tapped.given(*self._given)
        for session in self._sessions:
            session.end(result)
        return result

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _install(self, manager: ort_compat.ManagerView, plan: Plan, parameters: dict[str, Any]) -> None:
        ops.register(ort_compat.register_function)
        table = ops.Table(plan, parameters, DeepSpeedParameters(), self.prefetch_elements, self.sums)
        table.lends = frozenset(
            name for node in manager.model.graph.node if node.op_type == "PythonOp" for name in node.input
        ) & set(plan.weights)
        model, gradient = rewrite(manager.model, plan, table=table.number, training=manager.training)
        manager.model = model
        manager.drop_graph_inputs(set(plan.weights), "ort_zero_trigger", gradient)
        self.tables[manager.training] = table

    def _refuse_unsupported(self) -> None:
        """Raise for a module that is known to fail, before minutes are spent on its export."""
        if self.records[True].exports or self.records[False].exports:
            return
        for name, parameter in self.module.named_parameters():
            if parameter.device.type == "cpu" and parameter.dtype in (torch.float16, torch.bfloat16):
                kind = str(parameter.dtype).removeprefix("torch.")
                raise ExportError(
                    f"parameter {name} is {kind}, and ONNX Runtime's CPU provider has no {kind} kernels for training; "
                    f'train in fp32 (drop "{"bf16" if kind == "bfloat16" else "fp16"}" from the DeepSpeed config), '
                    'use a GPU, or set "ort_zero": {"ortmodule": {"enabled": false}}'
                )

    def _guard_failed(self, read: ValueReadError) -> None:
        """Make the graph again for the value that Python takes now; what changes often stays in PyTorch."""
        self._must_vote = False
        self._forced = True
        self._guard_failures[str(read)] += 1
        if self._guard_failures[str(read)] > GUARD_FAILURES:
            self._keep_in_torch(read)
        else:
            path = self.kept.path_of(read.module)
            get_logger().info("graph made again: %s %s, and the value has changed", path, read)

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
        share = self.kept.share()
        log = get_logger().warning if share > 0.5 else get_logger().info
        log("%s stays in PyTorch (%.0f %% of the parameters so far): it %s",
            self.kept.path_of(read.module), 100 * share, read)  # fmt: skip

    def _sources(self) -> Callable[[torch.Tensor], Any]:
        """Return who tells which memory is a weight's, for nodes that run in PyTorch; see :mod:`.in_torch`."""
        here: set[int] = set()

        def source_of(tensor: torch.Tensor) -> Any:
            if self.tables:  # the first call makes them
                return ops.lent_at(tensor)
            if not here:
                whole = (p for p in self.module.parameters() if not is_partitioned(p))
                here.update(p.untyped_storage().data_ptr() for p in whole)
            return in_torch.STAYS if tensor.untyped_storage().data_ptr() in here else None

        return source_of

    def _trainable_digest(self) -> int:
        return zlib.crc32(bytes(p.requires_grad for p in self.module.parameters()))

    def _refuse_checkpointing(self) -> None:
        raise ExportError(
            f"{type(self.module).__name__} uses torch activation checkpointing, which an ONNX graph cannot contain: "
            "switch it off (model.gradient_checkpointing_disable(), or drop the call of checkpoint()), or run the "
            'model in PyTorch with "ort_zero": {"ortmodule": {"enabled": false}}'
        )

    def _exchange(self, digest: str | None, error: str | None) -> None:
        self._must_exchange = False
        reports = agreement.exchange((digest, error), self.group)
        agreement.raise_if_others_failed([r[1] for r in reports], "building the ONNX graph")
        digests = [r[0] for r in reports]
        if error is None and self.stage == 3 and len(set(digests)) > 1:
            odd = [rank for rank, d in enumerate(digests) if d != digests[0]]
            raise ExportError(
                f"ranks {odd} built a graph with other weights or another order than rank 0, so their collectives "
                "would not match: give every rank inputs of one structure (the same arguments, None or not)"
            )

    def _failed(self, manager: ort_compat.ManagerView, error: BaseException) -> BaseException:
        """Tell the ranks that wait for this one, leave a clean state, return the error to raise."""
        for table in self.tables.values():
            with contextlib.suppress(Exception):
                table.drain()
        building = self._must_vote or self._must_exchange or self._exporting
        clear = explain(error, self.module) if building and error is not self._users_error else error
        self._users_error = None
        waiting, self._must_vote = self._must_vote, False
        if waiting:
            agreement.votes(agreement.FAILED, 0, self.group)
            agreement.exchange(str(clear), self.group)
        elif self._must_exchange:
            self._exchange(None, str(clear))
        if building:
            manager.forget_graph()
            self.tables.pop(manager.training, None)
        return clear

    def _save(self, manager: ort_compat.ManagerView, model: onnx.ModelProto) -> None:
        if self.config.save_onnx is None or env.rank() != 0:
            return
        folder = Path(self.config.save_onnx)
        os.makedirs(folder, exist_ok=True)
        onnx.save(model, folder / f"rewritten_{self.records[manager.training].mode}.onnx")

    def status(self) -> dict[str, Any]:
        """Return what runs and why, as plain values."""
        graphs = {}
        for training, record in self.records.items():
            if not record.exports:
                continue
            table = self.tables.get(training)
            graphs[record.mode] = {
                "exports": record.exports,
                "nodes": record.nodes,
                "python_ops": record.python_ops,
                "seconds": round(record.seconds, 3),
                "bridge": record.bridge,
                "runs": dict(record.runs),
                "gathers": table.counters.gathers if table else 0,
                "gathered_elements": table.counters.gathered_elements if table else 0,
                "reduces": table.counters.reduces if table else 0,
            }
        return {
            "module": type(self.module).__name__,
            "zero_stage": self.stage,
            "backend": "torch" if self.fallback_reason else "onnxruntime",
            "fallbacks": int(self.fallback_reason is not None),
            "fallback_reason": self.fallback_reason,
            "in_torch": {
                **self.kept.reasons,
                **{name: why for routes in self.routes.values() for name, why in routes.taken.items()},
            },
            "graphs": graphs,
        }


def _never_unpacked(nothing: None) -> torch.Tensor:
    raise ExportError("the module computes gradients inside its forward, which an ONNX graph cannot contain")


def _weights(parameters: dict[str, Any]) -> dict[str, Weight]:
    return {
        name: Weight(
            name=name,
            shape=full_shape(p),
            elem_type=ort_compat.onnx_type(p.dtype),
            trainable=p.requires_grad,
        )
        for name, p in parameters.items()
    }


def _own_error(table: ops.Table | None, error: BaseException) -> BaseException:
    """Return the error that a node raised, rather than ORT's words about it."""
    own = in_torch.take_failure()
    if table is not None:
        own, table.error = table.error or own, None
    if own is None:
        return error
    if table is None:
        return own
    with contextlib.suppress(Exception):
        table.drain()
    return own
