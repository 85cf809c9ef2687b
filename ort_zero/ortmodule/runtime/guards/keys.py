"""What is known of a graph and of a call, as values: the keys that guards compare, and what an export gives.

:mod:`.decide` compares the keys of a call with those of the graphs that are ready; :mod:`.runtime.transitions`
carries out what it decides. The two records at the end have the names of ORTModule 1.19
(``_graph_transition_manager.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_zero.ortmodule.runtime.guards.attribute_guard import NOTHING_READ, AttributeValues, ReadValues
from ort_zero.ortmodule.runtime.guards.size_guard import NO_SIZES_READ, Shapes, SizeGuard


class Action(str, enum.Enum):
    """The action of a call on its graph before the graph runs."""

    REUSE = "reuse"
    """Run the graph of the last call, which fits."""
    SWITCH = "switch"
    """Run another graph, which is ready, in its place."""
    REPROCESS = "re-process"
    """Build a new gradient graph and session from a module that has been exported."""
    EXPORT = "export"
    """Build a new graph from a new export of the module, or from the export cache."""

    @property
    def builds(self) -> bool:
        """Whether the action makes a new session."""
        return self in (Action.REPROCESS, Action.EXPORT)


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor among the arguments of a call. Its sizes are no part of it: every axis is dynamic."""

    name: str
    dtype: str
    rank: int


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """The module tree at the time of a call."""

    number: int = 0
    """Grows by one each time when layers or parameters were replaced, added, removed or cast."""
    changes: tuple[str, ...] = ()
    """Descriptions of the changes that led to this number."""
    modes: bytes = b""
    """The flag ``training`` of each submodule, one byte each, in the order of ``modules()``."""

    def same_code(self, other: ModelVersion) -> bool:
        """Return whether a trace of the one is a trace of the other."""
        return self.number == other.number and self.modes == other.modes


@dataclass(frozen=True, slots=True)
class ExportKey:
    """The properties of a call that an exported model depends on."""

    structure: tuple
    """Pytree structure of the arguments, with the constants among them; see
    :func:`ort_zero.ortmodule.runtime.export.pytree.flatten_call`."""
    tensors: tuple[TensorInput, ...]
    model: ModelVersion = ModelVersion()
    readers: tuple = ()
    """Subscribers that read values inside of the graph."""
    attributes: ReadValues | AttributeValues = NOTHING_READ
    """Of a graph: what Python code read while it was traced; of a call: all values that are looked at."""
    torch_state: tuple[tuple[str, str], ...] = ()
    """Names and values of torch's global settings that a trace depends on."""
    sizes: SizeGuard | Shapes = NO_SIZES_READ
    """Of a graph: what Python code took from sizes while it was traced; of a call: the shape of each tensor."""
    gradients: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Names of the frozen parameters, and of the arguments that require grad; None for a graph whose code does not ask
    for that."""

    def matches(self, other: ExportKey) -> bool:
        """Return whether a model that was exported for this key serves a call, or has the key of another graph."""
        return self.matches_but_for_sizes(other) and self.size_guard.holds(other.shapes)

    def matches_but_for_sizes(self, other: ExportKey) -> bool:
        """Return whether at most sizes keep a model that was exported for this key from serving a call."""
        return (
            self.tensors == other.tensors
            and self.model.same_code(other.model)
            and self.readers == other.readers
            and self.torch_state == other.torch_state
            and self.structure == other.structure
            and (self.gradients is None or self.gradients == other.gradients)
            and self.read.hold(other.attributes)
        )

    @property
    def read(self) -> ReadValues:
        """What was read during the trace of a graph."""
        return self.attributes if isinstance(self.attributes, ReadValues) else NOTHING_READ

    @property
    def size_guard(self) -> SizeGuard:
        """What was taken from sizes during the trace of a graph."""
        return self.sizes if isinstance(self.sizes, SizeGuard) else NO_SIZES_READ

    @property
    def shapes(self) -> Shapes:
        """Shape of each tensor in the call, or in that of the trace."""
        return self.sizes.shapes if isinstance(self.sizes, SizeGuard) else self.sizes


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """The properties of a call that the gradient graph and the session depend on besides the exported model."""

    frozen: tuple[str, ...] = ()
    """Names of the parameters that do not require grad; empty for inference."""
    inputs: tuple[str, ...] = ()
    """Names of the arguments and buffers that require grad; empty for inference."""
    memory_plan: str = ""
    """The recomputation that the configuration asks for; empty for none."""
    deterministic: bool = False
    device: str = "cpu"
    fused_loss: bool = False
    """Whether a language-model head and its loss are one node."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One call, as far as it decides about graphs."""

    export: ExportKey
    process: ProcessKey = ProcessKey()


@dataclass(frozen=True, slots=True)
class KnownGraph:
    """A graph that is ready to run."""

    number: int
    """Number of the graph among those of its model, from 1."""
    export: ExportKey
    process: ProcessKey
    differentiable: frozenset[str] = frozenset()
    """Names of the arguments and buffers that the exported model has a gradient for; PyTorch has none for some."""

    def exported_for(self, observed: Observed) -> bool:
        """Return whether the exported model serves a call, possibly with another gradient graph."""
        return self.differentiable.issuperset(observed.process.inputs) and self.export.matches(observed.export)


@dataclass(frozen=True, slots=True)
class Graphs:
    """All graphs of one mode, last used first: what :func:`.runtime.guards.decide.decide` starts from."""

    known: tuple[KnownGraph, ...] = ()

    @property
    def current(self) -> KnownGraph | None:
        """The graph of the last call; None before the first call."""
        return self.known[0] if self.known else None


@dataclass(frozen=True, slots=True)
class Transition:
    """The action of a call on the graph, with the reasons for it."""

    action: Action
    reasons: tuple[str, ...] = ()
    """Every difference between the call and the graph of the last one, for people."""
    graph: int | None = None
    """Number of the known graph to run, or (re-process) whose exported model is used."""
    forced: bool = False
    """True if the graph that was decided for did not hold when it ran, or could not be built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModelInfo:
    """The result of exporting a module."""

    module_forward_output_schema: Any
    """Pytree structure of what the module returns."""
    onnx_graph_input_names: tuple[str, ...]
    """Arguments, parameters and buffers that the graph reads, in the order of its inputs."""
    onnx_graph_input_names_user_defined: tuple[str, ...]
    """Names of those inputs that are arguments of the module."""
    dynamic_axes_map: Mapping[str, Mapping[int, str]]
    """Name of each dynamic axis of each argument."""
    exported_model: bytes
    """Serialized ModelProto with inferred shapes, from which ORT builds the gradient graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostExportProcessedModelInfo:
    """How a call of the module becomes a run of the graph, and its result the module's."""

    onnx_graph_input_names: tuple[str, ...]
    """Inputs of the graph that runs, in its order."""
    onnx_graph_input_names_require_grad: tuple[str, ...]
    """Names of the inputs whose gradient the gradient graph computes, parameters included."""
    onnx_graph_input_names_user_defined: tuple[str, ...]
    onnx_graph_input_names_require_grad_user_defined: tuple[str, ...]
    dynamic_axes_map: Mapping[str, Mapping[int, str]]
    buffer_for_ort_runs: Mapping[str, Any]
    """Parameter by input name; None for what :attr:`data_accessor` gives."""
    data_accessor: Mapping[str, Callable[[Mapping[str, Any]], Any]]
    """Takes an argument out of the tensors of a call, or a buffer out of its module, by input name."""
    module_forward_output_schema: Any
    """Pytree structure of what the module returns."""
    build_result: Callable[..., Any]
    """Puts tensors and schema together, with the caller's own objects."""
    _positions: tuple[tuple[int, Callable], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = ((i, self.data_accessor.get(name)) for i, name in enumerate(self.buffer_for_ort_runs))
        object.__setattr__(self, "_positions", tuple(pair for pair in given if pair[1] is not None))

    def construct_inputs(self, tensors: Mapping[str, Any]) -> list[Any]:
        """Return the inputs of a run in the order of the graph's.

        Args:
            tensors: arguments of the call by name.
        """
        inputs = list(self.buffer_for_ort_runs.values())
        for position, accessor in self._positions:
            inputs[position] = accessor(tensors)
        return inputs

    def held_tensors(self, tensors: Mapping[str, Any]) -> list[Any]:
        """Return those inputs of a run that are no arguments of the call: parameters, buffers, attributes.

        Args:
            tensors: arguments of the call by name.
        """
        inputs = zip(self.buffer_for_ort_runs, self.construct_inputs(tensors), strict=True)
        arguments = set(self.onnx_graph_input_names_user_defined)
        return [value for name, value in inputs if name not in arguments and isinstance(value, torch.Tensor)]

    def restore_outputs(
        self,
        tensors: Sequence[Any],
        objects: Sequence[Any] = (),
        call: tuple[tuple, dict] = ((), {}),
        held: Callable[[str], Any] = lambda name: None,
    ) -> Any:
        """Return what the module would have returned, of the very types.

        Args:
            tensors: results of the graph.
            objects: the caller's own objects by number; a result that is one of them is that object.
            call: positional and keyword arguments of the call.
            held: returns a parameter or buffer by its name; None where a copy of the graph's takes its place.
        """
        return self.build_result(tensors, self.module_forward_output_schema, objects, call, held)
