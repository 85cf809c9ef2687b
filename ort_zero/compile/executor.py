"""Run a planned graph: segments in ONNX Runtime, calls in PyTorch, each value freed after its last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ort_zero.compile.agreement import Agreement
from ort_zero.compile.assembly import Assembled
from ort_zero.compile.plan import Plan, Segment, TorchCall
from ort_zero.compile.reference import in_float64, reference_of, runnable
from ort_zero.compile.sessions import Session
from ort_zero.compile.sizes import Symbols, SymbolReader
from ort_zero.compile.trial import Runner, Trial

_MAX_LAYOUTS = 256
"""Number of combinations of sizes for which the sizes of a segment's edges are kept."""


class SegmentRunner:
    """Runs one segment of a graph in ONNX Runtime or in PyTorch, as its trial says.

    Args:
        segment: the segment.
        assembled: the segment's model.
        session: the session of the model.
        trial: the decision on the session's model.
        agreement: the decisions of all ranks.
        symbols: reads the graph's symbols.
    """

    def __init__(
        self,
        segment: Segment,
        assembled: Assembled,
        session: Session,
        trial: Trial,
        agreement: Agreement,
        symbols: SymbolReader,
    ):
        self.segment = segment
        self.trial = trial
        self.session = session
        self._agreement = agreement
        self._symbols = symbols
        self._inputs = assembled.inputs
        self._sizes = assembled.sizes
        self._edges = (*session.model.inputs, *session.model.outputs)
        self._reference: GraphModule | None = None
        self._layouts: dict[Symbols, tuple[tuple[int, ...], list[tuple[int, ...]], bool]] = {}

    @property
    def reference(self) -> GraphModule:
        """PyTorch's form of the segment."""
        if self._reference is None:
            self._reference = reference_of(self.segment)
        return self._reference

    def __call__(self, inputs: Sequence[Any], symbols: Symbols) -> Sequence[torch.Tensor]:
        """Return the results of the segment.

        Args:
            inputs: the values of ``segment.inputs``.
            symbols: the values of the graph's symbols.
        """
        trial = self.trial
        if trial.runner is Runner.TORCH:
            return self.reference(*inputs)
        sizes, shapes, empty = self._layouts.get(symbols) or self._layout(symbols)
        if empty:
            return self.reference(*inputs)

        def by_ort() -> Sequence[torch.Tensor]:
            return self.session.run([inputs[index] for index in self._inputs], sizes, shapes)

        return trial.run(
            by_ort, lambda: self.reference(*inputs), lambda: in_float64(self.reference, inputs), self._agreement
        )

    def _layout(self, symbols: Symbols) -> tuple[tuple[int, ...], list[tuple[int, ...]], bool]:
        """Return the values of the model's size inputs, the sizes of its results, and whether a tensor is empty."""
        shapes = [self._symbols.evaluate(edge.shape, symbols) for edge in self._edges]
        layout = (
            self._symbols.evaluate(self._sizes, symbols),
            shapes[len(self.session.model.inputs) :],
            any(0 in shape for shape in shapes),
        )
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[symbols] = layout
        return layout


class Program:
    """A planned graph that can be called with a list of its inputs, which the call empties.

    Args:
        module: the graph's module, for its attributes.
        plan: the plan of the graph.
        runners: the runner of each segment.
        symbols: reads the graph's symbols.
    """

    def __init__(self, module: GraphModule, plan: Plan, runners: Sequence[SegmentRunner], symbols: SymbolReader):
        self.runners = tuple(runners)
        self._symbols = symbols
        slots: dict[Node, int] = {}
        for node in plan.placeholders:
            slots[node] = len(slots)
        self._count_of_inputs = len(slots)
        results = output_nodes(plan)
        last = _last_uses(plan, set(results))
        waiting = iter(runners)
        self._steps: list[tuple[Any, Any, Any, tuple[int, ...]]] = []
        for index, step in enumerate(plan.steps):
            if isinstance(step, Segment):
                reads = tuple(slots[node] for node in step.inputs)
                writes = tuple(slots.setdefault(node, len(slots)) for node in step.outputs)
                function: Any = next(waiting)
            else:
                reads = ()
                writes = (slots.setdefault(step.node, len(slots)),)
                function = _torch_step(step.node, module, slots)
            freed = tuple(slots[node] for node in last.get(index, ()))
            self._steps.append((function, reads, writes, freed))
        self._size = len(slots)
        self._output = plan.output.args[0]
        self._slots = {node: slots[node] for node in results}

    def __call__(self, arguments: list[Any]) -> Any:
        """Return the graph's results."""
        symbols = self._symbols.read(arguments)
        values: list[Any] = [*arguments, *[None] * (self._size - self._count_of_inputs)]
        arguments.clear()
        for function, reads, writes, freed in self._steps:
            if isinstance(function, SegmentRunner):
                for slot, value in zip(writes, function([values[slot] for slot in reads], symbols)):
                    values[slot] = value
            else:
                values[writes[0]] = function(values)
            for slot in freed:
                values[slot] = None
        slots = self._slots
        return map_arg(self._output, lambda node: values[slots[node]])


def output_nodes(plan: Plan) -> tuple[Node, ...]:
    """Return the nodes whose results the graph returns."""
    return tuple(dict.fromkeys(plan.output.all_input_nodes))


def _reads(step: Segment | TorchCall) -> Iterable[Node]:
    return step.inputs if isinstance(step, Segment) else step.node.all_input_nodes


def _last_uses(plan: Plan, kept: set[Node]) -> dict[int, list[Node]]:
    """Return the nodes whose results are freed after each step."""
    last: dict[Node, int] = {}
    for index, step in enumerate(plan.steps):
        made = step.outputs if isinstance(step, Segment) else (step.node,)
        for node in (*_reads(step), *made):
            last[node] = index
    freed: dict[int, list[Node]] = {}
    for node, index in last.items():
        if node not in kept:
            freed.setdefault(index, []).append(node)
    return freed


def _torch_step(node: Node, module: GraphModule, slots: dict[Node, int]) -> Callable[[list[Any]], Any]:
    """Return a function that runs one node on the values of the slots."""
    if node.op == "get_attr":
        return lambda values: operator.attrgetter(node.target)(module)  # type: ignore[arg-type]
    target = runnable(node.target)
    own = {argument: slots[argument] for argument in node.all_input_nodes}
    if not node.kwargs and all(isinstance(argument, Node) for argument in node.args):
        reads = tuple(own[argument] for argument in node.args)  # type: ignore[index]
        if len(reads) == 1:
            only = reads[0]
            return lambda values: target(values[only])
        return lambda values: target(*[values[slot] for slot in reads])

    def run(values: list[Any]) -> Any:
        def value(argument: Node) -> Any:
            return values[own[argument]]

        return target(*map_arg(node.args, value), **map_arg(node.kwargs, value))

    return run
