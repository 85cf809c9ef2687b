"""Shows subscribers the values of a graph where ONNX Runtime computes them.

:mod:`.reader_marks` marked the tensors while the module was traced. Once the training graph is built, the marks are
taken out again and nodes that only read are put in: no value is copied or held longer, and a value keeps the gradient
that it had. Readers have no effect that ORT knows of, so one more node behind the last of them makes it run them: in
the forward it makes one more result of the graph, which also keeps marks of values that nobody else uses. Where nodes
stand in the list decides when they run, since ORT (1.19, ``Graph::ReverseDFSFrom``) first follows the input whose node
has the highest number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper

from ort_zero.ortmodule.onnx_edit.python_op import python_op, register_once
from ort_zero.ortmodule.onnx_edit.topology import input_names
from ort_zero.ortmodule.statistics.reader_marks import TOKEN_TYPE, JoinedTokens, ReaderMark, readers_with, token

READ = "ort_zero.ortmodule.statistics.graph_readers:read"
WAIT = "ort_zero.ortmodule.statistics.graph_readers:wait"


class ReadValue(torch.autograd.Function):
    """Shows subscribers one value or gradient when ORT has computed it."""

    @staticmethod
    def forward(ctx: Any, graph: int, number: int, is_gradient: int, tensor: torch.Tensor) -> torch.Tensor:
        """Show the value to the readers of the graph with the number `graph`, and return a token."""
        readers = readers_with(graph)
        if readers is not None:
            (readers.show_gradient if is_gradient else readers.show_value)(number, tensor)
        return token

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise, since the node is put into a graph that has its backward."""
        raise NotImplementedError


class AfterReaders(torch.autograd.Function):
    """Passes a value on when all readers have run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor`: ORT may free the memory of its input."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise, since the node is put into a graph that has its backward."""
        raise NotImplementedError


def register(register_function: Callable[[str, type], None]) -> None:
    """Make the readers known to ORT, once."""
    register_once(register_function, {READ: ReadValue, WAIT: AfterReaders})


def inputs_for_marks_alone(model: onnx.ModelProto) -> set[str]:
    """Return the inputs of an exported graph that lead to marks and to no result, as what computes an unused value."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    reached: set[str] = set()
    stack = [output.name for output in model.graph.output]
    while stack:
        name = stack.pop()
        node = made_by.get(name)
        if name in reached or (node is not None and _mark_of(node) is JoinedTokens):
            continue
        reached.add(name)
        if node is not None:
            stack += input_names(node)
    return {given.name for given in model.graph.input} - reached


def insert_readers(model: onnx.ModelProto) -> None:
    """Replace marks by readers in the optimized graph of a module; changes `model`."""
    graph = model.graph
    types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}
    taken = _take_marks_out(graph)
    made_here = {name for node in taken.nodes for name in node.output}
    # a copy that the export dropped is one value with what it was copied from, and so is its gradient: not the copy's
    first = {mark.value: mark.number for mark in reversed(taken.marks)}
    values = [_reader(mark.number, False, mark.value, types) for mark in taken.marks]
    gradients = [
        _reader(mark.number, True, gradient, types)
        for mark in reversed(taken.marks)
        if (gradient := taken.same.get(mark.gradient, mark.gradient)) in made_here and first[mark.value] == mark.number
    ]
    ends = []
    if taken.end_of_forward is not None:
        ends.append(_wait("ort_zero_wait_forward", values[0].output[1], taken.end_of_forward, TOKEN_TYPE, values))
    if gradients:
        smallest = min(graph.output, key=lambda output: _size(output.type.tensor_type))
        end, before = _behind("ort_zero_wait_backward", taken.nodes, smallest, gradients)
        ends.append(end)
        # kernels of PyTorch in place of ORT's leave it to the graph to say what type their results have
        graph.value_info.append(before)
    del graph.node[:]
    graph.node.extend([*taken.nodes, *reversed(values + gradients), *ends])


@dataclass(frozen=True, slots=True)
class _Mark:
    """A mark that was taken out of a graph."""

    number: tuple[int, int]
    """Number of the :class:`~.reader_marks.GraphReaders`, and number of the mark among its marks."""
    value: str
    """Name of the value that was marked."""
    gradient: str
    """Name of the sum of all that flows back to the value."""


@dataclass(slots=True)
class _WithoutMarks:
    """The nodes of a graph without its marks, and the marks that were taken out."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    """The nodes that stay in the graph, in their order."""
    marks: list[_Mark] = field(default_factory=list)
    """The marks that were taken out, in the order of their nodes."""
    same: dict[str, str] = field(default_factory=dict)
    """For each name that a mark gave to a value, the value's own name."""
    end_of_forward: str | None = None
    """The result of the graph that depends on all readers of the forward."""


def _take_marks_out(graph: onnx.GraphProto) -> _WithoutMarks:
    outputs = {output.name for output in graph.output}
    found = _WithoutMarks()
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = found.same.get(name, name)
        kind = _mark_of(node)
        if kind is None:
            found.nodes.append(node)
        elif kind is JoinedTokens:
            found.end_of_forward = node.output[1]
        else:
            is_gradient = node.op_type == "PythonOpGrad"
            read, made = (node.input[1], node.output[0]) if is_gradient else (node.input[0], node.output[1])
            if not is_gradient:
                number = next(tuple(a.ints) for a in node.attribute if a.name == "input_int_scalars")
                # the sum of all that flows back to a value, also where the code around a module uses it too
                found.marks.append(_Mark(number, read, f"{node.input[0]}_grad"))
            if made in outputs:
                found.nodes.append(helper.make_node("Identity", [read], [made], f"{node.name}_passed"))
            else:
                found.same[made] = read
    return found


def _mark_of(node: onnx.NodeProto) -> type | None:
    """Return which of the Functions of the trace a node is, None if it is another one."""
    if node.op_type not in ("PythonOp", "PythonOpGrad"):
        return None
    names = [a.s.decode() for a in node.attribute if a.name in ("func_name", "name")]
    for function in (ReaderMark, JoinedTokens):
        if any(name.endswith(f"{function.__module__}.{function.__qualname__}") for name in names):
            return function
    return None


def _reader(mark: tuple[int, int], is_gradient: bool, read: str, types: dict) -> onnx.NodeProto:
    graph, number = mark
    name = f"ort_zero_read_{'gradient' if is_gradient else 'value'}_{graph}_{number}"
    kind = types.get(read)
    elem_type, rank = (kind.elem_type, len(kind.shape.dim)) if kind is not None else (TensorProto.FLOAT, 0)
    scalars = (graph, number, int(is_gradient))
    return python_op(READ, name, scalars, [(read, elem_type, rank)], [(f"{name}_token", *TOKEN_TYPE)])


def _wait(name: str, value: str, made: str, kind: tuple[int, int], readers: list[onnx.NodeProto]) -> onnx.NodeProto:
    tokens = [(reader.output[1], *TOKEN_TYPE) for reader in readers]
    return python_op(WAIT, name, (), [(value, *kind), *tokens], [(made, *kind)])


def _behind(name: str, nodes: list, output: Any, readers: list) -> tuple[onnx.NodeProto, onnx.ValueInfoProto]:
    """Return the node that makes `output` of the graph from the value that was it until now, and that value's type."""
    before = f"{output.name}_unwaited"
    for node in (*nodes, *readers):
        for names in (node.input, node.output):
            for i, known in enumerate(names):
                if known == output.name:
                    names[i] = before
    kind = output.type.tensor_type
    info = onnx.ValueInfoProto()
    info.CopyFrom(output)
    info.name = before
    return _wait(name, before, output.name, (kind.elem_type, len(kind.shape.dim)), readers), info


def _size(kind: Any) -> int:
    size = 1
    for dim in kind.shape.dim:
        size *= dim.dim_value or 1 << 20
    return size
