"""What a trace has computed, as digests: two traces are compared before the second one is converted to ONNX.

A record says nothing of sizes but which are 1, nothing of strides, and keeps dropout apart from all else: a model in
evaluation is traced like in training but for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from ort_zero.ortmodule.compat.torch_onnx.exporter_modules import module_of
from ort_zero.ortmodule.compat.torch_onnx.traced import TracedNode, TracedValue
from ort_zero.utils.patching import replaced

_DROPOUT = {"aten::dropout": ("p", "train"), "aten::scaled_dot_product_attention": ("dropout_p", None)}
"""Names of the arguments that are the probability of dropout, and whether there is any, by the operator."""

_BEHIND_RESULTS = "_OutputIdentityOp"
"""The autograd Function through which ORTModule (1.19.2, ``_io.py``) returns each result."""

_TOGETHER = ("prim::ListConstruct", "prim::TupleConstruct")
"""Operators that put several results together."""


class NotRecorded(Exception):
    """A trace holds something whose meaning no record can tell; the text says what."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One trace."""

    inputs: tuple[str, ...]
    """Names of the arguments and attributes that are inputs of the graph."""
    results: tuple[str, ...]
    """Which value each result is; these names mean the same in traces with the same digest."""
    spare: int
    """Number of results, the last ones, that are there for other traces alone, and have no gradient."""
    digest: str
    """Digest of everything but results, gradients and dropout."""
    nodes: tuple[int, ...]
    """The beginning of the digest of each weight and operator in order, to find a difference."""
    gradients: str
    """Digest of which values have a gradient."""
    dropout: tuple[float, ...]
    """Probability of each dropout, in order; 0 where it is switched off."""

    @property
    def own_results(self) -> tuple[str, ...]:
        """The results that are there for the trace itself."""
        return self.results[: len(self.results) - self.spare]

    @property
    def drops(self) -> bool:
        """Whether any dropout is on."""
        return any(self.dropout)


@contextlib.contextmanager
def traces_shown(show: Callable[[Any], None]) -> Iterator[None]:
    """Call `show` with the TorchScript graph of each trace of the exporter in the block, before it is converted.

    What it raises ends the export.
    """

    def showing(original: Callable) -> Callable:
        def create(*args: Any) -> Any:
            result = original(*args)
            show(result[0])
            return result

        return create

    with replaced(module_of("utils"), "_create_jit_graph", showing):
        yield


class Recorder:
    """Makes the record of one TorchScript graph that was traced.

    Args:
        graph: the graph.
        inputs: names of the arguments and attributes that are its first inputs; weights and buffers come behind.
        spare: number of results, the last ones, that are there for other traces alone: detached from what they are.

    Raises:
        NotRecorded: it calls Python functions, or has branches, or constants without a lasting form.
    """

    def __init__(self, graph: Any, inputs: Sequence[str], spare: int = 0):
        self._digests: list[str] = []
        self._places: list[Any] = []
        """The name of the input, or the operator, that each digest is of."""
        self._gradients: list[bool] = []
        self._dropout: list[float] = []
        self._names: dict[int, str] = {}
        """What each value of the graph is called in digests: constants by their values, all others by a number."""
        self._numbered = 0
        returned = list(graph.outputs())
        self._not_the_modules = {value.unique() for value in returned if value.node().kind() in _TOGETHER}
        if self._not_the_modules:
            returned = list(returned[0].node().inputs())
        results = [_passed_on(value) for value in returned]
        first_spare = len(results) - spare
        self._not_the_modules.update(value.unique() for value in results[first_spare:])
        results[first_spare:] = [next(value.node().inputs()) for value in results[first_spare:]]
        for i, value in enumerate(graph.inputs()):
            self._name(value)
            name = inputs[i] if i < len(inputs) else value.debugName()
            self._note(name, (name, self._kind(value)))
        for node in graph.nodes():
            self._add(node)
        self.record = TraceRecord(
            tuple(inputs),
            tuple(self._names[value.unique()] for value in results),
            spare,
            _digest(self._digests),
            tuple(int(digest[:8], 16) for digest in self._digests),
            _digest(self._gradients),
            tuple(self._dropout),
        )

    def first_difference(self, other: TraceRecord) -> str:
        """Return where the graph first differs from another one: ``"from aten::cat (model.py:12 in forward) on"``."""
        if self.record.digest == other.digest:
            return "in their results"
        pairs = zip(self.record.nodes, other.nodes, strict=False)
        first = next((i for i, (mine, its) in enumerate(pairs) if mine != its), len(other.nodes))
        if first >= len(self._places):
            return "at the end"
        place = self._places[first]
        if isinstance(place, str):
            return f"in input {place}"
        line = TracedNode(place).place.line
        return f"from {place.kind()} ({line}) on" if line else f"from {place.kind()} on"

    def _note(self, place: Any, contents: Any) -> None:
        self._places.append(place)
        self._digests.append(_digest(contents))

    def _name(self, value: Any) -> None:
        self._names[value.unique()] = f"%{self._numbered}"
        self._numbered += 1

    def _kind(self, value: Any) -> tuple:
        """Return element type and axes of a value, and note whether it has a gradient."""
        if value.type().kind() != "TensorType":
            return (value.type().str(),)
        traced = TracedValue(value)
        self._gradients.append(traced.requires_grad)
        return traced.scalar_type, tuple(size == 1 for size in traced.traced_sizes)

    def _add(self, node: Any) -> None:
        kind = node.kind()
        if kind == "prim::Constant":
            self._names[node.output().unique()] = _constant(node)
            return
        if any(True for _ in node.blocks()):
            raise NotRecorded(f"{kind} has branches")
        if kind == "prim::PythonOp":
            if node.pyname() != _BEHIND_RESULTS:
                raise NotRecorded(f"it calls {node.pyname()}")
            return
        if any(value.unique() in self._not_the_modules for value in node.outputs()):
            return
        if node.attributeNames():
            raise NotRecorded(f"{kind} has attributes")
        inputs = [self._names[value.unique()] for value in node.inputs()]
        if kind in _DROPOUT:
            self._take_dropout(TracedNode(node), inputs)
        for value in node.outputs():
            self._name(value)
        self._note(node, (kind, inputs, [self._kind(value) for value in node.outputs()]))

    def _take_dropout(self, node: TracedNode, inputs: list[str]) -> None:
        """Note the probability of a dropout, and take it out of the arguments."""
        probability, switch = (node.schema.position(name) if name is not None else None for name in _DROPOUT[node.name])
        taken = [position for position in (probability, switch) if position is not None]
        if not all(node.inputs[position].is_constant for position in taken):
            raise NotRecorded(f"the probability of {node.name} is computed")
        assert probability is not None
        on = switch is None or node.inputs[switch].constant
        self._dropout.append(float(node.inputs[probability].constant) if on else 0.0)
        for position in taken:
            inputs[position] = ""


def _passed_on(result: Any) -> Any:
    """Return the value that a result is: ORTModule puts a call of a Function of its own behind each."""
    node = result.node()
    return next(node.inputs()) if node.kind() == "prim::PythonOp" and node.pyname() == _BEHIND_RESULTS else result


def _constant(node: Any) -> str:
    """Return the value of a constant as a text.

    Raises:
        NotRecorded: it has no lasting form.
    """
    import torch

    try:
        value = node.output().toIValue()
    except RuntimeError as error:
        raise NotRecorded("a constant is no Python value") from error
    if not isinstance(value, torch.Tensor):
        if not _is_plain(value):
            raise NotRecorded(f"a constant is a {type(value).__name__}")
        return f"{type(value).__name__} {value!r}"
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        raise NotRecorded("a constant is no plain tensor in the host's memory")
    plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return f"{value.dtype} {tuple(value.shape)} {_digest(plain.view(torch.uint8).numpy().tobytes())}"


def _is_plain(value: Any) -> bool:
    import torch

    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, torch.device, torch.dtype))


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(value if isinstance(value, bytes) else repr(value).encode())
