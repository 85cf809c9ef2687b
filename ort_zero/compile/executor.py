"""Run a planned graph: segments in ONNX Runtime, calls in PyTorch, each value freed after its last use."""

from __future__ import annotations

import functools
import linecache
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ort_zero import log
from ort_zero.compat.torch_compile import OpOverload
from ort_zero.compat.torch_graphs import SizeReader, Symbols, schema_of
from ort_zero.compat.torch_modules import without_base
from ort_zero.compile.assembly import Assembled
from ort_zero.compile.layouts import numbers
from ort_zero.compile.plan import Plan, Segment
from ort_zero.compile.reproducer import write_reproducer
from ort_zero.compile.sessions import Layout, Session
from ort_zero.compile.trial import Trial
from ort_zero.runtimes import differences
from ort_zero.runtimes.agreement import Agreement
from ort_zero.runtimes.memory_order import dense_order, in_order
from ort_zero.runtimes.runner import Runner

_MAX_LAYOUTS = 256
"""Number of combinations of sizes for which the sizes of a segment's edges are kept."""


class SegmentRunner:
    """Runs one segment of a graph in ONNX Runtime or in PyTorch, as its trial says."""

    def __init__(
        self,
        segment: Segment,
        assembled: Assembled,
        session: Session | None,
        trial: Trial,
        agreement: Agreement,
        symbols: SizeReader,
        reproducers: Path,
    ):
        self.segment = segment
        self.trial = trial
        self._session = session
        """The segment's session of ONNX Runtime; None, and freed, where PyTorch runs the segment."""
        self._agreement = agreement
        self._symbols = symbols
        self._reproducers = reproducers
        self._inputs = assembled.inputs
        self._sizes = assembled.sizes
        self._edges = (*assembled.model.inputs, *assembled.model.outputs)
        self._reference: GraphModule | None = None
        self._layouts: dict[Symbols, tuple[Layout, bool]] = {}

    @property
    def reference(self) -> GraphModule:
        """PyTorch's form of the segment."""
        if self._reference is None:
            self._reference = reference_of(self.segment)
        return self._reference

    def __call__(self, inputs: Sequence[Any], symbols: Symbols) -> Sequence[torch.Tensor]:
        """Return the results of the segment."""
        trial, session = self.trial, self._session
        if trial.runner is Runner.TORCH or session is None:
            self._session = None  # takes 70 MiB on a GPU, for the libraries' workspaces
            return self.reference.forward(*inputs)  # without nn.Module's call, which takes as long as some segments
        seen = self._layouts.get(symbols)
        layout, empty = seen or self._layout(symbols, session)
        if empty:
            return self.reference(*inputs)
        feeds = [inputs[index] for index in self._inputs]
        if seen and trial.runs + 1 < trial.due and trial.is_settled:
            trial.runs += 1
            try:
                return session.run(feeds, layout)
            except Exception as error:  # ONNX Runtime's exceptions have no public base class
                results = self.reference(*inputs)  # raises where the inputs are wrong
                trial.fail(error, self._agreement)
            self._tell(inputs, layout, session)
            return results

        def by_ort() -> Sequence[torch.Tensor]:
            return session.run(feeds, layout)

        def judges() -> tuple[Sequence[torch.Tensor], Iterator[Sequence[torch.Tensor]]]:
            exact, plain = differences.in_float64(self.reference), self.reference
            wide = (x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)
            moved = ([differences.moved(value, factor) for value in inputs] for factor in differences.MOVES)
            return exact(*wide), (plain(*values) for values in moved)

        failed = trial.failed
        sizes = layout.read, layout.written
        results = trial.run(by_ort, lambda: self.reference(*inputs), judges, self._agreement, sizes)
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[symbols] = layout, empty  # now: what ends a first run early leaves its sizes unchecked
        if trial.failed and not failed:
            self._tell(inputs, layout, session)
        return results

    def _tell(self, inputs: Sequence[Any], layout: Layout, session: Session) -> None:
        """Say that PyTorch runs the segment from now on, and write a reproducer."""
        operators = sorted({node.operator for node in session.model.nodes})
        folder = self._reproducers / self.trial.key
        try:
            feeds = session.feeds([inputs[index] for index in self._inputs])
            write_reproducer(folder, self.trial.reason, session.model, self.reference, inputs, feeds, layout.sizes)
            where = f"; reproducer: {folder}"
        except OSError as error:
            where = f"; no reproducer, since {folder} cannot be written: {error}"
        log.get_logger().warning(
            "PyTorch runs segment %s (%s) from now on: %s%s",
            self.trial.key,
            ", ".join(operators),
            self.trial.reason,
            where,
        )

    def _layout(self, symbols: Symbols, session: Session) -> tuple[Layout, bool]:
        """Return the layout of calls with the same symbols, and whether a tensor is empty."""
        shapes = [numbers(edge.shape, self._symbols, symbols) for edge in self._edges]
        layout = session.layout(numbers(self._sizes, self._symbols, symbols), shapes)
        return layout, any(0 in shape for shape in shapes)


def reference_of(segment: Segment) -> GraphModule:
    """Return the segment as a module that PyTorch runs: it has the segment's inputs and outputs."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in segment.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].target = _runnable(node.target)
    graph.output(tuple(copies[node] for node in segment.outputs))
    return GraphModule(torch.nn.Module(), graph)


def _runnable(target: Any) -> Callable[..., Any]:
    """Return the function to call for an FX target: a view that was traced can need a copy of other strides."""
    return torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target


def program_of(
    module: GraphModule, plan: Plan, runners: Sequence[SegmentRunner], symbols: SizeReader, returned: int | None = None
) -> Callable[[list[Any]], Any]:
    """Return a function that runs a planned graph: it takes a list of the graph's inputs and empties it.

    The function is Python code of one line per step, so that a step costs no more than its call.

    Args:
        returned: number of results that the user gets, the first ones; None for all. Autograd refuses to change a view
            in place that was made without gradients. Gradients, and what a forward keeps, may be views.
    """
    names: dict[Any, Any] = {"read": symbols.symbols, "in_order": in_order, "without_base": without_base}
    variables: dict[Node, str] = {node: f"a{index}" for index, node in enumerate(plan.placeholders)}
    for step in plan.steps:
        for node in step.outputs if isinstance(step, Segment) else (step.node,):
            variables[node] = f"v{len(variables)}"

    def text(value: Any) -> str:
        """Return the expression of an argument; what has none becomes a global name."""
        if isinstance(value, Node):
            return variables[value]
        if isinstance(value, (list, tuple)):
            inside = "".join(f"{text(item)}, " for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        names[f"k{len(names)}"] = value
        return f"k{len(names) - 1}"

    lines = ["def run(arguments):", "symbols = read(arguments)" if symbols else "symbols = ()"]
    if plan.placeholders:
        lines.append(f"{''.join(f'{variables[node]}, ' for node in plan.placeholders)} = arguments")
    lines.append("arguments.clear()")
    last, waiting = _last_uses(plan), iter(runners)
    for index, step in enumerate(plan.steps):
        if isinstance(step, Segment):
            made = "".join(f"{variables[node]}, " for node in step.outputs)
            lines.append(f"{made}= {text(next(waiting))}({text(list(step.inputs))}, symbols)")
        else:
            lines.append(f"{variables[step.node]} = {_call(step.node, module, text)}")
        if index in last:
            lines.append(f"del {', '.join(variables[node] for node in last[index])}")
    results = plan.output.args[0]
    assert isinstance(results, (list, tuple)), "AOTAutograd's graphs return a sequence"
    count = len(results) if returned is None else returned
    leaving = [
        f"without_base({text(node)})" if index < count and _may_be_view(node) else text(node)
        for index, node in enumerate(results)
    ]
    lines.append(f"return [{', '.join(leaving)}]")
    code = "\n    ".join(lines)
    filename = f"<graph of ort_zero {id(plan)}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)  # for tracebacks
    exec(compile(code, filename, "exec"), names)
    return names["run"]


def _may_be_view(node: Any) -> bool:
    """Return True for a node whose result can be a view; operators that always make new tensors have none."""
    if isinstance(node, Node) and node.target is operator.getitem:
        return _may_be_view(node.args[0])
    target = getattr(node, "target", None)
    return isinstance(node, Node) and not (
        isinstance(target, OpOverload) and all(result.alias_info is None for result in schema_of(target).returns)
    )


def _call(node: Node, module: GraphModule, text: Callable[[Any], str]) -> str:
    if node.op == "get_attr":
        return text(operator.attrgetter(str(node.target))(module))
    if node.target is operator.getitem:
        return f"{text(node.args[0])}[{text(node.args[1])}]"
    read = functools.partial(_as_traced, text) if _depends_on_layout(node) else text
    arguments = [read(argument) for argument in node.args]
    arguments += [f"{name}={read(value)}" for name, value in node.kwargs.items()]
    return f"{text(_runnable(node.target))}({', '.join(arguments)})"


def _depends_on_layout(node: Node) -> bool:
    """Return True for ATen operators that autograd alone calls: backwards, and the native forwards they belong to.

    Autograd calls them with gradients in the layout of the forward's values. With another layout
    ``native_group_norm_backward`` returns wrong gradients on CPUs, without an error (torch 2.6 to 2.14).
    """
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return name.endswith("_backward") or name.startswith("native_")


def _as_traced(text: Callable[[Any], str], value: Any) -> str:
    """Return the expression of an argument in the memory order that it had when the graph was traced."""
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    order = dense_order(tensor) if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 else None
    if order is None:
        return text(value)
    return f"{text(value)}.contiguous()" if order == tuple(sorted(order)) else f"in_order({text(value)}, {order})"


def _last_uses(plan: Plan) -> dict[int, list[Node]]:
    """Return the nodes whose results are freed after each step, by the number of the step."""
    last: dict[Node, int] = {}
    for index, step in enumerate(plan.steps):
        if isinstance(step, Segment):
            last.update(dict.fromkeys((*step.inputs, *step.outputs), index))
        else:
            last.update(dict.fromkeys((*step.node.all_input_nodes, step.node), index))
    kept = set(plan.output.all_input_nodes)
    freed: dict[int, list[Node]] = {}
    for node, index in last.items():
        if node not in kept:
            freed.setdefault(index, []).append(node)
    return freed
