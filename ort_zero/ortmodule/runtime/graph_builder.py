"""Exports a module, and has a graph built of it that can run; looks for both in the export cache first.

:class:`ort_zero.ortmodule.runtime.transitions.GraphTransitionManager` calls it. Nothing here communicates, but for the
recomputation plan that the memory optimizer shares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ort_zero.config import OrtModuleConfig
from ort_zero.errors import ExportError
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.compat import torch_onnx
from ort_zero.ortmodule.compat.shape_inference import TakenSizes
from ort_zero.ortmodule.compat.size_program import SizeProgram
from ort_zero.ortmodule.compat.torch_modules import (
    buffers_as_inputs,
    registrations_put_back,
    without_infrastructure_hooks,
)
from ort_zero.ortmodule.onnx_edit.node_edits import keep_results
from ort_zero.ortmodule.recompute.block_recomputation import BlockRecomputation
from ort_zero.ortmodule.recompute.optimizer import MemoryOptimizer
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph, ExportedModule
from ort_zero.ortmodule.runtime.export import pytree, structures
from ort_zero.ortmodule.runtime.export.attribute_inputs import AttributeInputs
from ort_zero.ortmodule.runtime.export.attribute_paths import Place
from ort_zero.ortmodule.runtime.export.attribute_state import AttributeState, unchanged_attributes
from ort_zero.ortmodule.runtime.export.autograd_functions import AutogradFunctions
from ort_zero.ortmodule.runtime.export.callables import callables_in
from ort_zero.ortmodule.runtime.export.captured_output import CapturedOutput
from ort_zero.ortmodule.runtime.export.checkpoint_marks import CheckpointedCalls
from ort_zero.ortmodule.runtime.export.dropout_seeds import seed_dropout
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.export.fake_weights import fake_weights, unchanged_buffers
from ort_zero.ortmodule.runtime.export.post_export_passes import (
    anchor_constant_results,
    bound_clips,
    complete_dropout,
    divide_sums,
    keep_ranges_as_indices,
    remove_casts_to_the_same_type,
    separate_repeated_inputs,
)
from ort_zero.ortmodule.runtime.export.tracer import Tracer
from ort_zero.ortmodule.runtime.export.unchanged_weights import UnchangedWeights
from ort_zero.ortmodule.runtime.export_cache.lookup import Lookup
from ort_zero.ortmodule.runtime.export_cache.store import ExportCache
from ort_zero.ortmodule.runtime.graph_processing import SHARED, TRACE, GraphProcessor, Timed, sizes_by_symbol
from ort_zero.ortmodule.runtime.guards.attribute_guard import NOTHING_READ, AttributeGuard, ReadValues
from ort_zero.ortmodule.runtime.guards.keys import ExportedModelInfo, Observed
from ort_zero.ortmodule.runtime.guards.size_guard import Axis, GuardedRead, SizeGuard, SizeRelations
from ort_zero.ortmodule.runtime.kernels import operators
from ort_zero.ortmodule.runtime.operators.fallback_policy import FallbackPolicy, infer_python_op
from ort_zero.ortmodule.runtime.shared_exports import ExportShared, SharedExports
from ort_zero.ortmodule.runtime.smaller_parts import SmallerParts
from ort_zero.ortmodule.runtime.zero3.gradient_sums import GradientSums
from ort_zero.ortmodule.statistics import graph_readers, reader_marks
from ort_zero.statistics.collect.subscribed_model import SubscribedModel
from ort_zero.utils.text import shortened
from ort_zero.zero3_hooks.hook_manager import paused


class GraphBuilder:
    """Builds the graphs of one mode of a model.

    Args:
        module: the user's module.
        config: the section's ``ortmodule`` part.
        manager: ORT's, of the mode.
        excluded: submodules that run in PyTorch.
        sums: sums of the gradients of all graphs of the model.
        cache: holds the graphs of earlier runs; None without one.
        memory_efficient_gradients: put reduce nodes into the training graph also where no weight is partitioned.
        memory: computes activations again; None for keeping all of them.
        attribute_guard: guard on what the module's code reads besides its arguments.
        shared: finds exports of other graphs of the model that serve a new one; None for none.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        config: OrtModuleConfig,
        manager: ort_compat.Manager,
        excluded: ExcludedModules,
        sums: GradientSums,
        cache: ExportCache | None,
        memory_efficient_gradients: bool,
        memory: MemoryOptimizer | BlockRecomputation | None = None,
        attribute_guard: AttributeGuard | None = None,
        shared: SharedExports | None = None,
    ):
        self.shared = shared or SharedExports(tuple)
        self.attribute_guard = attribute_guard or AttributeGuard(module)
        self.memory = memory if manager.training else None
        self._marks_checkpointed = isinstance(memory, BlockRecomputation)
        self._replaces_checkpointing = isinstance(memory, MemoryOptimizer) and memory.request.replaces_checkpointing
        self.module = module
        self.config = config
        self.manager = manager
        self.excluded = excluded
        self.functions = AutogradFunctions(module)
        checkpointed = isinstance(self.memory, BlockRecomputation)
        wanted = config.fuse_loss == "on" or (config.fuse_loss == "auto" and self.memory is None)
        self.fuses_loss = manager.training and wanted and not checkpointed
        """Whether graphs may have head and loss in one node from the start: checkpointed blocks are computed as they
        stand, and a memory plan chooses by itself, since a budget is a share of what the graph takes without it."""
        self.fallback_policy = FallbackPolicy(manager.training, ort_compat.register_function)
        self.smaller_parts = SmallerParts(module, excluded, self.fallback_policy)
        self.processor = GraphProcessor(
            module,
            config,
            manager,
            sums,
            cache,
            memory_efficient_gradients,
            self.memory,
            self.attribute_guard,
        )
        self.tracer: Tracer | None = None
        """Follows the export that runs, or the last one; None before the first."""
        self.output = CapturedOutput(hold=manager.level.exporter == "held")
        self.cache = cache
        self.lookup: Lookup | None = None
        """Looks up the graph that is being built, or the last one, in the export cache; None without one."""
        self.attribute_inputs: Mapping[Place, str] = {}
        """Name of the graph input of each attribute that new graphs take as an input."""
        self.not_written: list[str] = []
        """Names of the attributes that the forward writes and the graph cannot."""
        self.start_values: set[Place] = set()
        """Attributes and containers that the forward reads and writes: a trace begins with their values of the call."""
        self._state: AttributeState | None = None
        """Attributes as they were before the export that runs."""
        self.settled_attributes: set[Place] = set()
        """Attributes whose changes by the forward itself do not count."""
        self.counted_by_value: set[Place] = set()
        """Numbers that the forward changes for the next call, and of which each value has a graph of its own."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds that each step of the last graph took."""
        return self.processor.seconds

    @seconds.setter
    def seconds(self, seconds: dict[str, float]) -> None:
        self.processor.seconds = seconds

    # -- export ----------------------------------------------------------------------------------------------------

    def build(
        self,
        observed: Observed,
        call: pytree.Call,
        subscribers: Sequence[SubscribedModel],
        number: int,
        *,
        anew: bool = False,
    ) -> BuiltGraph:
        """Return a new graph for a call: from the export cache, or exported.

        Args:
            observed: keys of the call.
            call: the same call, taken apart.
            subscribers: who reads values in the graph.
            number: number of the new graph.
            anew: take neither the export cache's nor another graph's export: it may be what did not hold.

        Raises:
            ExportError: the module cannot run in ONNX Runtime.
        """
        self.shared.begin()
        self._refuse_unsupported()
        operators.register()  # graphs have some before kernels are replaced
        if self.cache is None:
            exported = self.export(observed, call, subscribers, anew=anew)
            return self.processor.process(exported, observed.process, number, call)
        with self._timed("cache"):
            self.lookup = Lookup(
                self.cache,
                self.module,
                self.manager,
                observed,
                call,
                self.excluded,
                self.attribute_guard,
                self.attribute_inputs,
                self.config.cache_key,
                self.config.fuse_loss,
                self.config.drop_padding,
            )
            found = None if anew else self.lookup.find(self.fallback_policy)
        if found is not None:
            return self.processor.process(found[0], observed.process, number, call, found[1])
        exported = self.export(observed, call, subscribers, anew=anew)
        built = self.processor.built(exported, observed.process)
        storable = self.lookup.storable(exported, built, self.fallback_policy)
        graph = self.processor.process(exported, observed.process, number, call, built)
        with self._timed("keep"):
            self.lookup.store(storable)  # not before: ORT may have no kernel for what it has built
        return graph

    def export(
        self, observed: Observed, call: pytree.Call, subscribers: Sequence[SubscribedModel], *, anew: bool = False
    ) -> ExportedModule:
        """Return the exported module, with its shapes inferred; see :meth:`build` for the arguments."""
        tracer = self.tracer = self._tracer(call, subscribers, all_inputs=True)
        try:
            try:
                traced = self._traced(tracer, observed, anew)
            except Exception:
                # PyTorch has no gradient of a loss for its target, and refuses one that wants it
                if tracer.trace_error is None or tracer.differentiable == wanted_of(call):
                    raise
                tracer = self.tracer = self._tracer(call, subscribers, all_inputs=False)
                traced = self._traced(tracer, observed, anew)
        except ExportShared as found:
            return self._shared(found, observed, tracer)
        return self._converted(traced, observed, tracer)

    def _converted(self, traced: tuple, observed: Observed, tracer: Tracer) -> ExportedModule:
        """Return what the exporter has made of a module, repaired and with shapes."""
        model, schema, axes = traced
        # ORTModule knows that of the first run, where what is computed from sizes is a constant
        schema = tracer.schema if tracer.schema is not None else schema
        complete_dropout(model)
        seed_dropout(model)
        only_read = frozenset(graph_readers.inputs_for_marks_alone(model) if tracer.readers else ())
        with self._timed("shapes"):
            model, taken = self.manager.process(model, infer_python_op, sizes_by_symbol(axes, tracer.call))
        remove_casts_to_the_same_type(model)
        divide_sums(model)
        bound_clips(model)
        keep_ranges_as_indices(model)
        anchor_constant_results(model)
        separate_repeated_inputs(model)
        relations = _relations(taken, axes, tracer.call)
        if not tracer.spare_results:
            return self._exported(model, schema, axes, relations, observed, tracer, only_read)
        whole = model.SerializeToString()
        keep_results(model, range(len(model.graph.output) - tracer.spare_results))
        exported = self._exported(model, schema, axes, relations, observed, tracer, only_read)
        exported.whole = whole
        return exported

    def _shared(self, found: ExportShared, observed: Observed, tracer: Tracer) -> ExportedModule:
        """Return a module whose trace is that of another graph, with that graph's export."""
        self.seconds[SHARED] = self.seconds.pop("export") - self.seconds.get(TRACE, 0.0)
        self.manager.save_shared(found.model)
        other = found.exported
        axes, relations = other.info.dynamic_axes_map, other.key.size_guard.relations
        exported = self._exported(found.model, tracer.schema, axes, relations, observed, tracer)
        exported.shares, exported.trace = True, None  # the model has some of the trace's results
        return exported

    def _exported(
        self,
        model: Any,
        schema: Any,
        axes: Mapping[str, Mapping[int, str]],
        relations: SizeRelations,
        observed: Observed,
        tracer: Tracer,
        only_read: frozenset[str] = frozenset(),
    ) -> ExportedModule:
        """Return an exported model with what its trace tells of the module."""
        names = tuple(given.name for given in model.graph.input)
        info = ExportedModelInfo(
            module_forward_output_schema=schema,
            onnx_graph_input_names=names,
            onnx_graph_input_names_user_defined=tuple(name for name in tracer.call.names if name in set(names)),
            dynamic_axes_map=axes,
            exported_model=model.SerializeToString(),
        )
        key = dataclasses.replace(
            observed.export,
            attributes=self._read_values(tracer),
            sizes=self._size_guard(tracer, relations),
            gradients=observed.export.gradients if tracer.asks_for_gradients else None,
        )
        return ExportedModule(
            key,
            info,
            tracer.effects,
            differentiable=tracer.differentiable.union(observed.process.inputs),  # buffers among them
            readers=tracer.readers,
            only_read=only_read,
            unreached=self._unreached(tracer),
            trace=self.shared.record,
        )

    def _unreached(self, tracer: Tracer) -> frozenset[str]:
        """Return the graph inputs that no backward through the results leads to; none if some leaf is unknown."""
        flattened = self.manager.flattened_module
        held = list(chain(flattened.named_parameters(), flattened.named_buffers()))
        if not tracer.leaves_reached.issubset(id(tensor) for _, tensor in held):
            return frozenset()
        names = {name for name, tensor in held if id(tensor) not in tracer.leaves_reached}
        return frozenset(names.union(tracer.call.names) - tracer.arguments_reached)

    def _read_values(self, tracer: Tracer) -> ReadValues:
        """Return the values of what Python code has read in a trace; the guard looks at them from now on."""
        reads = tracer.attributes
        if reads is None:
            return NOTHING_READ
        model = type(self.module).__name__
        names = [place.named(model) for place in tracer.not_written]
        new = [name for name in names if name not in self.not_written]
        self.not_written += new
        if new:
            get_logger().info(
                "%s: the forward writes what no run of the graph will (%s keep the values of before); return it",
                model, shortened(new),
            )  # fmt: skip
        paths = {id(module): path for path, module in self.module.named_modules()}
        # a module outside of the tree cannot stay in PyTorch by itself
        readers = {place: [paths.get(id(m), "") for m in read.readers] for place, read in reads.reads.items()}
        inputs = tracer.inputs.names if tracer.inputs else {}
        return self.attribute_guard.watch(readers, inputs, reads.whole, reads.kinds)

    def _size_guard(self, tracer: Tracer, relations: SizeRelations) -> SizeGuard:
        """Return the guard on what Python code has taken from sizes in a trace, and on what the operators take."""
        sizes = tracer.sizes
        if sizes is None:
            return SizeGuard(tuple(t.shape for t in tracer.call.tensors), SizeProgram(), (), relations)
        paths = {id(module): path for path, module in self.module.named_modules()}
        reads = [
            GuardedRead(read.step, read.kind, read.seen, read.expression, read.line, paths.get(id(read.module), ""))
            for read in sizes.reads
        ]
        return SizeGuard(sizes.shapes, sizes.program, reads, relations)

    def _tracer(self, call: pytree.Call, subscribers: Sequence[SubscribedModel], *, all_inputs: bool) -> Tracer:
        """Return what follows the export of a call.

        Args:
            call: the call.
            subscribers: who reads values in the graph.
            all_inputs: whether arguments are traced with gradients that want none in this call.
        """
        readers = [reader_marks.GraphReaders(model, self.module) for model in subscribers]
        context = self.output.passed_through
        training = self.manager.training
        # a module in eval mode is expected to return its caches, also where nobody wrote no_grad()
        drop_caches = training and self.module.training
        inputs = AttributeInputs(self.module, self.attribute_inputs, self.manager.device)
        return Tracer(
            training,
            call,
            pytree.parameters_of(self.module.forward),
            readers,
            drop_caches=drop_caches,
            all_inputs=all_inputs,
            pytorch_context=context,
            inputs=inputs if inputs.names else None,
            settled=self.settled_attributes,
            state=lambda: self._state,
            put_back=self.start_values,
            by_value=self.counted_by_value,
        )

    def _traced(self, tracer: Tracer, observed: Observed, anew: bool) -> tuple:
        """Return the exported model, the structure of its results, and the names of its dynamic axes.

        Raises:
            ExportShared: the export of another graph serves, unless `anew` wants none.
        """

        def compare(trace: Any) -> None:
            gradients = self.manager.training
            self.shared.take(trace, observed, tracer, gradients=gradients, look=not anew)

        flattened = self.manager.flattened_module
        self.fallback_policy.failed_place = None
        self.seconds.pop(TRACE, None)  # of a trace that was given up
        tracer.outside = self.excluded.changing_buffers()
        checkpointed = self._checkpointed_calls(tracer)
        with (
            self._timed("export"),
            registrations_put_back(self.module),
            self.output.captured(),
            paused(),
            without_infrastructure_hooks(self.module),
            tracer.unchanged_modes(self.module),
            checkpointed.traced(),
            self.excluded.as_operators(drop_caches=tracer.drop_caches),
            self.functions.as_operators(),
            torch_onnx.routing(self.fallback_policy),
            torch_onnx.traces_shown(compare),
            unchanged_buffers(flattened),
            buffers_as_inputs(flattened),
            unchanged_attributes(
                self.module,
                tracer.inputs.names if tracer.inputs else (),
                lambda: tracer.attributes,
                list(self.excluded.reasons),
                callables_in(structures.constants_in_call(tracer.call.structure)),
            ) as self._state,
            fake_weights(flattened),
            reader_marks.marking(tracer.readers),
            tracer.everything_trainable(flattened),
        ):
            tracer.weights = UnchangedWeights(flattened)
            try:
                traced = self.manager.export(tracer.graph_inputs)
            finally:
                tracer.weights.restore()
                self._state = None  # it holds what the attributes were
        self.seconds["export"] -= self.seconds.get(TRACE, 0.0)
        if checkpointed.called and self._replaces_checkpointing:
            self.manager.note_layerwise_recompute()
        if str in structures.types_in_call(tracer.call.structure):
            self.manager.note_text()
        return traced

    def _checkpointed_calls(self, tracer: Tracer) -> CheckpointedCalls:
        def same(tensor: torch.Tensor, marked: torch.Tensor) -> None:
            for readers in tracer.readers:
                readers.calls.set_same(tensor, marked)

        accepted = self._marks_checkpointed or self._replaces_checkpointing
        refuse = None if accepted else self._refuse_checkpointing
        return CheckpointedCalls(refuse, marked=self.manager.training and self._marks_checkpointed, same=same)

    def _refuse_unsupported(self) -> None:
        """Raise for a module that is known to fail, before minutes are spent on its export."""
        for name, parameter in self.module.named_parameters():
            if parameter.device.type == "cpu" and parameter.dtype in (torch.float16, torch.bfloat16):
                kind = str(parameter.dtype).removeprefix("torch.")
                key = "bf16" if parameter.dtype == torch.bfloat16 else "fp16"
                raise _of_all_parts(
                    f"parameter {name} is {kind}, and ONNX Runtime's CPU provider has no {kind} kernels for training; "
                    f'train in fp32 (drop "{key}" from the DeepSpeed config, or {key}=True from TrainingArguments or '
                    'SFTConfig, and load the model with dtype="float32"), use a GPU, '
                    'or set "ort_zero": {"ortmodule": {"enabled": false}}'
                )

    def _refuse_checkpointing(self) -> None:
        """Raise for a module that calls torch's activation checkpointing while it is traced."""
        raise _of_all_parts(
            f"{type(self.module).__name__} uses torch activation checkpointing, which an ONNX graph cannot contain: "
            'write "ort_zero": {"memory": {"checkpointing": "recompute"}} to let ONNX Runtime compute the checkpointed '
            "blocks again, or "
            "switch it off (model.gradient_checkpointing_disable(), or drop the call of checkpoint()) and let ONNX "
            'Runtime compute activations again ("ort_zero": {"memory": {"recompute": "auto", "budget": "..."}}), or '
            'run the model in PyTorch with "ort_zero": {"ortmodule": {"enabled": false}}'
        )

    def _timed(self, step: str) -> Timed:
        return self.processor.timed(step)


def _of_all_parts(text: str) -> ExportError:
    """Return an error that another way to divide the model does not cure."""
    error = ExportError(text)
    error.concerns_parts = True
    return error


def wanted_of(call: pytree.Call) -> frozenset[str]:
    """Return the names of the arguments that want a gradient in a call."""
    return frozenset(name for name, tensor in zip(call.names, call.tensors, strict=True) if tensor.requires_grad)


def _relations(taken: TakenSizes, axes: Mapping[str, Mapping[int, str]], call: pytree.Call) -> SizeRelations:
    """Return what a graph takes for granted of the shapes of a call's tensors."""
    numbers = {name: i for i, name in enumerate(call.names)}
    places = {
        symbol: Axis(numbers[name], axis, name)
        for name, named in axes.items()
        if name in numbers
        for axis, symbol in named.items()
    }
    return SizeRelations(
        tuple(tuple(places[symbol] for symbol in alike) for alike in taken.equal),
        tuple((places[symbol], size) for symbol, size in taken.fixed),
        tuple((places[symbol], size) for symbol, size in taken.least),
    )
