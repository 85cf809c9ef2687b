"""Compile captured graphs: a graph of Dynamo goes in, and a callable that runs it in ONNX Runtime comes out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from ort_zero import env, log
from ort_zero.compat import compiled_backward
from ort_zero.compat.torch_graphs import Symbols, flops_of, is_below
from ort_zero.errors import ExportError
from ort_zero.ortmodule import memory, statistics
from ort_zero.ortmodule.checking import check
from ort_zero.ortmodule.function import Halves, OrtGraphFunction, in_orders, kept_bytes
from ort_zero.ortmodule.graphs.capture import CapturedGraph, capture
from ort_zero.ortmodule.graphs.values import value_of
from ort_zero.ortmodule.records import OrtGraphRecord
from ort_zero.ortmodule.upstream.building import build
from ort_zero.ortmodule.upstream.sessions import Session, SessionError
from ort_zero.ortmodule.upstream.symbolics import SYMBOLICS
from ort_zero.units.result_groups import compile_parts, divided
from ort_zero.units.unit_forward import IN_GRAPH

Compiled = Callable[..., Any]
_SIZES = 64
"""Number of combinations of sizes whose first run is checked."""


class OrtGraphCompiler:
    """Compiles the graphs of one class of units; as :class:`ort_zero.units.engine.GraphCompiler`.

    Args:
        engine: the :class:`~ort_zero.ortmodule.engine.OrtEngine` of the model, which gets what was compiled.
        unit: name of the units' class.
        exclude: paths of submodules, from the unit on, that stay in PyTorch.
    """

    def __init__(self, engine: Any, unit: str, exclude: tuple[str, ...]):
        self._engine, self._unit, self._exclude = engine, unit, exclude
        self._raises = engine.settings.raises
        self.recompilations = engine.recompilations_of(unit)

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
        """Return a function that runs a graph of Dynamo.

        Raises:
            ExportError: ONNX Runtime cannot run the graph, and the settings ask for an error.
        """
        self._engine.dynamo_graphs += 1
        return self._compile(module, example_inputs, self.recompilations.note_graph())

    def forward_of(self, unit: nn.Module, compiled: Compiled) -> Compiled:
        """Return the compiled forward of the unit's class."""
        return compiled

    def _compile(self, module: fx.GraphModule, inputs: Sequence[Any], reason: str | None) -> Compiled:
        for node, example in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta.setdefault("example_value", example)
        calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        excluded = {node for node in calls if self._exclude and is_below(node, self._exclude)}
        if excluded.issuperset(calls):
            return module
        if excluded:
            return compile_parts(_apart(module, excluded), inputs, lambda part, of: self._compile(part, of, reason))
        graph = OrtGraphRecord(
            direction="forward" if torch.is_grad_enabled() else "inference",
            unit=self._unit,
            recompile_reason=reason,
            number=len(self._engine.graphs),
        )
        try:
            if compiled_backward.names_missing_gradients():
                raise ExportError("an autograd.Function tells missing gradients from zeros (set_materialize_grads)")
            parts = divided(module) if torch.is_grad_enabled() else None
        except ExportError as error:
            statistics.observe_in_graph(module)
            self._engine.add(graph)
            leave_to_torch(graph, error, self._raises)
            return module
        if parts is not None:
            return compile_parts(parts, inputs, lambda part, of: self._compile(part, of, reason))
        self._engine.add(graph)
        is_observed = statistics.observe_in_graph(module)
        with statistics.muted():
            graph.flops = flops_of(module, [value_of(node) for node in module.graph.find_nodes(op="placeholder")])
            try:
                captured = capture(module, is_observed)
            except Exception as error:  # an operator without a fake kernel raises what it likes
                leave_to_torch(graph, error, self._raises)
                return module
        return OrtGraph(captured, graph, self._engine)


def _apart(module: fx.GraphModule, excluded: set[fx.Node]) -> fx.GraphModule:
    """Return a module that calls parts of a graph in order: excluded nodes are in parts of their own."""
    parts: dict[fx.Node, int] = {}
    number, before = 0, None
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        number += before is not None and (node in excluded) is not before
        before = node in excluded
        parts[node] = number
    return split_module(module, module, lambda node: parts.get(node, 0), keep_original_order=True)


def leave_to_torch(graph: OrtGraphRecord, error: Exception, raises: bool) -> None:
    """Have PyTorch run a graph from now on, and say why.

    Raises:
        ExportError: `raises` is True.
    """
    kind = "" if isinstance(error, ExportError) else f"{type(error).__name__}: "
    text = " ".join(f"{kind}{error}".split())
    graph.reason = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
    graph.halves = graph.inference = None
    if raises:
        failure = ExportError(f'{graph.unit}: {graph.reason}; set "fallback": "warn" to run the graph in PyTorch')
        setattr(failure, IN_GRAPH, True)
        raise failure from error
    log.get_logger().warning("PyTorch runs a graph of %s on this rank: %s", graph.unit or "the function", graph.reason)


class OrtGraph:
    """Runs one graph: built at its first run, and checked there and at the first run of each combination of sizes.

    Args:
        captured: the graph.
        graph: the record of the graph.
        engine: counts the runs.
    """

    def __init__(self, captured: CapturedGraph, graph: OrtGraphRecord, engine: Any):
        self._captured, self._graph, self._engine, self._settings = captured, graph, engine, engine.settings
        self._checked: set[Symbols] = set()
        self._is_checking = False

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        """Return the results of the graph."""
        captured, graph = self._captured, self._graph
        if captured.is_training:
            self._engine.end_step()
        if graph.reason is None and len(self._checked) < _SIZES:
            symbols = captured.sizes.symbols(arguments)
            if symbols not in self._checked:
                self._prepare(arguments)
                self._checked.add(symbols)
        self._engine.runs["forward" if captured.is_training else "inference"] += 1
        if graph.reason is not None:
            return captured.original(*arguments)
        state = torch.get_rng_state() if captured.draws.fakes() else None
        try:
            return self._run(*arguments)
        except SessionError as error:
            failure = error
        if state is not None:
            torch.set_rng_state(state)
        results = captured.original(*arguments)  # raises where the inputs are wrong
        leave_to_torch(graph, failure, self._settings.raises)
        return results

    def _run(self, *arguments: Any) -> Sequence[torch.Tensor]:
        captured = self._captured
        inputs = captured.inputs(arguments)
        if self._graph.halves is not None:
            computed = OrtGraphFunction.apply(self._graph.halves, *inputs)
        else:
            session, places = self._inference
            computed = in_orders(session.run([inputs[place] for place in places]), captured.orders)
        if captured.rest is None:
            return computed
        results = dict(zip(captured.computed, computed))
        rest = iter(captured.rest(*arguments))
        return [results[i] if i in results else next(rest) for i in range(len(captured.differentiable))]

    def _prepare(self, arguments: Sequence[Any]) -> None:
        """Build the graph before its first run, and check a run; leave the graph to PyTorch where that fails."""
        graph = self._graph
        self._is_checking = True
        try:
            with statistics.muted():
                self._build_and_check(arguments)
        except Exception as error:  # whatever the exporter, upstream's builder or ONNX Runtime raises
            leave_to_torch(graph, error, self._settings.raises)
        finally:
            self._is_checking = False

    def _build_and_check(self, arguments: Sequence[Any]) -> None:
        graph, begin = self._graph, time.perf_counter()
        if not graph.sessions():
            self._build(arguments)
            graph.build_seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        without = check(self._captured, self._run, arguments)
        graph.checked_runs += 1
        graph.check_seconds += time.perf_counter() - begin
        if graph.halves is not None:
            graph.halves.leave_out([i for i, place in enumerate(self._captured.places) if place in without])

    def _build(self, arguments: Sequence[Any]) -> None:
        captured, graph = self._captured, self._graph
        state = torch.get_rng_state()
        inputs = captured.inputs(arguments)
        torch.set_rng_state(state)
        options = replace(self._settings.build, name=f"{graph.unit or 'graph'}_{graph.number}")
        axes = captured.input_axes, captured.result_axes
        built = build(captured.module, inputs, axes, captured.is_training, SYMBOLICS, options)
        functions = [node for node in built.model.graph.node if node.op_type.startswith("PythonOp")]
        if functions and not captured.is_observed:
            raise ExportError(f"{functions[0].name} is an autograd.Function; exclude the module that calls it")
        if captured.is_training:
            if self._settings.recompute is not None and built.with_plan is not None:
                kept = functools.partial(kept_bytes, built, inputs)
                model, graph.recomputation = memory.choose(
                    graph.unit, self._settings.recompute, built.table, built.with_plan, kept
                )
                built = replace(built, model=model)
                log.get_logger().info("%s", graph.recomputation.text())
            differentiable = [captured.differentiable[index] for index in captured.computed]
            graph.halves = Halves(built, inputs, differentiable, captured.orders, self._note_backward)
            halves = {"forward": graph.halves.forward, "backward": graph.halves.backward}
            for name, session in halves.items() if options.save_onnx is not None and env.rank() == 0 else ():
                session.save(Path(options.save_onnx or "") / f"{options.name}_{name}.onnx")
        else:
            graph.inference = Session(built.model)
            self._inference = graph.inference, [built.places[name] for name in graph.inference.inputs]

    def _note_backward(self) -> None:
        if not self._is_checking:
            self._engine.runs["backward"] += 1
