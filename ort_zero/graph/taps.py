"""Shows subscribers the values of a graph where ONNX Runtime computes them.

While the module is traced, each tensor at a new place goes through an autograd Function, so that the graph and its
backward have a node there. Once the training graph is built, those nodes are taken out again and nodes that only read
are put in: no value is copied or held longer, and a value keeps the gradient that it had. Readers have no effect that
ORT knows of, so one more node behind the last of them makes it run them; where they stand in the list of nodes decides
when, since ORT (1.19, ``Graph::ReverseDFSFrom``) first follows the input whose node has the highest number.
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

from ort_zero.hooks import global_manager
from ort_zero.hooks.global_manager import Session, places_shown
from ort_zero.hooks.places import Place, Walk, map_arguments, map_slots

READ = "ort_zero.graph.taps:read"
WAIT = "ort_zero.graph.taps:wait"
_NAME = "Tap"
_numbers = itertools.count(1)
_tables: weakref.WeakValueDictionary[int, Taps] = weakref.WeakValueDictionary()
_token = torch.zeros(1)


class Tap(torch.autograd.Function):
    """Marks a place in the graph while it is traced; never runs in a session."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, table: int, number: int) -> torch.Tensor:
        """Return a copy: an alias could not be changed in place by the module."""
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        """Pass the gradient through."""
        return gradient, None, None

    @staticmethod
    def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
        """Tell ORT that the result is like the input."""
        return shapes, types


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
        self.shown: list[tuple[Place, list[Place]]] = []
        self.step = -1
        """The step whose values the graph computes."""
        self.marks: list[Place] = []
        """The place of each marker, by its number."""
        _tables[self.number] = self

    def begin(self) -> None:
        """Get ready for the trace of the whole module."""
        self.walk.begin()
        self.marks = []

    def finish(self) -> None:
        """Know all places, once the trace is over."""
        self.shown = list(places_shown(self.walk))

    def mark(self, place: Place, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with a mark on it; None where it has one, or needs none."""
        if place.source >= 0 or (self.whole and place.call.caller < 0 and place.kind == "input"):
            return None  # what the model is given needs no graph to be seen
        self.marks.append(place)
        marked = Tap.apply(tensor, self.number, len(self.marks) - 1)
        self.walk.same(place, marked)
        return marked

    def forward(self, number: int, tensor: torch.Tensor) -> None:
        """Show a value."""
        session, place = self.session(), self.marks[number]
        for seen in self._seen_at(place):
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
            if place is not None:
                for seen in self._seen_at(place) if place.source < 0 else ():
                    session.show(seen, tensor)

        map_arguments(show, args, kwargs)

    def _seen_at(self, place: Place) -> list[Place]:
        return next((places for first, places in self.shown if first is place), [place])


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


_registered = False


def register(register_function: Callable[[str, type], None]) -> None:
    """Make the readers known to ORT, once.

    Args:
        register_function: ``(name, autograd Function)``, see :func:`ort_zero.compat.ortmodule.register_function`.
    """
    global _registered
    if not _registered:
        register_function(READ, Reader)
        register_function(WAIT, Wait)
        _registered = True


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
            stack.callback(global_manager.tracer.clear)
            global_manager.tracer.append(_inspected(taps))
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
        return map_slots(
            lambda slot, tensor: taps.mark(taps.walk.place(tensor, call, "output", slot), tensor), outputs
        )

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def place_readers(model: onnx.ModelProto) -> None:
    """Put readers in the place of marks, in the optimized graph of a module; changes `model`."""
    graph = model.graph
    types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}
    marks: dict[str, tuple[tuple[int, int], str]] = {}
    same: dict[str, str] = {}
    kept: list[onnx.NodeProto] = []
    readers: dict[bool, list[onnx.NodeProto]] = {False: [], True: []}
    outputs = {output.name for output in graph.output}
    known = {name for node in graph.node for name in node.output}
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in same:
                node.input[i] = same[name]
        if not _is_mark(node):
            kept.append(node)
            continue
        is_gradient = node.op_type == "PythonOpGrad"
        if is_gradient:
            number, marked = marks[node.input[0]]
            read, made = node.input[1], node.output[0]
            # of an input that the code around the module uses too: the sum of all that flows back
            whole = f"{marked}_grad"
        else:
            number = next(tuple(a.ints) for a in node.attribute if a.name == "input_int_scalars")
            marks[node.output[0]] = number, node.input[0]
            read, made = node.input[0], node.output[1]
            whole = read
        if made in outputs:
            kept.append(helper.make_node("Identity", [read], [made], f"{node.name}_passed"))
        else:
            same[made] = read
        kind = types.get(made) or types.get(read)
        readers[is_gradient].append(_reader(number, is_gradient, whole if whole in known else read, kind))
    for reader in readers[True]:
        reader.input[0] = same.get(reader.input[0], reader.input[0])
    ends = [_wait_in_forward(graph, kept, readers[False], types), _wait_in_backward(graph, kept, readers[True])]
    del graph.node[:]
    graph.node.extend([*kept, *reversed(readers[False] + readers[True]), *(end for end in ends if end is not None)])


def _is_mark(node: onnx.NodeProto) -> bool:
    if node.op_type not in ("PythonOp", "PythonOpGrad"):
        return False
    names = [a.s.decode() for a in node.attribute if a.name in ("func_name", "name")]
    return any(name.endswith(f"taps.{_NAME}") for name in names)


def _python_op(function: str, name: str, read: list[tuple[str, int, int]], made: tuple, **more: Any) -> onnx.NodeProto:
    output, kind, rank = made
    return helper.make_node(
        "PythonOp", [r[0] for r in read], [f"{name}_ctx", output], name, "", "com.microsoft",
        func_name=function, input_tensor_types=[r[1] for r in read], input_tensor_ranks=[r[2] for r in read],
        output_tensor_types=[kind], output_tensor_ranks=[rank], training_mode=0, safe_run_mode=0, comment="", **more,
    )  # fmt: skip


def _reader(mark: tuple[int, int], is_gradient: bool, read: str, kind: Any) -> onnx.NodeProto:
    table, number = mark
    name = f"ort_zero_read_{'gradient' if is_gradient else 'value'}_{number}_{read}"
    elem_type, rank = (kind.elem_type, len(kind.shape.dim)) if kind is not None else (TensorProto.FLOAT, 0)
    return _python_op(
        READ, name, [(read, elem_type, rank)], (f"{name}_token", TensorProto.FLOAT, 1), input_convention="cccd",
        input_int_scalars=[table, number, int(is_gradient)], input_int_scalar_positions=[0, 1, 2],
    )  # fmt: skip


def _wait(name: str, value: str, made: str, kind: Any, readers: list[onnx.NodeProto]) -> onnx.NodeProto:
    of_value = (kind.elem_type, len(kind.shape.dim))
    tokens = [(reader.output[1], TensorProto.FLOAT, 1) for reader in readers]
    return _python_op(
        WAIT, name, [(value, *of_value), *tokens], (made, *of_value), input_convention="d" * (1 + len(tokens))
    )


def _wait_in_forward(graph: Any, nodes: list, readers: list, types: dict) -> onnx.NodeProto | None:
    """Return the node behind which the forward ends: before the yield, or before the first result."""
    if not readers:
        return None
    end = next((node for node in nodes if node.op_type == "YieldOp"), None)
    results = list(end.input) if end is not None else [output.name for output in graph.output]
    name = min((r for r in results if r in types), key=lambda r: len(types[r].shape.dim))
    if end is not None:
        waited = f"{name}_waited"
        for i, read in enumerate(end.input):
            if read == name:
                end.input[i] = waited
        return _wait("ort_zero_wait_forward", name, waited, types[name], readers)
    return _behind("ort_zero_wait_forward", nodes, name, types[name], readers)


def _wait_in_backward(graph: Any, nodes: list, readers: list) -> onnx.NodeProto | None:
    if not readers:
        return None
    smallest = min(graph.output, key=lambda output: _size(output.type.tensor_type))
    return _behind("ort_zero_wait_backward", nodes, smallest.name, smallest.type.tensor_type, readers)


def _behind(name: str, nodes: list, output: str, kind: Any, readers: list) -> onnx.NodeProto:
    """Return the node that makes `output` from what made it until now."""
    before = f"{output}_unwaited"
    for node in nodes:
        for names in (node.input, node.output):
            for i, known in enumerate(names):
                if known == output:
                    names[i] = before
    for reader in readers:
        if reader.input[0] == output:
            reader.input[0] = before
    return _wait(name, before, output, kind, readers)


def _size(kind: Any) -> int:
    size = 1
    for dim in kind.shape.dim:
        size *= dim.dim_value or 1 << 20
    return size
