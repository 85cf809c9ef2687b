"""Compile graphs of Dynamo for ONNX Runtime."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ort_zero import env, log
from ort_zero.compat import compiled_backward, torch_compile
from ort_zero.compat.torch_graphs import SizeReader, is_below
from ort_zero.compat.transformers_gelu import replace_gelus
from ort_zero.compile import devices, sessions, view_chains
from ort_zero.compile.assembly import Assembled, assemble
from ort_zero.compile.conversion.fragments import Fragment
from ort_zero.compile.deferred_logits import DeferringHead, is_head
from ort_zero.compile.executor import SegmentRunner, program_of
from ort_zero.compile.head_loss import IN_PYTORCH, Product, Products, fuse_head_and_loss
from ort_zero.compile.memory import Kept
from ort_zero.compile.partition import decompositions
from ort_zero.compile.plan import Plan, Segment, make_plan
from ort_zero.compile.records import graph_record
from ort_zero.compile.trial import Trial
from ort_zero.errors import ExportError
from ort_zero.runtimes import observing
from ort_zero.runtimes.agreement import agreement
from ort_zero.runtimes.clocks import clock_of
from ort_zero.units.result_groups import compile_parts, divided
from ort_zero.units.unit_forward import IN_GRAPH
from ort_zero.utils.atomic_write import write_bytes

Compiled = Callable[..., Any]
_TRACED_OTHERWISE = frozenset({"hardshrink", "prod"})
"""Functions whose gradient a trace writes in another way than eager PyTorch computes it. A product's gradient depends
on the number of zeros, the gradient of ``hardshrink`` on the place of NaN."""


@dataclass(slots=True)
class GraphHalves:
    """What the compilations of the forward and the backward of one graph share."""

    kept: Kept | None = None
    returned: int | None = None
    """Number of results for the user, the first ones of the forward; None for all."""
    trial: Trial | None = None
    """The trial of the whole forward, where Inductor runs it."""


class Compiler:
    """Compiles the graphs of one class of units; Dynamo calls it once for each graph.

    Args:
        unit: name of the compiled module's class; empty for a function that the script compiles itself.
        exclude: paths of submodules, from the compiled module on, that stay in PyTorch.
    """

    keeps_all = True
    """Whether forwards keep all that backwards read, as in eager PyTorch: little of it is computed again for less."""

    def __init__(self, engine: Any, unit: str, exclude: tuple[str, ...]):
        self.engine, self.settings = engine, engine.settings
        self._unit, self._exclude = unit, exclude
        self._products: dict[Any, Products] = {}
        self.recompilations = engine.recompilations_of(unit)

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Compiled:
        """Return the compiled form of a graph of Dynamo."""
        self.engine.dynamo_graphs += 1
        if self._unit and compiled_backward.names_missing_gradients():
            raise ExportError("an autograd.Function in it tells missing gradients from zeros (set_materialize_grads)")
        reason = self.recompilations.note_graph()
        for passes in observing.passes:
            passes.follow_gradients(module)
        replace_gelus(module)
        if name := _traced_otherwise(module):
            if self._unit:
                raise ExportError(f"the gradient of {name} is another one in a trace than in eager PyTorch")
            return module
        fuse_head_and_loss(module, self.products_of, self.settings.loss_devices)
        try:
            parts = divided(module) if torch.is_grad_enabled() else None
        except ExportError:
            if self._unit:
                raise
            parts = None  # a compilation that the script itself asked for does what others do
        if parts is not None:
            return compile_parts(parts, example_inputs, lambda part, inputs: self._through_aot(part, inputs, reason))
        return self._through_aot(module, example_inputs, reason)

    def _through_aot(self, module: GraphModule, example_inputs: Sequence[Any], reason: str | None) -> Compiled:
        """Compile a graph of Dynamo, or a part of one, by AOTAutograd's graphs of its forward and its backward."""
        halves = GraphHalves(self.engine.memory.new_graph(self._unit))

        def divide(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
            halves.returned = options["num_fwd_outputs"]
            return self.engine.memory.divide(halves.kept, joint, inputs, keeps_all=self.keeps_all, **options)

        compiler = torch_compile.aot_autograd(
            fw_compiler=lambda graph, inputs: self._compile(graph, inputs, "forward", halves, reason),
            bw_compiler=lambda graph, inputs: self._compile(graph, inputs, "backward", halves),
            inference_compiler=lambda graph, inputs: self._compile(graph, inputs, "inference", GraphHalves(), reason),
            decompositions=self.decompositions,
            partition_fn=divide,
        )
        compiled = compiler(module, example_inputs)
        weakref.finalize(compiled, list(self._products.values()).clear)  # holds them as long as the graph lives
        return _with_gradients_of_pytorch(compiled, self.engine)

    @property
    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """The operators that are written by others before they are converted."""
        return decompositions()

    def forward_of(self, unit: nn.Module, compiled: Compiled) -> Compiled:
        """Return the compiled forward of a unit; of a head, one that leaves the logits to the loss."""
        where = self.settings.loss_devices
        if not where or not is_head(unit):
            return compiled
        return DeferringHead(compiled, self.products_of, self.engine.note_loss, where)

    def products_of(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Products:
        """Return functions for the three products of a head and its loss, each checked and placed like a segment."""
        on_cpu = weight.device.type == "cpu" and weight.dtype is torch.float32
        if not on_cpu or not all(isinstance(size, int) for size in weight.shape):
            return IN_PYTORCH  # elsewhere ONNX Runtime has no such kernels, or the same library
        key = (*weight.shape, bias is None, torch.get_num_threads())
        if key not in self._products:
            classes, width = weight.shape
            states, gradient = (None, width), (None, classes)
            linear = (states, (classes, width), *([] if bias is None else [(classes,)]))
            self._products[key] = Products(
                self._product(IN_PYTORCH.logits, *linear),
                self._product(IN_PYTORCH.for_hidden, gradient, (classes, width)),
                self._product(IN_PYTORCH.for_weight, gradient, states),
            )
        return self._products[key]

    def _product(self, function: Product, *shapes: Sequence[int | None]) -> Product:
        """Return a compiled function of float32 tensors of these shapes; None is the number of rows."""
        graph = torch_compile.graph_of(function, shapes, self.decompositions)
        program = self._compile(graph, (), "loss", GraphHalves())
        return lambda *tensors: program([tensor for tensor in tensors if tensor is not None])[0]

    def _compile(
        self, module: GraphModule, inputs: Sequence[Any], direction: str, halves: GraphHalves, reason: str | None = None
    ) -> Compiled:
        """Compile a graph for one direction; `inputs` are fake tensors with the strides that the graph will get."""
        prepare(module, direction)
        symbols = SizeReader([node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")])
        plan, runners = self._planned(module, device_of(module), symbols)
        graph = graph_record(plan, runners, direction, self._unit, reason)
        self.engine.add(graph)
        log.get_logger().log(log.DEVINFO, "%s, graph %d, %s", self._unit, self.recompilations.graphs, graph.text())
        returned = 0 if direction == "backward" else halves.returned
        kept = halves.kept if direction == "forward" else None
        return self._counted(program_of(module, plan, runners, symbols, returned), direction, kept)

    def _planned(
        self, module: GraphModule, device: torch.device | None, symbols: SizeReader
    ) -> tuple[Plan, list[SegmentRunner]]:
        """Return the plan of a graph and what runs its segments; PyTorch runs those that get no session."""
        widen = device is not None and devices.computes_in_float32(device)
        refused: dict[torch.fx.Node, str] = {}

        def refusal(node: torch.fx.Node) -> str | None:
            return "excluded" if self._exclude and is_below(node, self._exclude) else refused.get(node)

        while True:
            supports = functools.partial(_unsupported, device=device, symbols=symbols)
            plan = make_plan(module.graph, widen=widen, supports=supports, refusal=refusal)
            runners, before = [], len(refused)
            for segment in plan.steps:
                if isinstance(segment, Segment) and device is not None:
                    try:
                        runners.append(self._runner(segment, assemble(segment, plan.fragments, widen), device, symbols))
                    except Exception as error:  # ONNX Runtime's exceptions have no public base class
                        refused.update(dict.fromkeys(segment.nodes, f"no session: {' '.join(str(error).split())}"))
            if len(refused) == before:
                return plan, runners

    def _counted(self, program: Compiled, direction: str, kept: Kept | None) -> Compiled:
        """Return the compiled form of a graph for AOTAutograd, which counts its runs and marks its errors."""
        runs = self.engine.runs

        def run(arguments: list[Any]) -> Any:
            runs[direction] += 1
            if kept is not None and not torch_compile.in_backward():
                kept.forwards += 1
            try:
                return program(arguments)
            except Exception as error:
                setattr(error, IN_GRAPH, True)
                raise

        return torch_compile.boxed(run)

    def _runner(
        self, segment: Segment, assembled: Assembled, device: torch.device, symbols: SizeReader
    ) -> SegmentRunner:
        key, serialized = sessions.serialize(assembled.model)
        trial = _trials.setdefault(
            (key, self.settings.verify, self.settings.place),
            Trial(key, self.settings.verify, self.settings.place, clock=clock_of(device)),
        )
        is_left = trial.starts_in_torch(agreement())
        session = None if is_left else sessions.session_of(assembled.model, key, serialized, device)
        if self.settings.save_onnx is not None and env.rank() == 0:
            folder = Path(self.settings.save_onnx)
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / f"{key}.onnx", serialized)
        return SegmentRunner(segment, assembled, session, trial, agreement(), symbols, self.settings.reproducer_folder)


_trials: dict[tuple[str, str, str], Trial] = {}
"""The trial of each unique segment of this process."""


def _traced_otherwise(module: GraphModule) -> str | None:
    """Return a function of a graph of Dynamo whose gradient a trace writes in another way; None if there is none."""
    for node in module.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name in _TRACED_OTHERWISE and getattr(node.meta.get("example_value"), "requires_grad", False):
            return name
    return None


def _with_gradients_of_pytorch(compiled: Compiled, engine: Any) -> Compiled:
    """Return a compiled graph whose backward has a gradient exactly where PyTorch's has one."""
    is_prepared = False

    @functools.wraps(compiled)
    def run(*arguments: Any) -> Any:
        nonlocal is_prepared
        if torch.is_grad_enabled():
            engine.end_step()
        results = compiled(*arguments)
        if (not is_prepared or compiled_backward.running.before is not None) and torch.is_grad_enabled():
            is_prepared = compiled_backward.prepare_backward(results) or is_prepared
        return results

    return run


def prepare(module: GraphModule, direction: str) -> None:
    """Simplify a graph of AOTAutograd, and note what torch leaves out."""
    if direction == "forward":
        torch_compile.allow_second_backwards()
    elif direction == "inference":
        for passes in observing.passes:
            passes.remove_pass_throughs(module.graph)
    view_chains.shorten(module.graph)
    for passes in observing.passes if direction != "loss" else ():
        passes.observe_operators(module.graph, direction)


def _unsupported(
    node: torch.fx.Node, fragment: Fragment, device: torch.device | None, symbols: SizeReader
) -> str | None:
    """Return why the device's provider cannot run a fragment, or None."""
    if device is None or devices.provider_of(device) is None:
        return f"ONNX Runtime has no provider for {device}"
    if _devices_of((node, *node.all_input_nodes)) - {device}:
        return f"a tensor that is not on {device}"
    if not all(symbols.knows_expression(expression) for expression in fragment.sizes.values()):
        return "a size that the inputs of the graph do not tell"
    return devices.unsupported(fragment, device)


def device_of(module: GraphModule) -> torch.device | None:
    """Return the device that a graph computes on; None without tensors, or with several devices beside the CPU."""
    seen = _devices_of(module.graph.nodes)
    if len(seen) > 1:
        seen.discard(torch.device("cpu"))
    return seen.pop() if len(seen) == 1 else None


def _devices_of(nodes: Iterable[torch.fx.Node]) -> set[torch.device]:
    """Return the devices of the tensors that nodes make."""
    return {value.device for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor)}
