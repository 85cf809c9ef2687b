"""Makes a graph that can run of an exported module: gradient graph, kernels, collectives, readers, session.

:class:`.runtime.graph_builder.GraphBuilder` exports, or finds the graph in the export cache, and hands it over.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import onnx
import torch

from ort_zero import env
from ort_zero.compat.deepspeed_parameters import full_shape, is_partitioned
from ort_zero.config import OrtModuleConfig
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.compat.gathered_parameters import DeepSpeedParameters, PlainParameters
from ort_zero.ortmodule.compat.torch_modules import buffer_table
from ort_zero.ortmodule.onnx_edit.node_edits import remove_unread_initializers
from ort_zero.ortmodule.recompute.block_recomputation import BlockRecomputation
from ort_zero.ortmodule.recompute.decision import Decision
from ort_zero.ortmodule.recompute.graph_model import evaluate
from ort_zero.ortmodule.recompute.optimizer import LogitsTooLargeError, MemoryOptimizer
from ort_zero.ortmodule.recompute.options import AUTO
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph, BuiltModel, ExportedModule
from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.runtime.export.attribute_inputs import as_tensor, float_dtype
from ort_zero.ortmodule.runtime.export.attribute_paths import Place
from ort_zero.ortmodule.runtime.export.post_optimize_passes import (
    accept_empty_batches,
    constants_without_dimensions,
    name_all_results,
    unfuse_for_cpu,
)
from ort_zero.ortmodule.runtime.export.repeated_reads import asked_for_twice, without_gradients
from ort_zero.ortmodule.runtime.export_cache.lookup import run_seed, session_of
from ort_zero.ortmodule.runtime.export_cache.store import ExportCache
from ort_zero.ortmodule.runtime.fused_loss import operators as fused_operators
from ort_zero.ortmodule.runtime.fused_loss.rewrite import LARGE, FusedLoss, fuse_loss, shape_of_logits, without_zeros
from ort_zero.ortmodule.runtime.fused_loss.tied_embedding import add_embeddings_in_place
from ort_zero.ortmodule.runtime.guards.attribute_guard import AttributeGuard
from ort_zero.ortmodule.runtime.guards.keys import KnownGraph, PostExportProcessedModelInfo, ProcessKey
from ort_zero.ortmodule.runtime.kernels.label_checks import check_labels
from ort_zero.ortmodule.runtime.kernels.own_results import copy_shared_results
from ort_zero.ortmodule.runtime.kernels.quotient_gradients import divide_gradients
from ort_zero.ortmodule.runtime.kernels.replace import replace_kernels
from ort_zero.ortmodule.runtime.kernels.table import chosen
from ort_zero.ortmodule.runtime.kernels.transposed_products import compute_transposed
from ort_zero.ortmodule.runtime.own_memory import weights_returned
from ort_zero.ortmodule.runtime.padding import operators as padding_operators
from ort_zero.ortmodule.runtime.padding.rewrite import drop_padding
from ort_zero.ortmodule.runtime.zero3 import gather_reduce
from ort_zero.ortmodule.runtime.zero3.collective_plan import CollectivePlan, Weight, plan_collectives, small_share
from ort_zero.ortmodule.runtime.zero3.gather_memory import GatherMemory, slab_of
from ort_zero.ortmodule.runtime.zero3.gradient_sums import GradientSums
from ort_zero.ortmodule.runtime.zero3.insert_collectives import insert_collectives
from ort_zero.ortmodule.runtime.zero3.kept_weights import KeptWeights
from ort_zero.ortmodule.runtime.zero3.node_names import TRIGGER
from ort_zero.ortmodule.runtime.zero3.prefetch_limits import GatherLimits
from ort_zero.ortmodule.statistics import graph_readers
from ort_zero.utils.progress import Steps
from ort_zero.utils.sizes import binary_size

_UNREACHABLE = re.compile(r"partial derivative for '(?P<name>.+?)' as it's unreachable from the output")


@dataclass(slots=True)
class _GradientGraph:
    """ORT's gradient graph with our kernels, or its forward graph."""

    model: onnx.ModelProto
    info: Any
    fused: FusedLoss | None
    """What the node of head and loss has changed; None without one."""
    kernels: Counter[str] = field(default_factory=Counter)
    """How many nodes run another kernel than ORT's."""


class GraphProcessor:
    """Makes the graphs of one mode of a model from its exported modules.

    Args:
        module: the user's module.
        config: the section's ``ortmodule`` part.
        manager: ORT's, of the mode.
        sums: sums of the gradients of all graphs of the model.
        cache: holds the graphs of earlier runs; None without one.
        memory_efficient_gradients: put reduce nodes into the training graph also where no weight is partitioned.
        memory: computes activations again; None for keeping all of them.
        attribute_guard: guard on what the module's code reads besides its arguments.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: OrtModuleConfig,
        manager: ort_compat.Manager,
        sums: GradientSums,
        cache: ExportCache | None,
        memory_efficient_gradients: bool,
        memory: MemoryOptimizer | BlockRecomputation | None,
        attribute_guard: AttributeGuard,
    ):
        self.module = module
        self.config = config
        self.manager = manager
        self.sums = sums
        self.cache = cache
        self.memory_efficient_gradients = memory_efficient_gradients
        self.memory = memory
        self.attribute_guard = attribute_guard
        self.seconds: dict[str, float] = {}
        """Seconds that each step of the last graph took."""
        self.shown: Steps | None = None
        """The bar on which steps are shown."""
        self.kept_weights = KeptWeights()

    def process(
        self,
        exported: ExportedModule,
        process: ProcessKey,
        number: int,
        call: pytree.Call,
        built: BuiltModel | None = None,
    ) -> BuiltGraph:
        """Return a graph that runs the exported module with the gradients that `process` asks for.

        Args:
            exported: see :meth:`ort_zero.ortmodule.runtime.graph_builder.GraphBuilder.export`.
            process: what the gradient graph depends on.
            number: number of the new graph.
            call: the first that it is to run; its sizes are those that memory is planned for.
            built: ORT's gradient graph, if there is one already.
        """
        manager = self.manager
        graph = self._with_kernels(built or self.built(exported, process))
        parameters = dict(manager.flattened_module.named_parameters())
        wanted, inputs = self._wanted(exported, process)
        decision, sizes = None, sizes_by_symbol(exported.info.dynamic_axes_map, call)
        if self.memory is not None and ort_compat.has_gradients(graph.model):
            with self.timed("memory plan"):
                graph, decision = self._recomputed(self.memory, graph, exported, process, sizes, parameters)
        model, info, kernels = graph.model, graph.info, graph.kernels
        executor, collectives, digest, gradient = None, None, "no collectives", None
        training = ort_compat.has_gradients(model)
        plan = self._plan(model, parameters, training)
        if plan is not None:
            with self.timed("collectives"):
                executor, model, gradient = self._rewritten(model, plan, parameters, training)
            collectives, digest = str(plan), plan.digest()
        if exported.readers:
            graph_readers.register(ort_compat.register_function)
            graph_readers.insert_readers(model)
        if self.memory is not None and decision is not None:
            model = self.memory.arrange(model, sizes, decision)
        if manager.device.type == "cpu":
            check_labels(model)
        remove_unread_initializers(model.graph)
        run = self._model_info(exported, model, parameters, wanted, inputs, executor)
        self._save(model)
        seed = run_seed()

        def agent(runs_before: int = 0) -> Any:
            shifted = seed + runs_before
            return session_of(self.cache, manager, model, info, seed=shifted, in_order=decision is not None)

        session = self._session(run, model, info, gradient, agent)
        held = {*parameters, *dict(manager.flattened_module.named_buffers())}
        logits = graph.fused.returned if graph.fused is not None else None
        seen = exported.effects.results + exported.effects.written
        return BuiltGraph(
            known=KnownGraph(number, exported.key, process, exported.differentiable),
            exported=exported,
            info=run,
            session=session,
            executor=executor,
            # numbers may be inputs on one rank only, and those of other ranks need no guards
            digest=f"{digest}, {sum(not read.of_attribute for _, read in exported.effects.guards)} guards",
            collectives=collectives,
            nodes=len(model.graph.node),
            python_ops=sum(node.op_type == "PythonOp" for node in model.graph.node),
            memory=decision,
            returned_weights=weights_returned(model, held, seen, logits),
            kernels=kernels,
            returned_logits=logits,
            # what the backward computes again draws in another order
            draws_again=agent if decision is None else None,
        )

    def _with_kernels(self, built: BuiltModel) -> _GradientGraph:
        """Return the graph that ORT has built with the kernels that it is to run with; changes the model."""
        model, info = built.model, built.info
        name_all_results(model)
        constants_without_dimensions(model)
        copy_shared_results(model)
        kernels: Counter[str] = Counter()
        if built.fused is not None:
            fused_operators.register()
        if self.config.drop_padding:
            padding_operators.register()
            if built.padding_stays:
                get_logger().warning(
                    "%s: padding is computed in spite of \"drop_padding\": %s",
                    type(self.module).__name__, built.padding_stays,
                )  # fmt: skip
        if self.manager.device.type == "cpu":
            unfuse_for_cpu(model)
            compute_transposed(model)
            if self.memory is None:  # the buffers of other kernels are not ORT's: a budget would not be kept
                info, kernels = replace_kernels(
                    model, info, chosen(self.config.ort_kernels, torch.backends.cpu.get_cpu_capability())
                )
            accept_empty_batches(model)
            divide_gradients(model)
        if packed := padding_operators.count(model):
            kernels["packed_rows"] = packed
        if built.fused is not None:
            kernels["fused_loss"] += 1
            if tied := add_embeddings_in_place(model):
                kernels["tied_embedding"] = tied
        return _GradientGraph(model, info, built.fused, kernels)

    def _recomputed(
        self,
        memory: MemoryOptimizer | BlockRecomputation,
        graph: _GradientGraph,
        exported: ExportedModule,
        process: ProcessKey,
        sizes: dict[str, int],
        parameters: dict[str, Any],
    ) -> tuple[_GradientGraph, Decision | None]:
        """Return the gradient graph that computes activations again, and the plan for it.

        Where that suits the budget better, it is another graph: with head and loss in one node.
        """
        partitioned = {name for name, p in parameters.items() if is_partitioned(p)}
        leave = parameters if self.memory_efficient_gradients else partitioned
        about: dict[str, Any] = {"partitioned": partitioned, "released": [f"{name}_grad" for name in leave]}
        decision: Decision | None
        if not isinstance(memory, MemoryOptimizer):
            graph.model, decision = memory.recompute(self.manager, graph.model, graph.info, sizes, **about)
            return graph, decision
        logits = self._logits(exported, sizes) if graph.fused is None else 0
        try:
            graph.model, decision = memory.recompute(
                self.manager, graph.model, graph.info, sizes, **about, logits=logits
            )
        except LogitsTooLargeError as refused:
            get_logger().info(
                "%s: head and loss are one node, for the budget of %s: %s",
                type(self.module).__name__, binary_size(refused.budget), refused.why,
            )  # fmt: skip
            graph = self._with_kernels(self.built(exported, process, fused=True))
            graph.model, decision = memory.recompute(
                self.manager, graph.model, graph.info, sizes, **about, refused=refused
            )
        return graph, decision

    def _wanted(self, exported: ExportedModule, process: ProcessKey) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the graph inputs whose gradient is wanted, and the arguments among them."""
        if not self.manager.training:
            return (), ()
        names = [name for name in exported.info.onnx_graph_input_names if name not in exported.only_read]
        inputs = tuple(name for name in process.inputs if name in names)
        flattened = self.manager.flattened_module
        held = chain(flattened.named_parameters(), flattened.named_buffers())
        trained = {name for name, tensor in held if tensor.requires_grad} | set(inputs)
        return tuple(name for name in names if name in trained), inputs

    def built(self, exported: ExportedModule, process: ProcessKey, *, fused: bool = False) -> BuiltModel:
        """Return ORT's gradient graph of an exported module; for inference, its forward graph.

        Args:
            exported: see :meth:`ort_zero.ortmodule.runtime.graph_builder.GraphBuilder.export`.
            process: what the gradient graph depends on.
            fused: head and loss become one node whatever `process` says and however small they are.
        """
        info = exported.info

        def build(more: frozenset[str] = frozenset()) -> BuiltModel:
            wanted, inputs = self._wanted(exported, process)
            asked = tuple(name for name in info.onnx_graph_input_names if name in more.union(wanted))
            model, changed = info.exported_model, None
            if fused or process.fused_loss:
                model, changed = self._fused(model, asked, exported.effects.results, any_size=fused)
            stays = ""
            if self.config.drop_padding and self.manager.training:
                model, stays = self._without_padding(model, exported)
            built = BuiltModel(*self.manager.build(model, info.onnx_graph_input_names, asked, inputs), changed, stays)
            if changed is not None and changed.returned is not None:
                built.info = without_zeros(built.info, changed.returned)
            without_gradients(built.model, more.difference(wanted))
            return built

        with self.timed("gradient graph"):
            try:
                return build()
            except Exception as error:
                if more := asked_for_twice(error, info.exported_model):
                    weights = frozenset(name for name, _ in self.manager.flattened_module.named_parameters())
                    return build(more & weights - exported.unreached - exported.only_read)
                # ORT wants a way from the results to each of them, where PyTorch leaves gradients out
                found = _UNREACHABLE.search(str(error))
                if found is None or found["name"] not in exported.unreached - exported.only_read:
                    raise
                exported.only_read |= exported.unreached
                return build()

    def _fused(
        self, model: bytes, trained: Sequence[str], results: int, *, any_size: bool
    ) -> tuple[bytes, FusedLoss | None]:
        """Return an exported model with head and loss in one node, and what that has changed; None where it has not."""
        least = 2 if any_size or self.config.fuse_loss == "on" else LARGE
        edited = onnx.load_model_from_string(model)
        fused = fuse_loss(
            edited, frozenset(trained), results=results, least_classes=least, small=self.memory is not None
        )
        return (model, None) if fused is None else (edited.SerializeToString(), fused)

    def _without_padding(self, model: bytes, exported: ExportedModule) -> tuple[bytes, str]:
        """Return an exported model that leaves padding out, and "", or the same model and why it does not."""
        if self.memory is not None:
            return model, "recomputation and checkpointed blocks count every token"
        if exported.readers:
            return model, "activations are recorded"
        if self.manager.device.type != "cpu":
            return model, "it is there for the CPU alone"
        edited = onnx.load_model_from_string(model)
        dropped = drop_padding(edited, fused_operators.ROWS_AND_LABELS, fused_operators.COPY)
        return edited.SerializeToString() if dropped.nodes else model, dropped.why_not

    def _logits(self, exported: ExportedModule, sizes: Mapping[str, int]) -> int:
        """Return how many logits a graph holds of which the memory plan may decide that they never exist at one time.

        Returns:
            1 where the sizes are not known; 0 where there are none, or the plan has nothing to decide.
        """
        automatic = isinstance(self.memory, MemoryOptimizer) and self.memory.request.mode == AUTO
        if self.config.fuse_loss != "auto" or self.manager.device.type != "cpu" or not automatic:
            return 0
        model = onnx.load_model_from_string(exported.info.exported_model)
        shape = shape_of_logits(model, results=exported.effects.results)
        if shape is None:
            return 0
        return math.prod(evaluate(str(size), sizes) or 0 for size in shape) or 1

    def _plan(self, model: onnx.ModelProto, parameters: dict[str, Any], training: bool) -> CollectivePlan | None:
        """Return which collectives a graph needs and where, None if it needs none."""
        partitioned = {name: p for name, p in parameters.items() if is_partitioned(p)}
        if partitioned:
            weights = _weights(partitioned)
            share = small_share(weights)
            near = min(gather_reduce.BUCKET_ELEMENTS, self._kept_weights().limits.reuse_distance)
            return plan_collectives(
                model, weights, training=training, merge_elements=max(share, near), one_by_one=near <= share
            )
        if not self.memory_efficient_gradients or not training:
            return None
        weights = _weights(parameters)
        merged = min(small_share(weights), gather_reduce.BUCKET_ELEMENTS)
        plan = plan_collectives(model, weights, training=True, gather=False, merge_elements=merged)
        return plan if plan.events else None

    def _kept_weights(self) -> KeptWeights:
        """Return where weights stay whole; who computes layers again has no memory for that."""
        kept = self.kept_weights
        return kept if self.memory is None else KeptWeights(GatherLimits(prefetch=kept.limits.prefetch))

    def _rewritten(
        self, model: onnx.ModelProto, plan: CollectivePlan, parameters: dict[str, Any], training: bool
    ) -> tuple:
        """Return the executor of the collectives, the graph with them, and the gradient of the trigger."""
        gather_reduce.register(ort_compat.register_function)
        memory = None
        if plan.gathers_weights and self.manager.device.type == "cpu":
            memory = GatherMemory(slab_of(self.module), len(plan.gathers()))
        store = (
            DeepSpeedParameters(memory.take if memory is not None else None)
            if plan.gathers_weights
            else PlainParameters()
        )
        executor = gather_reduce.CollectiveExecutor(plan, parameters, store, self._kept_weights(), self.sums, memory)
        if plan.gathers_weights:
            in_torch = {name for node in model.graph.node if node.op_type == "PythonOp" for name in node.input}
            executor.weights_read_in_torch = frozenset(in_torch & set(plan.weights))
        return executor, *insert_collectives(model, plan, executor=executor.number, training=training)

    def _model_info(
        self,
        exported: ExportedModule,
        model: onnx.ModelProto,
        parameters: dict[str, Any],
        wanted: Sequence[str],
        inputs: Sequence[str],
        executor: gather_reduce.CollectiveExecutor | None,
    ) -> PostExportProcessedModelInfo:
        flattened = self.manager.flattened_module
        buffers = dict(flattened.named_buffers())
        accessors: dict[str, Callable] = {name: _argument(name) for name in exported.info.onnx_graph_input_names}
        accessors.update({name: _buffer(flattened, name) for name in buffers})
        dtype = float_dtype(self.module)
        for place, name in exported.key.read.inputs.items():
            accessors[name] = self._attribute(place, dtype)
        if executor is not None:
            accessors[TRIGGER] = lambda _: executor.new_trigger(self.manager.device)
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
            build_result=pytree.unflatten,
        )

    def _session(
        self,
        run: PostExportProcessedModelInfo,
        model: onnx.ModelProto,
        info: Any,
        gradient: str | None,
        make_agent: Callable[[], Any],
    ) -> ort_compat.Session:
        index = {output.name: i for i, output in enumerate(model.graph.output)}
        gradients = {name: index[f"{name}_grad"] for name in run.onnx_graph_input_names_require_grad
                     if f"{name}_grad" in index}  # fmt: skip
        if gradient is not None:
            gradients[TRIGGER] = index[gradient]
        differentiable = [i for i, name in enumerate(run.onnx_graph_input_names) if name in gradients]
        gradient_map = [gradients[run.onnx_graph_input_names[i]] for i in differentiable]
        self.manager.follow_determinism()
        with self.timed("session"):
            agent = make_agent()
        return ort_compat.Session(model, info, agent, differentiable, gradient_map, ort_compat.has_gradients(model))

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _attribute(self, place: Place, dtype: torch.dtype) -> Callable[[Any], torch.Tensor]:
        """Return what takes an attribute for an input of a run."""
        return lambda _: as_tensor(self.attribute_guard.value(place), dtype, self.manager.device)

    def _save(self, model: onnx.ModelProto) -> None:
        """Write the graph that runs into the folder that the configuration names. Rank 0 only."""
        if self.config.save_onnx is None or env.rank() != 0:
            return
        folder = Path(self.config.save_onnx)
        os.makedirs(folder, exist_ok=True)
        onnx.save(model, folder / f"rewritten_{self.manager.mode}.onnx")

    def timed(self, step: str) -> Timed:
        """Note the seconds of a block, and show on the bar what it does."""
        return Timed(self.seconds, step, self.shown)


TRACE = "trace"
"""The step in which the module runs in PyTorch for the exporter: once for its results, once recorded."""
SHARED = "shared export"
"""The step in which the export of another graph is taken over, in place of the exporter's conversion."""

STEPS = ("export", "shapes", "gradient graph", "session")
"""The steps that every graph takes that is in no cache."""


class Timed:
    """Notes how many seconds its block takes."""

    def __init__(self, seconds: dict[str, float], step: str, shown: Steps | None = None):
        self.seconds, self.step, self.shown = seconds, step, shown

    def __enter__(self) -> None:
        self.started = time.perf_counter()
        if self.shown is not None:
            self.shown.begin(self.step)

    def __exit__(self, *about: Any) -> None:
        self.seconds[self.step] = time.perf_counter() - self.started
        if self.shown is not None and self.step in STEPS:
            self.shown.end()


def sizes_by_symbol(axes: Mapping[str, Mapping[int, str]], call: pytree.Call) -> dict[str, int]:
    """Return the sizes of the named dimensions in a call."""
    shapes = {name: tensor.shape for name, tensor in zip(call.names, call.tensors, strict=True)}
    return {
        dim: int(shapes[name][axis]) for name, named in axes.items() if name in shapes for axis, dim in named.items()
    }


def _argument(name: str) -> Callable[[Any], Any]:
    return lambda tensors: tensors[name]


def _buffer(module: torch.nn.Module, name: str) -> Callable[[Any], Any]:
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    # users may put another tensor in its place
    return lambda _: buffer_table(owner)[key]


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
