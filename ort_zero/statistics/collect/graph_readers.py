"""Shows subscribers the values of a graph where ONNX Runtime computes them.

While the module is traced, each tensor at a new place goes through an autograd Function, so that the graph and its
backward have a node there. Once the training graph is built, those marks are taken out again and nodes that only read
are put in: no value is copied or held longer, and a value keeps the gradient that it had. Readers have no effect that
ORT knows of, so one more node behind the last of them makes it run them: in the forward it makes one more result of the
graph, which also keeps marks of values that nobody else uses. Where nodes stand in the list decides when they run,
since ORT (1.19, ``Graph::ReverseDFSFrom``) first follows the input whose node has the highest number.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch.nn import Module

from ort_zero.onnx_edit.python_op import python_op, register_once
from ort_zero.runtime.zero3.collective_plan import all_inputs
from ort_zero.statistics.collect import subscriber_manager
from ort_zero.statistics.collect.module_calls import Place, Walk
from ort_zero.statistics.collect.subscriber_manager import Session, places_shown
from ort_zero.utils.tree_map import map_arguments, map_slots

READ = "ort_zero.statistics.collect.graph_readers:read"
WAIT = "ort_zero.statistics.collect.graph_readers:wait"
_numbers = itertools.count(1)
_tables: weakref.WeakValueDictionary[int, Taps] = weakref.WeakValueDictionary()
_TOKEN = (TensorProto.INT64, 1)
"""Type and rank of what says that a reader has run; an integer has no gradient."""
_token = torch.zeros(1, dtype=torch.int64)


class Tap(torch.autograd.Function):
    """Marks a place in the graph while it is traced; never runs in a session."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, table: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy, since an alias could not be changed in place by the module; and a token."""
        token = torch.zeros_like(_token)
        ctx.mark_non_differentiable(token)
        return tensor.clone(), token

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple:
        """Pass the gradient through."""
        return gradient, None, None

    @staticmethod
    def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
        """Tell ORT that the result is like the input."""
        return [shapes[0], [1]], [types[0], _TOKEN[0]]


class Gathered(torch.autograd.Function):
    """Makes one result of all tokens, for the trace; never runs in a session."""

    @staticmethod
    def forward(ctx: Any, *tokens: torch.Tensor) -> torch.Tensor:
        """Return a token."""
        return torch.zeros_like(_token)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Never run."""
        raise NotImplementedError

    @staticmethod
    def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
        """Tell ORT the shape of a token."""
        return [[1]], [_TOKEN[0]]


class Taps:
    """The places of one graph.

    Args:
        session: whose subscribers look on.
        module: the module that the graph stands for; the session's root may be a part of it.
    """

    def __init__(self, session: Session, module: Module):
        self.whole = session.root is module
        self.number = next(_numbers)
        self.session = weakref.ref(session)
        self.walk = Walk(session.root)
        self.shown: dict[int, list[Place]] = {}
        """Where the tensor of each place is seen, by the place's order; filled once the trace is over."""
        self.step = -1
        """The step whose values the graph computes."""
        self.marks: list[Place] = []
        """The place of each mark, by its number."""
        self.dtypes: list[torch.dtype] = []
        self.tokens: list[torch.Tensor] = []
        _tables[self.number] = self

    def begin(self) -> None:
        """Get ready for the trace of the whole module."""
        self.walk.begin()
        self.marks, self.dtypes, self.tokens = [], [], []

    def finish(self) -> None:
        """Know all places, once the trace is over."""
        self.tokens = []
        self.shown = places_shown(self.walk)

    def mark(self, place: Place, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with a mark on it; None where it has one, or needs none."""
        if place.source >= 0 or (self.whole and place.call.caller < 0 and place.kind == "input"):
            return None  # what the model is given needs no graph to be seen
        self.marks.append(place)
        self.dtypes.append(tensor.dtype)
        marked, token = Tap.apply(tensor, self.number, len(self.marks) - 1)
        self.tokens.append(token)
        self.walk.same(place, marked)
        return marked

    def forward(self, number: int, tensor: torch.Tensor) -> None:
        """Show a value."""
        session, place = self.session(), self.marks[number]
        if self.dtypes[number] == torch.bool:
            tensor = tensor.view(torch.bool)  # ORT hands them over as bytes
        for seen in self.shown[place.order]:
            session.show(seen, tensor, gradient=False)

    def backward(self, number: int, gradient: torch.Tensor) -> None:
        """Show a gradient."""
        self.session().show_gradient(self.step, self.marks[number], gradient)

    def given(self, args: tuple, kwargs: dict) -> None:
        """Show the arguments of the model itself."""
        session = self.session()
        self.step = session.step
        if not self.whole:
            return
        roots = [p for p in self.walk.places if p.call.caller < 0 and p.kind == "input"]
        by_slot = {place.slot: place for place in roots}

        def show(slot: str, tensor: torch.Tensor) -> None:
            place = by_slot.get(slot)
            if place is not None and place.source < 0:
                for seen in self.shown[place.order]:
                    session.show(seen, tensor)

        map_arguments(show, args, kwargs)


class Reader(torch.autograd.Function):
    """Shows one value when ORT has it."""

    @staticmethod
    def forward(ctx: Any, table: int, number: int, is_gradient: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a token."""
        taps = _tables.get(table)
        if taps is not None and taps.session() is not None:
            (taps.backward if is_gradient else taps.forward)(number, tensor)
        return _token

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Never run."""
        raise NotImplementedError


class Wait(torch.autograd.Function):
    """Passes a value on when all readers have run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
        """Return a copy of `tensor`: ORT may free the memory of its input."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Never run."""
        raise NotImplementedError


def register(register_function: Callable[[str, type], None]) -> None:
    """Make the readers known to ORT, once."""
    register_once(register_function, {READ: Reader, WAIT: Wait})


@contextmanager
def traced(taps: Sequence[Taps]) -> Iterator[None]:
    """Mark the places of each session while its module is traced in the block."""
    with ExitStack() as stack:
        for table in taps:
            session = table.session()
            for module in session.root.modules():
                for handle in _mark_calls(table, module, session.root):
                    stack.callback(handle.remove)
        if taps:
            stack.callback(subscriber_manager.tracer.clear)
            subscriber_manager.tracer.append(_inspected(taps))
        yield
    for table in taps:
        table.finish()


def _inspected(taps: Sequence[Taps]) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def inspect(name: str, tensor: torch.Tensor) -> torch.Tensor:
        for table in taps:
            call = table.walk.running
            if call is not None and torch.jit.is_tracing():
                marked = table.mark(table.walk.place(tensor, call, "inspect", name), tensor)
                tensor = tensor if marked is None else marked
        return tensor

    return inspect


def _mark_calls(taps: Taps, module: Module, root: Module) -> list[Any]:
    def before(module: Module, args: tuple, kwargs: dict) -> Any:
        if not torch.jit.is_tracing():
            return None
        if module is root:
            taps.begin()
        call = taps.walk.enter(module)
        return map_arguments(
            lambda slot, tensor: taps.mark(taps.walk.place(tensor, call, "input", slot), tensor), args, kwargs
        )

    def after(module: Module, args: tuple, outputs: Any) -> Any:
        call = taps.walk.leave(module) if torch.jit.is_tracing() else None
        if call is None:
            return None
        return map_slots(lambda slot, tensor: taps.mark(taps.walk.place(tensor, call, "output", slot), tensor), outputs)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def gathered(taps: Sequence[Taps]) -> list[torch.Tensor]:
    """Return what is to be one more result of the trace, if there are marks in it."""
    tokens = [token for table in taps for token in table.tokens]
    return [Gathered.apply(*tokens)] if tokens else []


def read_alone(model: onnx.ModelProto) -> set[str]:
    """Return the inputs of an exported graph that lead to marks and to no result, as what computes an unused value."""
    made_by = {name: node for node in model.graph.node for name in node.output}
    reached: set[str] = set()
    stack = [output.name for output in model.graph.output]
    while stack:
        name = stack.pop()
        node = made_by.get(name)
        if name in reached or (node is not None and _kind_of_mark(node) == Gathered.__name__):
            continue
        reached.add(name)
        if node is not None:
            stack += all_inputs(node)
    return {given.name for given in model.graph.input} - reached


def place_readers(model: onnx.ModelProto) -> None:
    """Put readers in the place of marks, in the optimized graph of a module; changes `model`."""
    graph = model.graph
    types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}
    outputs = {output.name for output in graph.output}
    same: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    marks: list[tuple[tuple[int, int], str, str]] = []
    forward_end = None
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = same.get(name, name)
        kind = _kind_of_mark(node)
        if kind is None:
            kept.append(node)
        elif kind == Gathered.__name__:
            forward_end = node.output[1]
        else:
            is_gradient = node.op_type == "PythonOpGrad"
            read, made = (node.input[1], node.output[0]) if is_gradient else (node.input[0], node.output[1])
            if not is_gradient:
                number = next(tuple(a.ints) for a in node.attribute if a.name == "input_int_scalars")
                # the sum of all that flows back to a value, also where the code around a module uses it too
                marks.append((number, read, f"{node.input[0]}_grad"))
            if made in outputs:
                kept.append(helper.make_node("Identity", [read], [made], f"{node.name}_passed"))
            else:
                same[made] = read
    made_here = {name for node in kept for name in node.output}
    # a copy that the export dropped is one value with what it was copied from, and so is its gradient: not the copy's
    first = {value: number for number, value, _ in reversed(marks)}
    values = [_reader(number, False, value, types) for number, value, _ in marks]
    gradients = [
        _reader(number, True, same.get(gradient, gradient), types)
        for number, value, gradient in reversed(marks)
        if same.get(gradient, gradient) in made_here and first[value] == number
    ]
    ends = []
    if forward_end is not None:
        ends.append(_wait("ort_zero_wait_forward", values[0].output[1], forward_end, _TOKEN, values))
    if gradients:
        smallest = min(graph.output, key=lambda output: _size(output.type.tensor_type))
        ends.append(_behind("ort_zero_wait_backward", kept, smallest, gradients))
    del graph.node[:]
    graph.node.extend([*kept, *reversed(values + gradients), *ends])


def _kind_of_mark(node: onnx.NodeProto) -> str | None:
    """Return which of the Functions of the trace a node is, None if it is another one."""
    if node.op_type not in ("PythonOp", "PythonOpGrad"):
        return None
    names = [a.s.decode() for a in node.attribute if a.name in ("func_name", "name")]
    return next((f.__name__ for f in (Tap, Gathered) for n in names if n.endswith(f"taps.{f.__name__}")), None)


def _reader(mark: tuple[int, int], is_gradient: bool, read: str, types: dict) -> onnx.NodeProto:
    table, number = mark
    name = f"ort_zero_read_{'gradient' if is_gradient else 'value'}_{table}_{number}"
    kind = types.get(read)
    elem_type, rank = (kind.elem_type, len(kind.shape.dim)) if kind is not None else (TensorProto.FLOAT, 0)
    scalars = (table, number, int(is_gradient))
    return python_op(READ, name, scalars, [(read, elem_type, rank)], [(f"{name}_token", *_TOKEN)])


def _wait(name: str, value: str, made: str, kind: tuple[int, int], readers: list[onnx.NodeProto]) -> onnx.NodeProto:
    tokens = [(reader.output[1], *_TOKEN) for reader in readers]
    return python_op(WAIT, name, (), [(value, *kind), *tokens], [(made, *kind)])


def _behind(name: str, nodes: list, output: Any, readers: list) -> onnx.NodeProto:
    """Return the node that makes `output` of the graph from what made it until now."""
    before = f"{output.name}_unwaited"
    for node in (*nodes, *readers):
        for names in (node.input, node.output):
            for i, known in enumerate(names):
                if known == output.name:
                    names[i] = before
    kind = output.type.tensor_type
    return _wait(name, before, output.name, (kind.elem_type, len(kind.shape.dim)), readers)


def _size(kind: Any) -> int:
    size = 1
    for dim in kind.shape.dim:
        size *= dim.dim_value or 1 << 20
    return size
