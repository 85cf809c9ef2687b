"""Marks, in the traced graph of a module, the tensors whose values subscribers are to see.

While the module is traced, each tensor at a new slot goes through an autograd Function, so that the graph and its
backward have a node there. :mod:`.graph_readers` replaces those nodes by nodes that read once the training graph is
built.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from onnx import TensorProto
from torch.nn import Module

from ort_zero.ortmodule.compat.trace_state import untraced
from ort_zero.statistics.collect import subscriber_manager
from ort_zero.statistics.collect.module_calls import CallTracker, ModuleCall, TensorSlot
from ort_zero.statistics.collect.subscribed_model import SubscribedModel
from ort_zero.utils.tree_map import map_arguments, map_slots

TOKEN_TYPE = (TensorProto.INT64, 1)
"""ONNX type and rank of the result of a reader; an integer has no gradient."""
token = torch.zeros(1, dtype=torch.int64)
_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, GraphReaders] = weakref.WeakValueDictionary()


class ReaderMark(torch.autograd.Function):
    """Marks a tensor in the graph while it is traced; never runs in ONNX Runtime."""

    passes_on = True
    """The tracer and the exporter take the first result for the tensor itself."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, readers: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy, since an alias could not be changed in place by the module; and a token."""
        result = torch.zeros_like(token)
        ctx.mark_non_differentiable(result)
        return tensor.clone(), result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple:
        """Return the gradient of the tensor as it came."""
        return gradient, None, None

    @staticmethod
    def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
        """Return shapes and types for ORT: the result is like the input, the token has one element."""
        return [shapes[0], [1]], [types[0], TOKEN_TYPE[0]]


MARK = f"{ReaderMark.__module__}.{ReaderMark.__qualname__}"
"""Name of the marks in a graph."""


class JoinedTokens(torch.autograd.Function):
    """Makes one result of the tokens of all marks, for the trace; never runs in ONNX Runtime."""

    @staticmethod
    def forward(ctx: Any, *tokens: torch.Tensor) -> torch.Tensor:
        """Return one token that depends on all of them."""
        return torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """Raise, since a token has no gradient."""
        raise NotImplementedError

    @staticmethod
    def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
        """Return the shape and type of a token for ORT."""
        return [[1]], [TOKEN_TYPE[0]]


class _TracedCalls(CallTracker):
    """Numbers the tensors of a trace; memory, sizes and strides are asked for without the tracer."""

    def slot_of(self, tensor: torch.Tensor, call: ModuleCall, kind: str, name: str) -> TensorSlot:
        with untraced():
            return super().slot_of(tensor, call, kind, name)

    def set_tensor(self, slot: TensorSlot, tensor: torch.Tensor) -> None:
        with untraced():
            super().set_tensor(slot, tensor)

    def set_same(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        with untraced():
            super().set_same(tensor, other)


class GraphReaders:
    """The slots whose tensors one graph shows to the subscribers of one model.

    Args:
        model: whose subscribers are shown the tensors.
        module: the module that the graph stands for; the model's root may be a part of it.
    """

    def __init__(self, model: SubscribedModel, module: Module):
        root = model.root
        assert root is not None
        self.covers_model = root is module
        self.number = next(_numbers)
        self.model = weakref.ref(model)
        self.calls = _TracedCalls(root)
        self.slots_of_tensor: dict[int, list[TensorSlot]] = {}
        """All slots of each tensor, by the order of the first of them; filled once the trace is over."""
        self.step = -1
        """The step whose values the graph computes."""
        self.marked: list[TensorSlot] = []
        """The slot of each mark, by the mark's number."""
        self.dtypes: list[torch.dtype] = []
        self.tokens: list[torch.Tensor] = []
        _by_number[self.number] = self

    def begin_trace(self) -> None:
        """Forget what an earlier trace of the module met."""
        self.calls.begin_step()
        self.marked, self.dtypes, self.tokens = [], [], []

    def end_trace(self) -> None:
        """Fill :attr:`slots_of_tensor`, since all slots are known now."""
        self.tokens = []
        self.slots_of_tensor = self.calls.slots_by_tensor()

    def mark(self, slot: TensorSlot, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with a mark on it; None where it has one, or needs none."""
        if slot.source >= 0 or (self.covers_model and slot.call.caller < 0 and slot.kind == "input"):
            return None  # what the model is given needs no graph to be seen
        self.marked.append(slot)
        self.dtypes.append(tensor.dtype)
        marked, result = ReaderMark.apply(tensor, self.number, len(self.marked) - 1)
        self.tokens.append(result)
        self.calls.set_tensor(slot, marked)
        return marked

    def show_value(self, number: int, tensor: torch.Tensor) -> None:
        """Show the subscribers the value of the tensor with the mark `number`."""
        model, slot = self.model(), self.marked[number]
        if model is None:
            return
        if self.dtypes[number] == torch.bool:
            tensor = tensor.view(torch.bool)  # ORT hands them over as bytes
        for one in self.slots_of_tensor[slot.order]:
            model.show_tensor(one, tensor, gradient=False)

    def show_gradient(self, number: int, gradient: torch.Tensor) -> None:
        """Show the subscribers the gradient of the tensor with the mark `number`."""
        model = self.model()
        if model is not None:
            model.show_gradient(self.step, self.marked[number], gradient)

    def show_arguments(self, args: tuple, kwargs: dict) -> None:
        """Show the subscribers the arguments of the model itself, of the step that runs."""
        model = self.model()
        if model is None:
            return
        self.step = model.step
        if not self.covers_model:
            return
        of_root = [slot for slot in self.calls.slots if slot.call.caller < 0 and slot.kind == "input"]
        by_name = {slot.name: slot for slot in of_root}

        def show(name: str, tensor: torch.Tensor) -> None:
            slot = by_name.get(name)
            if slot is not None and slot.source < 0:
                for one in self.slots_of_tensor[slot.order]:
                    model.show_tensor(one, tensor)

        map_arguments(show, args, kwargs)


def readers_with(number: int) -> GraphReaders | None:
    """Return the readers of the graph whose marks carry `number`, None once they are gone or nobody subscribes."""
    readers = _by_number.get(number)
    return readers if readers is not None and readers.model() is not None else None


def joined_tokens(all_readers: Sequence[GraphReaders]) -> list[torch.Tensor]:
    """Return what is to be one more result of the trace, if there are marks in it."""
    tokens = [one for readers in all_readers for one in readers.tokens]
    return [JoinedTokens.apply(*tokens)] if tokens else []


@contextmanager
def marking(all_readers: Sequence[GraphReaders]) -> Iterator[None]:
    """Put marks on the tensors of each subscribed model while its module is traced in the block."""
    with ExitStack() as stack:
        for readers in all_readers:
            model = readers.model()
            root = model.root if model is not None else None
            if root is None:
                continue
            for module in root.modules():
                for handle in _marking_hooks(readers, module, root):
                    stack.callback(handle.remove)
        if all_readers:
            stack.callback(subscriber_manager.inspect_in_trace.clear)
            subscriber_manager.inspect_in_trace.append(_inspecting(all_readers))
        yield
    for readers in all_readers:
        readers.end_trace()


def _inspecting(all_readers: Sequence[GraphReaders]) -> Callable[[str, torch.Tensor], torch.Tensor]:
    def inspect(name: str, tensor: torch.Tensor) -> torch.Tensor:
        for readers in all_readers:
            call = readers.calls.running
            if call is not None and torch.jit.is_tracing():
                marked = readers.mark(readers.calls.slot_of(tensor, call, "inspect", name), tensor)
                tensor = tensor if marked is None else marked
        return tensor

    return inspect


def _marking_hooks(readers: GraphReaders, module: Module, root: Module) -> list[Any]:
    calls = readers.calls

    def before(module: Module, args: tuple, kwargs: dict) -> Any:
        if not torch.jit.is_tracing():
            return None
        if module is root:
            readers.begin_trace()
        call = calls.enter(module)
        return map_arguments(
            lambda name, tensor: readers.mark(calls.slot_of(tensor, call, "input", name), tensor), args, kwargs
        )

    def after(module: Module, args: tuple, outputs: Any) -> Any:
        call = calls.leave(module) if torch.jit.is_tracing() else None
        if call is None:
            return None
        return map_slots(
            lambda name, tensor: readers.mark(calls.slot_of(tensor, call, "output", name), tensor), outputs
        )

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]
