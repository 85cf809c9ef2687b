"""Graphs of earlier runs: what a graph was made from and what it consists of, as entries of an export cache."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from ort_zero import env
from ort_zero.log import get_logger
from ort_zero.ortmodule.compat import ortmodule as ort_compat
from ort_zero.ortmodule.compat.torch_onnx import TraceRecord
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.built_graph import BuiltModel, ExportedModule
from ort_zero.ortmodule.runtime.export import autograd_functions, pytorch_calls
from ort_zero.ortmodule.runtime.export.attribute_paths import Place
from ort_zero.ortmodule.runtime.export.buffer_changes import BufferChange
from ort_zero.ortmodule.runtime.export.checkpoint_marks import MARK, BlockMark
from ort_zero.ortmodule.runtime.export.dropout_seeds import with_run_seed
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.export.pytree import Call
from ort_zero.ortmodule.runtime.export.tracer import Effects
from ort_zero.ortmodule.runtime.export_cache import cache_key as keys
from ort_zero.ortmodule.runtime.export_cache import serialization, size_guards
from ort_zero.ortmodule.runtime.export_cache.criteria import Criterion, criterion, digest_of
from ort_zero.ortmodule.runtime.export_cache.described import Describer
from ort_zero.ortmodule.runtime.export_cache.serialization import NotStorable
from ort_zero.ortmodule.runtime.export_cache.source_code import SourceCode, is_users
from ort_zero.ortmodule.runtime.export_cache.store import ExportCache, Found, Missed
from ort_zero.ortmodule.runtime.export_cache.written_places import (
    read_place,
    read_write,
    text_of,
    written_attributes,
    written_place,
    written_write,
)
from ort_zero.ortmodule.runtime.fused_loss.rewrite import FusedLoss, ReturnedLogits
from ort_zero.ortmodule.runtime.guards.attribute_guard import AttributeGuard, ReadValues
from ort_zero.ortmodule.runtime.guards.keys import ExportedModelInfo, Observed
from ort_zero.ortmodule.runtime.operators import aten_op
from ort_zero.ortmodule.runtime.operators.fallback_policy import FallbackPolicy

MOST_VARIANTS = 8
"""Maximum number of graphs of one model that are kept for different sizes."""


@dataclass(frozen=True, slots=True)
class StorableGraph:
    """A graph as plain values and bytes."""

    meta: dict[str, Any]
    blobs: dict[str, bytes]


class Lookup:
    """One graph that is looked for in the cache, and stored there if it has to be exported.

    Args:
        cache: the folder.
        module: the user's module, before anything is done for its export.
        manager: manager of the graph's mode.
        observed: the call.
        call: the same, taken apart.
        excluded: submodules that stay in PyTorch; a graph that has some has no meaning in another process.
        attribute_guard: guard on what the module's code reads besides its arguments.
        attribute_inputs: name of the graph input of each attribute that a new graph takes as an input.
        cache_key: the user's own part of the key, for what the cache cannot see.
        fuse_loss: the section's key of that name.
        drop_padding: the section's key of that name.

    Attributes:
        outcome: what came of it, for the log: ``"hit: ..."`` or ``"miss: ..."``.
    """

    def __init__(
        self,
        cache: ExportCache,
        module: torch.nn.Module,
        manager: ort_compat.Manager,
        observed: Observed,
        call: Call,
        excluded: ExcludedModules,
        attribute_guard: AttributeGuard,
        attribute_inputs: Mapping[Place, str],
        cache_key: str | None = None,
        fuse_loss: str = "off",
        drop_padding: bool = False,
    ):
        self._fuse_loss, self._drop_padding = fuse_loss, drop_padding
        self._attribute_guard = attribute_guard
        self._attribute_inputs = attribute_inputs
        self.cache = cache
        self.module = module
        self.manager = manager
        self.observed = observed
        self.outcome = ""
        self._loaded = set(sys.modules)
        self._criteria: dict[str, Criterion] | None = None
        self._variant = 0
        try:
            if excluded.reasons:
                raise NotStorable(f"{next(iter(excluded.reasons))} stays in PyTorch")
            if excluded.host_functions:
                raise NotStorable(f"{excluded.host_functions} in PyTorch")
            if observed.export.readers:
                raise NotStorable("subscribers read its values")
            describe = Describer(module)
            model = keys.model(module, describe)
            code = SourceCode(describe.modules(), module)
            self._criteria = {
                "model": model,
                "packages": keys.packages(code.packages),
                "options": criterion(self._options(cache_key)),
                "inputs": criterion(_inputs(observed, call)),
                "model code": code.criterion,
            }
        except NotStorable as why:
            self.outcome = f"not kept: {why}"

    def _options(self, cache_key: str | None) -> dict[str, Any]:
        process = self.observed.process
        return {
            **self.manager.export_options(),
            "memory plan": process.memory_plan,
            "deterministic": process.deterministic,
            "device": process.device,
            "fused loss": self._fuse_loss if process.fused_loss else "off",
            "drop padding": self._drop_padding,
            "default dtype": str(torch.get_default_dtype()),
            "autocast": str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off",
            "attribute inputs": sorted(self._attribute_inputs.values()),
            "cache_key": cache_key,
        }

    def find(self, routes: FallbackPolicy) -> tuple[ExportedModule, BuiltModel] | None:
        """Return the exported module and its gradient graph, as another process stored them; None for a miss."""
        if self._criteria is None:
            return None
        found: Found | Missed = Missed("")
        for variant in range(MOST_VARIANTS):
            self._variant = variant
            found = self.cache.find(self._varied(), self.manager.mode)
            if not isinstance(found, Found) or self._fits(found):
                break
        if not isinstance(found, Found):
            self.outcome = f"miss: {found.why}" if not self._variant else "miss: the entries are for other sizes"
            return None
        try:
            result = self._restored(found, routes)
        except Exception as error:
            # nothing that a file says is trusted: what does not fit is exported again
            self.outcome = f"miss: {found.path.name} cannot be used ({type(error).__name__}: {error}), ignored"
            return None
        self.outcome = f"hit: {found.compared}"
        return result

    def _varied(self) -> dict[str, Criterion]:
        """Return the criteria of the entry that is looked at: one graph may have several, for different sizes."""
        assert self._criteria is not None
        if not self._variant:
            return self._criteria
        return {**self._criteria, "sizes": criterion({"variant": str(self._variant)})}

    def _fits(self, found: Found) -> bool:
        """Return whether the sizes of the call lead Python code where those of an entry's trace did."""
        try:
            return size_guards.read(found.meta["sizes"]).holds(self.observed.export.shapes)
        except Exception:
            return True  # damaged: an error says so when the whole is read

    def storable(self, exported: ExportedModule, built: BuiltModel, routes: FallbackPolicy) -> StorableGraph | None:
        """Return what there is to store, before the graph is edited; None if it would mean nothing to another run."""
        if self._criteria is None:
            return None
        try:
            for name in sys.modules.keys() - self._loaded:
                if is_users(name):
                    raise NotStorable(f"{name} was imported while the module ran")
            meta = self._meta(exported, built, routes)
        except NotStorable as why:
            self.outcome = "; ".join(filter(None, (self.outcome, f"not kept: {why}")))
            return None
        blobs = {"exported": exported.info.exported_model, "built": built.model.SerializeToString()}
        if exported.whole is not None:
            blobs["whole"] = exported.whole
        return StorableGraph(meta, blobs)

    def store(self, graph: StorableGraph | None) -> None:
        """Store what had to be exported, for later runs."""
        if graph is not None and self._criteria is not None:
            self.cache.store(self._varied(), self.manager.mode, graph.meta, graph.blobs)

    # -- to and from plain values ----------------------------------------------------------------------------------

    def _meta(self, exported: ExportedModule, built: BuiltModel, routes: FallbackPolicy) -> dict[str, Any]:
        info, effects = exported.info, exported.effects
        if effects.views is not None:
            raise NotStorable("a result of the forward is a view of another tensor")
        if effects.modes or effects.switched:
            raise NotStorable("the forward leaves a module in another mode, or a parameter frozen")
        if exported.key.gradients is not None:
            raise NotStorable("the forward asks what requires grad")
        paths = {id(child): path for path, child in self.module.named_modules()}
        return {
            "result": serialization.encode(info.module_forward_output_schema, "result"),
            "names": list(info.onnx_graph_input_names),
            "arguments": list(info.onnx_graph_input_names_user_defined),
            "axes": {name: list(axes.items()) for name, axes in info.dynamic_axes_map.items()},
            "differentiable": sorted(exported.differentiable),
            "unreached": sorted(exported.unreached),
            "results": effects.results,
            "changed": effects.changed,
            "changed with gradient": effects.changed_with_gradient,
            "carried over": [(written_place(place), in_place) for place, in_place in effects.attributes],
            "buffers": [(paths[id(change.owner)], change.name) for change in effects.buffers],
            "written": effects.written,
            "complex": effects.complex,
            "dtypes": [serialization.encode(dtype) for dtype in effects.dtypes],
            "writes": [written_write(write) for write in effects.writes],
            "guards": [
                (value, paths.get(id(read.module)), str(read), read.random, read.of_attribute)
                for value, read in effects.guards
            ],
            "counting": [paths[id(child)] for child in effects.counting],
            "attributes": written_attributes(exported.key.read),
            "sizes": size_guards.written(exported.key.size_guard),
            "operators": _operators(built.model),
            "taken": routes.reasons,
            "without symbolic": routes.without_symbolic,
            "info": asdict(built.info),
            "fused loss": None if built.fused is None else _written_fused(built.fused),
            "padding stays": built.padding_stays,
            "shares": exported.shares,
            "trace": None if exported.trace is None else asdict(exported.trace),
        }

    def _restored(self, found: Found, routes: FallbackPolicy) -> tuple[ExportedModule, BuiltModel]:
        meta = found.meta
        modules = dict(self.module.named_modules())
        info = ExportedModelInfo(
            module_forward_output_schema=serialization.decode(meta["result"]),
            onnx_graph_input_names=tuple(meta["names"]),
            onnx_graph_input_names_user_defined=tuple(meta["arguments"]),
            dynamic_axes_map={name: {int(axis): dim for axis, dim in axes} for name, axes in meta["axes"].items()},
            exported_model=found.blobs["exported"],
        )
        effects = Effects(
            results=int(meta["results"]),
            changed=[int(i) for i in meta["changed"]],
            changed_with_gradient=[int(i) for i in meta.get("changed with gradient", ())],
            attributes=[(read_place(*written), in_place) for written, in_place in meta["carried over"]],
            buffers=[BufferChange(modules[path], name) for path, name in meta["buffers"]],
            writes=[read_write(written) for written in meta.get("writes", ())],
            written=int(meta.get("written", 0)),
            complex=[int(i) for i in meta.get("complex", ())],
            dtypes=[serialization.decode(dtype) for dtype in meta.get("dtypes", ())],
            guards=[
                (value, ValueReadError.again(modules.get(path), words, *flags))
                for value, path, words, *flags in meta["guards"]
            ],
            counting=[modules[path] for path in meta["counting"]],
        )
        built = BuiltModel(
            onnx.load_model_from_string(found.blobs["built"]),
            ort_compat.GraphInfo(**meta["info"]),
            _read_fused(meta.get("fused loss")),
            meta.get("padding stays", ""),
        )
        for name, written in meta["operators"].items():
            operator = serialization.decode(written)
            if aten_op.function_for(operator)[0] != name:
                raise ValueError(f"{name} is another operator")
            ort_compat.register_function(*aten_op.function_for(operator))
        if MARK in _functions(built.model):
            # the graph is optimized before the marks are taken out
            ort_compat.register_function(MARK, BlockMark)
        missing = _functions(built.model) - set(meta["operators"]) - {MARK}
        if missing:
            raise ValueError(f"{sorted(missing)[0]} is not described")
        sizes = size_guards.read(meta["sizes"])
        if not sizes.holds(self.observed.export.shapes):
            raise ValueError("it is for other sizes")
        key = dataclasses.replace(
            self.observed.export, attributes=self._read_values(meta["attributes"]), sizes=sizes, gradients=None
        )
        routes.reasons.update(meta["taken"])
        routes.without_symbolic.update(meta.get("without symbolic", {}))
        exported = ExportedModule(
            key,
            info,
            effects,
            frozenset(meta["differentiable"]),
            unreached=frozenset(meta.get("unreached", ())),
            trace=_read_trace(meta.get("trace")),
            shares=bool(meta.get("shares")),
            whole=found.blobs.get("whole"),
        )
        return exported, built

    def _read_values(self, written: dict[str, Any]) -> ReadValues:
        """Return what the graph was traced with, as it is in this process.

        Raises:
            ValueError: a global has another value.
        """
        places = [read_place(root, steps) for root, steps, *_ in written["places"]]
        inputs = {places[i]: name for i, name in written["inputs"]}
        readers = {place: paths for place, (_, _, paths, _) in zip(places, written["places"], strict=True)}
        kinds = [places[i] for i in written.get("kinds", ())]
        read = self._attribute_guard.watch(readers, inputs, [places[i] for i in written["whole"]], kinds)
        for place, (*_, then) in zip(places, written["places"], strict=True):
            now = text_of(place, read)
            if now != then:
                raise ValueError(f"{place.named(type(self.module).__name__)} is {now}, and was {then}")
        return read


def _read_trace(written: dict[str, Any] | None) -> TraceRecord | None:
    """Return the record of a trace that was written as a dictionary; None for none."""
    if written is None:
        return None
    return TraceRecord(
        inputs=tuple(written["inputs"]),
        results=tuple(written["results"]),
        spare=int(written["spare"]),
        digest=str(written["digest"]),
        nodes=tuple(written["nodes"]),
        gradients=str(written["gradients"]),
        dropout=tuple(map(float, written["dropout"])),
    )


def _written_fused(fused: FusedLoss) -> list[int]:
    """Return what a node of head and loss has changed as plain values."""
    return [] if fused.returned is None else list(astuple(fused.returned))


def _read_fused(written: list[int] | None) -> FusedLoss | None:
    """Return what :func:`_written_fused` wrote."""
    if written is None:
        return None
    return FusedLoss(ReturnedLogits(*(int(number) for number in written)) if written else None)


def _inputs(observed: Observed, call: Call) -> dict[str, Any]:
    named = {tensor.name: f"{tensor.dtype}, rank {tensor.rank}" for tensor in observed.export.tensors}
    wanted = {name: "requires grad" for name in observed.process.inputs}
    return {**named, **{f"{name} (gradient)": words for name, words in wanted.items()},
            "structure": serialization.encode(call.structure)}  # fmt: skip


def _functions(model: onnx.ModelProto) -> set[str]:
    """Return the names of the autograd Functions that a graph runs."""
    return {
        a.s.decode() for node in model.graph.node if node.op_type in ("PythonOp", "PythonOpGrad")
        for a in node.attribute if a.name in ("func_name", "name")
    }  # fmt: skip


def _operators(model: onnx.ModelProto) -> dict[str, Any]:
    """Return what the PythonOps of a graph run, by name.

    Raises:
        NotStorable: one of them is a user's autograd Function, known to this process only.
    """
    found = {}
    for name in sorted(_functions(model) - {MARK}):
        operator = aten_op.operator_named(name)
        if operator is None:
            raise NotStorable(f"the graph runs {name}")
        calls = {module.OPERATOR: module for module in (autograd_functions, pytorch_calls)}.get(operator.name)
        if calls is not None:
            raise NotStorable(f"the graph runs {calls.CALLS.numbered(operator.arguments[-1][1].value).name}")
        found[name] = serialization.encode(operator, "operator")
    return found


def _function_of(operator: aten_op.Operator | None) -> str | None:
    """Return the name of the user's autograd Function that an operator calls."""
    if operator is None:
        return None
    number = next(argument.value for _, argument in operator.arguments if isinstance(argument, aten_op.Constant))
    return autograd_functions.CALLS.numbered(number).name


def session_of(
    cache: ExportCache | None,
    manager: ort_compat.Manager,
    model: onnx.ModelProto,
    info: ort_compat.GraphInfo,
    *,
    seed: int,
    in_order: bool = False,
) -> Any:
    """Return the agent that runs `model`; with a cache, ORT optimizes each model once.

    Args:
        cache: folder of graphs of earlier runs.
        manager: manager of the graph's mode.
        model: before its random numbers are those of this run.
        info: what ORT knows of it.
        seed: decides what the nodes draw, see :func:`run_seed`; one more is what the next run of this agent draws.
        in_order: ORT has optimized the model, and its nodes run in their order.
    """
    if in_order:
        ready = with_run_seed(model, seed).SerializeToString()
        return manager.create_session(model, info, optimized=ready, in_order=True)
    if cache is None or manager.device.type != "cpu":
        return manager.create_session(with_run_seed(model, seed), info)
    data = model.SerializeToString()
    about = (keys.packages().digest, sorted(manager.export_options().items()), manager.mode)
    digest = digest_of(data + repr(about).encode())
    optimized = cache.find_blob(digest)
    if optimized is None:
        with tempfile.TemporaryDirectory(prefix="ort_zero-") as folder:
            target = Path(folder) / "optimized.onnx"
            agent = manager.create_session(model, info, write_to=str(target))
            if not target.exists():
                return agent
            optimized = target.read_bytes()
            cache.store_blob(digest, optimized)
    try:
        ready = with_run_seed(onnx.load_model_from_string(optimized), seed).SerializeToString()
        return manager.create_session(model, info, optimized=ready)
    except Exception as error:
        get_logger().info("export cache: an optimized model cannot be used (%s), ignored", error)
        return manager.create_session(with_run_seed(model, seed), info)


def run_seed() -> int:
    """Return the seed of a new session: another one on each rank, and for each seed of torch."""
    # ranks draw independent masks, as they do not share their batches; a node's seed grows by one with each run, so
    # that seeds close to each other would draw the same masks some steps later
    return zlib.crc32(f"{torch.initial_seed()}, rank {env.rank()}".encode())
