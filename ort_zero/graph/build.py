"""Makes a graph that runs: export, shapes, gradient graph, bridge, session.

Nothing here talks to other ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch

from ort_zero import env
from ort_zero.bridge import ops
from ort_zero.bridge.plan import Weight, small_share
from ort_zero.bridge.plan import plan as make_plan
from ort_zero.bridge.rewrite import TRIGGER, describe, rewrite
from ort_zero.bridge.zero_parameters import DeepSpeedParameters, full_shape, is_partitioned
from ort_zero.compat import ortmodule as ort_compat
from ort_zero.compat import torch_checkpoint, torch_onnx
from ort_zero.config import OrtModuleConfig
from ort_zero.errors import ExportError
from ort_zero.graph import structure, taps
from ort_zero.graph.exported import complete_dropout
from ort_zero.graph.optimized import unfuse_for_cpu
from ort_zero.graph.routes import Routes, infer_python_op
from ort_zero.graph.standins import full_shape_weights, unchanged_buffers
from ort_zero.graph.state import (
    ExportedModelInfo,
    ExportKey,
    KnownGraph,
    Observed,
    PostExportProcessedModelInfo,
    ProcessKey,
)
from ort_zero.graph.submodules import KeptInTorch
from ort_zero.graph.trace import Effects, Tracer
from ort_zero.hooks.global_manager import Session
from ort_zero.hooks.manager import paused


@dataclass(slots=True, eq=False)
class Exported:
    """A module that has been exported; several graphs may be made of it."""

    key: ExportKey
    info: ExportedModelInfo
    effects: Effects
    differentiable: frozenset[str]
    """Arguments that were traced with gradients."""
    taps: list[taps.Taps] = field(default_factory=list)
    read_alone: frozenset[str] = frozenset()
    """Graph inputs that no result depends on: they are there for subscribers."""


@dataclass(slots=True, eq=False)
class Graph:
    """A graph that can run."""

    known: KnownGraph
    exported: Exported
    info: PostExportProcessedModelInfo
    session: ort_compat.Session
    table: ops.Table | None
    digest: str
    """Of the collectives in the graph; ranks with equal digests perform the same ones in one order."""
    bridge: str | None
    nodes: int
    python_ops: int

    @property
    def effects(self) -> Effects:
        """What the module does besides returning a result."""
        return self.exported.effects


class Builder:
    """Makes the graphs of one mode of a model.

    Args:
        module: the user's module.
        config: the section's ``ortmodule`` part.
        kept: submodules that stay in PyTorch.
        routes: operators that do.
        sums: of the gradients of all graphs of the model.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: OrtModuleConfig,
        manager: ort_compat.Manager,
        kept: KeptInTorch,
        sums: ops.Sums,
    ):
        self.module = module
        self.config = config
        self.manager = manager
        self.kept = kept
        self.sums = sums
        self.routes = Routes(manager.training, ort_compat.register_function)
        self.prefetch_elements = 0
        self.seconds: dict[str, float] = {}
        """Time that each step of the last graph took."""
        self.tracer: Tracer | None = None
        """Of the export that runs, or was the last."""

    # -- export ----------------------------------------------------------------------------------------------------

    def export(self, observed: Observed, call: structure.Call, watching: Sequence[Session]) -> Exported:
        """Return the exported module, with its shapes."""
        self._refuse_unsupported()
        try:
            model, schema, axes = self._traced(call, watching, all_inputs=True)
        except Exception:
            # PyTorch has no gradient of a loss for its target, and refuses one that wants it
            if self.tracer.refused is None or self.tracer.differentiable == wanted_of(call):
                raise
            model, schema, axes = self._traced(call, watching, all_inputs=False)
        tracer, marked = self.tracer, self.tracer.marks
        complete_dropout(model)
        read_alone = taps.read_alone(model) if marked else set()
        with self._timed("shapes"):
            model = self.manager.process(model, infer_python_op)
        names = tuple(given.name for given in model.graph.input)
        info = ExportedModelInfo(
            module_forward_input_schema=observed.export.structure,
            module_forward_output_schema=schema,
            onnx_graph_input_names=names,
            onnx_graph_input_names_user_defined=tuple(name for name in call.names if name in set(names)),
            dynamic_axes_map=axes,
            exported_model=model.SerializeToString(),
        )
        return Exported(
            observed.export, info, tracer.effects, tracer.differentiable, marked, frozenset(read_alone)
        )

    def _traced(self, call: structure.Call, watching: Sequence[Session], *, all_inputs: bool) -> tuple:
        marked = [taps.Taps(session, self.module) for session in watching]
        tracer = self.tracer = Tracer(self.manager.training, call, marked, all_inputs)
        flattened = self.manager.flattened_module
        with (
            self._timed("export"),
            paused(),
            torch_checkpoint.watch(self._refuse_checkpointing),
            self.kept.as_operators(),
            torch_onnx.routing(self.routes),
            unchanged_buffers(flattened),
            full_shape_weights(flattened),
            taps.traced(marked),
            tracer.everything_trainable(flattened),
        ):
            return self.manager.export(dict(zip(call.names, tracer.arguments, strict=True)))

    def _refuse_unsupported(self) -> None:
        """Raise for a module that is known to fail, before minutes are spent on its export."""
        for name, parameter in self.module.named_parameters():
            if parameter.device.type == "cpu" and parameter.dtype in (torch.float16, torch.bfloat16):
                kind = str(parameter.dtype).removeprefix("torch.")
                raise ExportError(
                    f"parameter {name} is {kind}, and ONNX Runtime's CPU provider has no {kind} kernels for training; "
                    f'train in fp32 (drop "{"bf16" if kind == "bfloat16" else "fp16"}" from the DeepSpeed config), '
                    'use a GPU, or set "ort_zero": {"ortmodule": {"enabled": false}}'
                )

    def _refuse_checkpointing(self) -> None:
        raise ExportError(
            f"{type(self.module).__name__} uses torch activation checkpointing, which an ONNX graph cannot contain: "
            "switch it off (model.gradient_checkpointing_disable(), or drop the call of checkpoint()), or run the "
            'model in PyTorch with "ort_zero": {"ortmodule": {"enabled": false}}'
        )

    # -- post-export processing ------------------------------------------------------------------------------------

    def process(self, exported: Exported, process: ProcessKey, number: int) -> Graph:
        """Return a graph that runs the exported module with the gradients that `process` asks for."""
        manager, flattened = self.manager, self.manager.flattened_module
        parameters = dict(flattened.named_parameters())
        names = exported.info.onnx_graph_input_names
        inputs = tuple(name for name in process.inputs if name in set(names) - exported.read_alone)
        trained = {name for name, p in parameters.items() if p.requires_grad} | set(inputs)
        wanted = tuple(n for n in names if n in trained and n not in exported.read_alone) if manager.training else ()
        with self._timed("gradient graph"):
            model, info = manager.build(exported.info.exported_model, names, wanted, inputs)
        if manager.device.type == "cpu":
            unfuse_for_cpu(model)
        partitioned = {name: p for name, p in parameters.items() if is_partitioned(p)}
        table, bridge, digest, gradient = None, None, "no bridge", None
        if partitioned:
            weights = _weights(partitioned)
            plan = make_plan(model, weights, training=manager.training, merge_elements=small_share(weights))
            with self._timed("bridge"):
                table, model, gradient = self._rewritten(model, plan, partitioned)
            bridge, digest = describe(plan), plan.digest()
        if exported.taps:
            taps.register(ort_compat.register_function)
            taps.place_readers(model)
        run = self._model_info(exported, model, parameters, wanted, inputs, table)
        self._save(model)
        session = self._session(run, model, info, gradient)
        return Graph(
            known=KnownGraph(number, exported.key, process, exported.differentiable),
            exported=exported,
            info=run,
            session=session,
            table=table,
            digest=f"{digest}, {len(exported.effects.guards)} guards",
            bridge=bridge,
            nodes=len(model.graph.node),
            python_ops=sum(node.op_type == "PythonOp" for node in model.graph.node),
        )

    def _rewritten(self, model: onnx.ModelProto, plan: Any, parameters: dict[str, Any]) -> tuple:
        """Return table, rewritten graph and the gradient of the trigger."""
        ops.register(ort_compat.register_function)
        table = ops.Table(plan, parameters, DeepSpeedParameters(), self.prefetch_elements, self.sums)
        in_torch = {name for node in model.graph.node if node.op_type == "PythonOp" for name in node.input}
        table.lends = frozenset(in_torch & set(plan.weights))
        return table, *rewrite(model, plan, table=table.number, training=self.manager.training)

    def _model_info(
        self,
        exported: Exported,
        model: onnx.ModelProto,
        parameters: dict[str, Any],
        wanted: Sequence[str],
        inputs: Sequence[str],
        table: ops.Table | None,
    ) -> PostExportProcessedModelInfo:
        flattened = self.manager.flattened_module
        buffers = dict(flattened.named_buffers())
        accessors: dict[str, Callable] = {name: _argument(name) for name in exported.info.onnx_graph_input_names}
        accessors.update({name: _buffer(flattened, name) for name in buffers})
        if table is not None:
            accessors[TRIGGER] = lambda _: table.new_trigger(self.manager.device)
        names = tuple(given.name for given in model.graph.input)
        return PostExportProcessedModelInfo(
            onnx_graph_input_names=names,
            onnx_graph_input_names_require_grad=tuple(wanted),
            onnx_graph_input_names_user_defined=exported.info.onnx_graph_input_names_user_defined,
            onnx_graph_input_names_require_grad_user_defined=tuple(inputs),
            dynamic_axes_map=exported.info.dynamic_axes_map,
            buffer_for_ort_runs={name: parameters.get(name) for name in names},
            data_accessor={name: accessors[name] for name in names if name not in parameters},
            module_forward_output_schema=exported.info.module_forward_output_schema,
            build_result=structure.unflatten,
        )

    def _session(
        self, run: PostExportProcessedModelInfo, model: onnx.ModelProto, info: Any, gradient: str | None
    ) -> ort_compat.Session:
        index = {output.name: i for i, output in enumerate(model.graph.output)}
        gradients = {name: index[f"{name}_grad"] for name in run.onnx_graph_input_names_require_grad
                     if f"{name}_grad" in index}  # fmt: skip
        if gradient is not None:
            gradients[TRIGGER] = index[gradient]
        differentiable = [i for i, name in enumerate(run.onnx_graph_input_names) if name in gradients]
        gradient_map = [gradients[run.onnx_graph_input_names[i]] for i in differentiable]
        self.manager.follow_determinism()
        with self._timed("session"):
            agent = self.manager.create_session(model, info)
        return ort_compat.Session(model, info, agent, differentiable, gradient_map)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _save(self, model: onnx.ModelProto) -> None:
        if self.config.save_onnx is None or env.rank() != 0:
            return
        folder = Path(self.config.save_onnx)
        os.makedirs(folder, exist_ok=True)
        onnx.save(model, folder / f"rewritten_{self.manager.mode}.onnx")

    def _timed(self, step: str) -> _Timed:
        return _Timed(self.seconds, step)


class _Timed:
    def __init__(self, seconds: dict[str, float], step: str):
        self.seconds, self.step = seconds, step

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *about: Any) -> None:
        self.seconds[self.step] = time.perf_counter() - self.started


def wanted_of(call: structure.Call) -> frozenset[str]:
    """Return the names of the arguments that want a gradient in a call."""
    return frozenset(name for name, tensor in zip(call.names, call.tensors, strict=True) if tensor.requires_grad)


def _argument(name: str) -> Callable[[Any], Any]:
    return lambda tensors: tensors[name]


def _buffer(module: torch.nn.Module, name: str) -> Callable[[Any], Any]:
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    # users may put another tensor in its place
    return lambda _: owner._buffers[key]


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
