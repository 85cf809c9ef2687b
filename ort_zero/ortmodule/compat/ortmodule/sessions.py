"""What runs a graph: records of graphs and sessions, the options of a session, the agents that ORTModule runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from ort_zero import env
from ort_zero.ortmodule.compat.ortmodule import profiles

_LAID_OUT = frozenset({"Conv", "FusedConv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"})
"""Operators whose tensors ORT may lay out in blocks for the processor at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInfo:
    """The facts that ORT's graph builder knows about a graph, by the names that ORTModule reads."""

    user_output_names: list[str]
    output_grad_indices_non_differentiable: list[int]
    output_grad_indices_require_full_shape: list[int]
    module_output_indices_requires_save_for_backward: list[int]
    frontier_node_arg_map: dict[str, str]
    cached_node_arg_names: list[str]

    @classmethod
    def of(cls, info: Any) -> GraphInfo:
        """Return a plain copy of ORT's own."""
        kinds: dict[str, Any] = {one.name: dict if one.name.endswith("_map") else list for one in fields(cls)}
        copies: dict[str, Any] = {name: kind(getattr(info, name)) for name, kind in kinds.items()}
        return cls(**copies)


class GraphBuilderView:
    """Stands in for ORT's graph builder of a graph that can run; each graph has one of its own.

    Args:
        model: ModelProto of the graph.
        info: what ORT's graph builder knew of it.
    """

    def __init__(self, model: Any, info: Any):
        self._model = model
        self._info = info

    def get_graph_info(self) -> Any:
        """Return the names of the graph's outputs, and which of them have gradients."""
        return self._info

    def get_gradient_model(self) -> bytes:
        """Return the graph, serialized."""
        return self._model.SerializeToString()

    get_forward_model = get_gradient_model


@dataclass(slots=True, eq=False)
class Session:
    """A graph that can run, and what the managers of ORTModule need to know of it."""

    model: Any
    """The ModelProto that the session runs."""
    info: GraphInfo
    agent: Any
    differentiable: list[int]
    """Positions of the inputs that autograd sees."""
    gradient_map: list[int]
    """Index of the backward's output for each differentiable input, -1 for none."""
    gradients: bool
    """Whether the graph has a backward."""
    builder: GraphBuilderView = field(init=False)
    """What users read of the graph as of ORT's graph builder."""

    def __post_init__(self) -> None:
        self.builder = GraphBuilderView(self.model, self.info)


def has_gradients(model: Any) -> bool:
    """Return whether a ModelProto is a gradient graph: ORT hands control back between its forward and its backward."""
    return any(node.op_type == "YieldOp" for node in model.graph.node)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Settings of ORT's memory optimizer, which makes the backward compute values again."""

    file: str
    """Path of a file with a JSON list of ``"cluster:kind:count"``; kind 1 is recompute, 2 recompute with compromise."""
    probe: str = "1:0"
    """``"level:layers"``: which operators may be computed again (1: products and normalizations too), and whether
    whole transformer layers are (0 or 1)."""


class RunAgain(Protocol):
    """Knows what the backward of one run leads to, and how its forward is run again for a second one."""

    inputs: Sequence[Any]
    """Inputs of the run, in the graph's order."""

    def begin_backward(self, gradients: Sequence[Any]) -> None:
        """Note that a backward is about to run; it may raise, as PyTorch does for inputs that have changed."""

    def left_out(self, gradients: Sequence[Any], found: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs that autograd sees, None for those that this backward does not lead to."""

    def note_backward(self, gradients: Sequence[Any], keeps_graph: bool) -> bool:
        """Note that a backward has run; return whether another one may come."""

    def is_new(self, gradients: Sequence[Any]) -> bool:
        """Return whether these results share nothing with those of a backward that has not kept the graph."""

    def differentiable(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs that autograd sees, such that they can be differentiated themselves."""

    def prepared(self, gradients: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which the forward and the backward can run again; it may raise.

        Its value is the agent to run them with, None for that of the graph.
        """


class AllInputs(list):
    """All inputs of a run, for an autograd Function that is given the differentiable ones apart as well."""

    again: RunAgain | None = None
    """Runs the forward again; None where nobody can."""


def set_options(
    options: Any,
    model: Any,
    *,
    severity: int,
    on_cpu: bool,
    optimized: bool,
    write_to: str | None,
    in_order: bool,
) -> None:
    """Set what every session of ours has in common in the SessionOptions `options`.

    Args:
        options: as ORTModule makes them.
        model: ModelProto that the session will run.
        severity: from which ORT prints, 0 verbose to 3 error.
        on_cpu: whether the model runs on the CPU.
        optimized: ORT has optimized the model before; it is taken as it is.
        write_to: file for the model that runs, after all changes.
        in_order: run the nodes in the order of the model, whose backward nodes are marked as such.
    """
    import onnxruntime

    # upstream takes the number of ORTModule's level, which is another scale
    options.log_severity_level = severity
    # it refuses a Gemm that reads the third or a later output of a node, and a gather node has many
    disabled = ["GemmSumFusion"]
    if write_to is not None and not any(node.op_type in _LAID_OUT for node in model.graph.node):
        # without effect on such a graph, but ORT would warn of it
        disabled.append("NchwcTransformer")
    options.add_session_config_entry("optimization.disable_specified_optimizers", ";".join(disabled))
    if options.intra_op_num_threads == 0:
        # ORT's default is every core for every rank: ranks on one machine then fight for the cores
        options.intra_op_num_threads = env.threads_per_rank()
        options.inter_op_num_threads = 1
    if on_cpu and _share_memory():
        options.add_session_config_entry("session.use_env_allocators", "1")
    if profiles.prefix is not None:
        options.enable_profiling, options.profile_file_prefix = True, profiles.prefix
    if optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if in_order:
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    if write_to is not None:
        options.optimized_model_filepath = write_to


def inference_agent(data: bytes, options: Any, providers: Any, provider_options: Any) -> Any:
    """Return the agent that runs a serialized forward graph."""
    from onnxruntime.training.ortmodule._execution_agent import InferenceAgent

    return InferenceAgent(data, options, providers, provider_options)


def training_agent(
    data: bytes,
    model: Any,
    info: GraphInfo,
    device: Any,
    recompute: Recompute | None,
    session_config: tuple[Any, Any, Any],
) -> Any:
    """Return the agent that runs a gradient graph, the forward and the backward apart.

    Args:
        data: the serialized graph, as it is to run.
        model: ModelProto with the same inputs and outputs.
        info: what ORT's graph builder knows of it.
        device: torch.device of the model.
        recompute: what ORT's memory optimizer is to compute again in the backward.
        session_config: options, providers and their options.
    """
    from onnxruntime.capi import _pybind_state as C
    from onnxruntime.capi.onnxruntime_inference_collection import get_ort_device_type
    from onnxruntime.training.ortmodule import _utils
    from onnxruntime.training.ortmodule._execution_agent import TrainingAgent

    options, providers, provider_options = session_config
    index = _utils.get_device_index(device)
    ort_device = C.OrtDevice(get_ort_device_type(device.type, index), C.OrtDevice.default_memory(), index)
    forward = len(info.user_output_names) + len(info.frontier_node_arg_map)
    fetched = [output.name for output in model.graph.output]
    feeds = [given.name for given in model.graph.input]
    for key, value in (
        ("optimization.memory_optimizer_config", recompute.file if recompute is not None else ""),
        ("optimization.enable_memory_probe_recompute_config", recompute.probe if recompute is not None else "1:0"),
    ):
        options.add_session_config_entry(key, value)
    devices = [ort_device] * forward, [ort_device] * len(fetched)
    return TrainingAgent(data, feeds, devices[0], fetched, devices[1], options, providers, provider_options, index)


@functools.cache
def _share_memory() -> bool:
    """Let all sessions that want so take their memory from one arena; return whether they can.

    An arena keeps what it once held. With one for each session, a model with graphs for training, evaluation and two
    tasks would hold the activations of all of them; only one graph runs at a time.
    """
    from onnxruntime.capi import _pybind_state as C

    memory = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    # by default a block of up to 128 MB more than asked for is given away whole; 1.19.2 does so with this setting too
    settings = C.OrtArenaCfg(0, -1, -1, 1)
    try:
        C.create_and_register_allocator(memory, settings)
    except Exception as error:
        # the user's program has registered one, which is as good
        return "already" in str(error)
    return True


def guard_agent(agent: Any, around: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Surround each run of a session: ``around("forward" or "backward", run)``."""
    for name in ("run_forward", "run_backward"):
        original = getattr(agent, name, None)
        if original is not None:
            phase = name.removeprefix("run_")
            setattr(agent, name, functools.partial(_guarded, around, phase, original))


def _guarded(around, phase, original, *args, **kwargs):
    return around(phase, lambda: original(*args, **kwargs))
