"""Everything private of onnxruntime-training 1.19.2: importing it on today's torch, and the seams we work through.

:func:`import_ortmodule` is the only way in. :func:`patches` turns a :class:`Seams` (what the graph layer wants to
happen at each place) into the patch table; nothing under site-packages is edited.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Protocol

from ort_zero import env, log
from ort_zero.compat import third_party, versions
from ort_zero.compat.shape_inference import infer_shapes
from ort_zero.compat.torch_onnx import STOP_GRADIENT
from ort_zero.utils.patching import Patch, defined_in

_PACKAGE = "onnxruntime.training.ortmodule"
_GRAPH = ("_execution_agent", "_graph_info", "_gradient_map")
"""What upstream's backward reads of the manager."""
_WITHOUT_EFFECT = {
    "ORTMODULE_LOG_LEVEL": log.VARIABLE,
    "ORTMODULE_MEMORY_OPT_LEVEL": "ort_zero.memory.recompute and .level",
    "ORTMODULE_MEMORY_OPT_CONFIG": "ort_zero.memory.recompute",
}
"""Variables that ORTModule alone would read, and what takes their place."""
_SKIP_CHECKS = "SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT", "SKIP_CHECK_DEVICE"
_LAID_OUT = frozenset({"Conv", "FusedConv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"})
"""Operators whose tensors ORT may lay out in blocks for the processor at hand."""
_package: Any = None


def import_ortmodule() -> Any:
    """Return the package ``onnxruntime.training.ortmodule``, importable on this torch, extensions loaded.

    Builds the C++ extensions if they are not in the cache.

    Raises:
        UnsupportedVersionError: a package is missing or out of range.
        BuildError: the extensions cannot be built.
    """
    global _package
    if _package is not None:
        return _package
    versions.require("ort")
    from ort_zero.compat import extensions
    from ort_zero.compat.torch_onnx import alias_exporter_modules

    # a tool of onnxruntime configures the root logger when it is imported
    with third_party.quiet(), third_party.root_logger_kept():
        extensions.load_modules()
        alias_exporter_modules()
        _silence_nvtx()
        import onnxruntime.training.ortmodule as package

        # the first export would import it, and show what it warns of
        importlib.import_module("onnxruntime.training.utils.hooks")
        extensions.install_into(package)
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry

    # registered with ORT when the first ORTModule is made
    CustomGradientRegistry.register_custom_stop_gradient_edges([0], "org.pytorch.aten", "ATen", STOP_GRADIENT, "")
    _package = package
    return package


def _silence_nvtx() -> None:
    """Replace ORT's profiling ranges where torch was built without NVTX: torch's own stub raises there."""
    import torch

    if torch.cuda.is_available():
        return
    from onnxruntime.training.utils import torch_profile_utils

    torch_profile_utils.torch_nvtx_range_push = lambda message: None
    torch_profile_utils.torch_nvtx_range_pop = lambda: None


class Seams(Protocol):
    """What happens at each place where an ORTModule lets us in. Managers without seams behave as upstream's."""

    def call(self, manager: Manager, args: tuple, kwargs: dict, run_in_torch: Callable[[], Any]) -> Any:
        """Do a whole forward call of a manager; `run_in_torch` calls the user's module instead."""

    def run_module(self, module: Any, tensors: tuple) -> tuple[list, Any]:
        """Run the user's module on the tensors of the call; return the tensors of its result, and its structure."""


_calls: list[Seams | None] = []
"""The seams of the managers whose forward runs at the moment, innermost last: a flattened module knows no manager."""


def _seams(obj: Any) -> Seams | None:
    return getattr(obj, "_ort_zero_seams", None)


def _current() -> Seams | None:
    return _calls[-1] if _calls else None


def attach(ortmodule: Any, seams: Seams) -> None:
    """Give both managers of an ORTModule their seams."""
    for manager in managers_of(ortmodule):
        manager._ort_zero_seams = seams
        manager._ort_zero_view = Manager(manager)
        manager._graph_transition_manager = _Transitions(manager._ort_zero_view)


class _Transitions:
    """What the rest of ORTModule asks its graph transition manager; all decisions are the graph layer's."""

    def __init__(self, view: Manager):
        self._view = view
        self._post_export_processed_model_info = SimpleNamespace(is_mem_efficient_grad_management_enabled=False)
        """Upstream's session options ask it for the order of execution."""

    @property
    def _device(self) -> Any:
        return self._view.device

    def signal_model_changed(self) -> None:
        """Do nothing: the graph layer looks at the module itself at each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInfo:
    """What ORT's graph builder tells about a graph, by the names that ORTModule reads."""

    user_output_names: list[str]
    output_grad_indices_non_differentiable: list[int]
    output_grad_indices_require_full_shape: list[int]
    module_output_indices_requires_save_for_backward: list[int]
    frontier_node_arg_map: dict[str, str]
    cached_node_arg_names: list[str]

    @classmethod
    def of(cls, info: Any) -> GraphInfo:
        """Return a plain copy of ORT's own."""
        kinds = {field.name: dict if field.name.endswith("_map") else list for field in fields(cls)}
        return cls(**{name: kind(getattr(info, name)) for name, kind in kinds.items()})


@dataclass(slots=True, eq=False)
class Session:
    """A graph that can run, and what the managers of ORTModule need to know of it."""

    model: Any
    """The ModelProto that the session was made of."""
    info: GraphInfo
    agent: Any
    differentiable: list[int]
    """Inputs that autograd is told of, by position."""
    gradient_map: list[int]
    """Output of the backward for each of them, -1 for none."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """An order to ORT's memory optimizer."""

    file: str
    """JSON list of ``"cluster:kind:count"``; kind 1 is recompute, 2 recompute with compromise."""
    probe: str = "1:0"
    """``"level:layers"``: which operators may be computed again (1: products and normalizations too), and whether
    whole transformer layers are (0 or 1)."""


class Manager:
    """The part of an ORT execution manager that works for the graph layer: exports, builds, runs."""

    def __init__(self, manager: Any):
        self.manager = manager
        manager._logger = _ThroughOurs(manager._logger, {})
        self.training = type(manager).__name__ == "TrainingManager"
        self.flattened_module = manager._flattened_module
        self.device: Any = manager._graph_transition_manager._device
        """Set by the graph layer: engines move a module after it is wrapped."""
        self.save_onnx = manager._debug_options.save_onnx_models.save
        self.level: log.Level = getattr(manager, "_ort_zero_level", None) or log.chosen(log.DEFAULT)

    @property
    def mode(self) -> str:
        """``"training"`` or ``"inference"``."""
        return "training" if self.training else "inference"

    def export(self, tensors: Mapping[str, Any]) -> tuple[Any, Any, dict[str, dict[int, str]]]:
        """Return ModelProto, structure of the result, and dynamic axes; runs and traces the module.

        Args:
            tensors: arguments by name.
        """
        from onnxruntime.training.ortmodule import _graph_transition_manager, _io, _logger

        m = self.manager
        flat = [inspect.Parameter("tensors", inspect.Parameter.VAR_KEYWORD)]
        info = _io.parse_inputs_for_onnx_export(
            # torch >= 2.9 would choose the dynamo exporter
            flat, (), dict(tensors), True, self.device, m._export_mode, m._logger, {"dynamo": False},
        )  # fmt: skip
        self.flattened_module._device = self.device
        options = m._runtime_options
        model, schema, _, _ = _graph_transition_manager.GraphTransitionManager._export_model(
            flattened_module=self.flattened_module,
            model_info_for_export=info,
            flatten_module_inputs=list(tensors.values()),
            # the graph layer keeps buffers; a deep copy of a partitioned model would copy nothing useful
            deepcopy_before_model_export=False,
            device=self.device,
            ortmodule_cache_dir="",
            enable_custom_autograd_function=options.enable_custom_autograd_function,
            enable_zero_stage3_support=False,
            enable_embedding_sparse_optimizer=options.enable_embedding_sparse_optimizer,
            onnx_opset_version=options.onnx_opset_version,
            stage3_param_handle=None,
            # all that is asked of it here: below WARNING the exporter is verbose
            debug_options=SimpleNamespace(
                log_level=_logger.LogLevel.VERBOSE if self.level.exporter == "verbose" else _logger.LogLevel.ERROR,
                torch_exporter_filter=None,
            ),
            time_tracker=m.time_tracker,
            runtime_inspector=m._runtime_inspector,
            logger=m._logger,
        )
        self._save(model, "torch_exported")
        return model, schema, info.onnx_graph_input_dynamic_axes_map

    def process(self, model: Any, infer: Callable) -> Any:
        """Return the exported `model` with the attributes of custom autograd Functions, and shapes.

        Args:
            infer: returns the shapes of the results of a PythonOp (node, input shapes, input types), None if unknown.
        """
        if self.manager._runtime_options.enable_custom_autograd_function:
            from onnxruntime.training.ortmodule._custom_autograd_function_exporter import (
                post_process_enabling_autograd_function,
            )

            model = post_process_enabling_autograd_function(model)

        def shapes(*about: Any) -> list | None:
            ours = infer(*about)
            return ours if ours is not None else _registered_shapes(*about)

        model = infer_shapes(model, shapes)
        self._save(model, "post_processed")
        return model

    def build(
        self, model: bytes, names: Sequence[str], trained: Sequence[str], inputs: Sequence[str]
    ) -> tuple[Any, GraphInfo]:
        """Return the optimized gradient graph (training) or forward graph (inference), and what ORT knows of it.

        Args:
            model: serialized, from :meth:`process`.
            names: of all graph inputs.
            trained: of those whose gradient is wanted.
            inputs: of those among `trained` that are arguments of the call.
        """
        import onnx
        from onnxruntime.capi import _pybind_state as C
        from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

        m = self.manager
        config = C.OrtModuleGraphBuilderConfiguration()
        config.initializer_names = list(names)
        config.initializer_names_to_train = list(trained)
        config.input_names_require_grad = list(inputs)
        config.build_gradient_graph = self.training
        config.enable_caching = False
        config.loglevel = C.Severity(self.level.backend)
        config.use_memory_efficient_gradient = m._runtime_options.use_memory_efficient_gradient
        builder = C.OrtModuleGraphBuilder()
        builder.initialize(model, config)
        builder.build(m._get_graph_transformer_config())
        info = GraphInfo.of(builder.get_graph_info())
        if not self.training:
            return onnx.load_model_from_string(builder.get_forward_model()), info
        built = onnx.load_model_from_string(builder.get_gradient_model())
        GraphOptimizerRegistry.optimize_all(type(m._original_module).__name__, self.device.type, built.graph)
        self._save(built, "optimized")
        return built, info

    def export_options(self) -> dict[str, Any]:
        """Return the options of ORTModule that a graph depends on, as plain values by name."""
        options = self.manager._runtime_options
        return {
            "opset": options.onnx_opset_version,
            "functions": options.enable_custom_autograd_function,
            "gradient": options.use_memory_efficient_gradient,
            "cast": (
                options.propagate_cast_ops_level,
                str(options.propagate_cast_ops_strategy),
                list(options.propagate_cast_ops_allow),
            ),
            "compute optimizer": options.enable_compute_optimizer,
            "embedding sparsity": options.enable_embedding_sparse_optimizer,
        }

    def create_session(
        self,
        model: Any,
        info: GraphInfo,
        *,
        optimized: bytes | None = None,
        write_to: str | None = None,
        recompute: Recompute | None = None,
        in_order: bool = False,
    ) -> Any:
        """Return the agent that runs `model`.

        Args:
            model: ModelProto.
            info: see :meth:`build`.
            optimized: the same model as ORT has optimized it before; it is taken as it is.
            write_to: file for the model that runs, after all changes.
            recompute: what ORT's memory optimizer is to compute again in the backward.
            in_order: run the nodes in the order of the model, whose backward nodes are marked as such.
        """
        import onnxruntime
        from onnxruntime.capi import _pybind_state as C
        from onnxruntime.capi.onnxruntime_inference_collection import get_ort_device_type
        from onnxruntime.training.ortmodule import _utils
        from onnxruntime.training.ortmodule._execution_agent import InferenceAgent, TrainingAgent

        m = self.manager
        options, providers, provider_options = m._get_session_config()
        # upstream takes the number of ORTModule's level, which is another scale
        options.log_severity_level = self.level.backend
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
        if self.device.type == "cpu" and _share_memory():
            options.add_session_config_entry("session.use_env_allocators", "1")
        data = optimized or model.SerializeToString()
        if optimized is not None:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if in_order:
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        if write_to is not None:
            options.optimized_model_filepath = write_to
        if not self.training:
            return InferenceAgent(data, options, providers, provider_options)
        index = _utils.get_device_index(self.device)
        place = C.OrtDevice(get_ort_device_type(self.device.type, index), C.OrtDevice.default_memory(), index)
        forward = len(info.user_output_names) + len(info.frontier_node_arg_map)
        fetched = [output.name for output in model.graph.output]
        feeds = [given.name for given in model.graph.input]
        for key, value in (
            ("optimization.memory_optimizer_config", recompute.file if recompute is not None else ""),
            ("optimization.enable_memory_probe_recompute_config", recompute.probe if recompute is not None else "1:0"),
        ):
            options.add_session_config_entry(key, value)
        return TrainingAgent(
            data, feeds, [place] * forward, fetched, [place] * len(fetched), options, providers, provider_options, index
        )

    def recomputable(self, agent: Any, probe: str) -> dict[str, tuple[str, int]]:
        """Return what ORT's memory optimizer could compute again, by cluster: symbolic saving in bytes, frequency.

        Args:
            agent: of a training graph in which nothing is computed again.
            probe: see :class:`Recompute`.
        """
        _, found = agent.get_serialized_ortmodule_memory_stat("", probe, False)
        return {cluster: (saving, int(frequency)) for cluster, (saving, frequency) in found.items()}

    def follow_determinism(self) -> None:
        """Let sessions that are made from now on be as deterministic as torch is told to be."""
        import torch
        from onnxruntime.training import ortmodule

        ortmodule._use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())

    def run(self, session: Session, inputs: list[Any]) -> Sequence[Any]:
        """Return the tensors that the session computes of `inputs`; in training autograd can run its backward."""
        from onnxruntime.training.ortmodule._inference_manager import InferenceManager

        m = self.manager
        m._onnx_models.optimized_model = session.model
        m._execution_agent, m._graph_info = session.agent, session.info
        m._gradient_map = session.gradient_map
        if self.training:
            return m._forward_class.apply(_Inputs(inputs), *(inputs[i] for i in session.differentiable))
        outputs, _ = InferenceManager.execution_session_run_forward(session.agent, session.model, self.device, *inputs)
        return outputs

    def _save(self, model: Any, name: str) -> None:
        if not self.save_onnx:
            return
        from onnxruntime.training.ortmodule._onnx_models import _get_onnx_file_name, _save_model

        options = self.manager._debug_options.save_onnx_models
        file = _get_onnx_file_name(options.name_prefix, name, self.manager._export_mode)
        _save_model(model, os.path.join(options.path, file))


@functools.cache
def _share_memory() -> bool:
    """Let all sessions that want so take their memory from one arena; return whether they can.

    An arena keeps what it once held. With one for each session, a model with graphs for training, evaluation and two
    tasks would hold the activations of all of them; only one graph runs at a time.
    """
    from onnxruntime.capi import _pybind_state as C

    place = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    # by default a block of up to 128 MB more than asked for is given away whole
    settings = C.OrtArenaCfg(0, -1, -1, 1)
    try:
        C.create_and_register_allocator(place, settings)
    except Exception as error:
        # the user's program has registered one, which is as good
        return "already" in str(error)
    return True


class _ThroughOurs(logging.LoggerAdapter):
    """Decides as ORTModule's logger does, and speaks through ours: it has no handler, and is not ours to give one."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        # we make no deep copy on purpose, so advice about it is of no use
        if self.logger.isEnabledFor(level) and "deep copy" not in str(msg):
            log.get_logger().log(level, f"ORTModule: {msg}", *args, **kwargs)


class _Inputs(list):
    """All inputs of a run, for a function that autograd is told only the differentiable ones of."""


def guard_agent(agent: Any, around: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Surround each run of a session: ``around("forward" or "backward", run)``."""
    for name in ("run_forward", "run_backward"):
        original = getattr(agent, name, None)
        if original is not None:
            phase = name.removeprefix("run_")
            setattr(agent, name, functools.partial(_guarded, around, phase, original))


def _guarded(around, phase, original, *args, **kwargs):
    return around(phase, lambda: original(*args, **kwargs))


@contextlib.contextmanager
def _own_level() -> Iterator[None]:
    """Keep ORTModule in the block from reading a level of its own, which would part from the other three."""
    value = os.environ.pop("ORTMODULE_LOG_LEVEL", None)
    try:
        yield
    finally:
        if value is not None:
            os.environ["ORTMODULE_LOG_LEVEL"] = value


def make_ortmodule(module: Any, *, save_onnx: str | None = None, level: log.Level | None = None) -> Any:
    """Return `module` wrapped in an ORTModule whose policies are ours.

    ORT's own checks and its own fallback are off: the graph layer looks at every call, and knows of the other ranks.

    Args:
        module: the user's.
        save_onnx: folder for its graphs; rank 0 writes them.
        level: of what ORTModule and ONNX Runtime print; None is the default one.
    """
    level = level or log.chosen(log.DEFAULT)
    for variable, ours in _WITHOUT_EFFECT.items():
        if os.environ.get(variable):
            log.get_logger().warning("%s has no effect under ort_zero: set %s", variable, ours)
    package = import_ortmodule()
    from onnxruntime.training.ortmodule import _logger
    from onnxruntime.training.ortmodule._fallback import _FallbackPolicy
    from onnxruntime.training.ortmodule.options import _LoggingOptions, _SkipCheck

    save = save_onnx is not None and env.rank() == 0
    if save:
        os.makedirs(save_onnx, exist_ok=True)
    wanted = package.LogLevel[level.ortmodule]
    with _own_level():
        logging_options = _LoggingOptions(wanted)
        options = package.DebugOptions(
            # each method of a model that a wrapper has as well is told of; DeepSpeed's engine calls none of them
            log_level=package.LogLevel.ERROR if level.exporter == "held" else wanted,
            save_onnx=save,
            onnx_prefix="model" if save else "",
            save_path=save_onnx or "",
        )
    previous, package.ORTMODULE_FALLBACK_POLICY = package.ORTMODULE_FALLBACK_POLICY, _FallbackPolicy.FALLBACK_DISABLE
    try:
        modes = [(part, part.training) for part in module.modules()]
        # it looks at every attribute of the module, also at those that are deprecated
        with third_party.quiet():
            wrapped = package.ORTModule(module, options)
        for part, training in modes:
            part.training = training  # upstream puts all of them into the mode of the whole
    finally:
        package.ORTMODULE_FALLBACK_POLICY = previous
    options.log_level, options._logging = wanted, logging_options
    _logger.configure_ortmodule_logger(wanted)
    if hasattr(module, "generate"):
        # upstream's copy, bound to the wrapper, looks for transformers' methods in the wrapper's type
        wrapped.__dict__["generate"] = module.generate
    for manager in managers_of(wrapped):
        manager._ort_zero_level = level
        manager._runtime_options.skip_check = functools.reduce(
            operator.or_, (getattr(_SkipCheck, name) for name in _SKIP_CHECKS)
        )
        manager._runtime_options.enable_zero_stage3_support = False
        # it moves a Slice over nodes that lack the axis
        manager._runtime_options.enable_compute_optimizer = False
    return wrapped


def managers_of(ortmodule: Any) -> tuple[Any, Any]:
    """Return the (training, inference) managers of an ORTModule."""
    factory = ortmodule._torch_module._execution_manager
    return factory(True), factory(False)


def is_ortmodule(obj: Any) -> bool:
    """Return True if `obj` is an ORTModule; imports nothing."""
    return _package is not None and isinstance(obj, _package.ORTModule)


def symbolics() -> dict[str, Callable]:
    """Return ORT's own table of symbolics, by ``"domain::name"``; entries may be replaced."""
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    return CustomOpSymbolicRegistry._SYMBOLICS


def register_function(name: str, function: type) -> None:
    """Make the autograd Function `function` callable by PythonOp nodes as `name`."""
    from onnxruntime.capi import _pybind_state

    _pybind_state.register_torch_autograd_function(name, function)


def with_all_gradients(function: type) -> type:
    """Return the autograd Function `function` with zeros in place of the gradients that its backward leaves out.

    ORT asks for the gradient of every input that leads to a weight, and gives None on to the next node as it is.
    """
    import torch

    def note(ctx, inputs):
        ctx.ort_zero_inputs = [
            (t.shape, t.dtype, t.device) if isinstance(t, torch.Tensor) and t.is_floating_point() else None
            for t in inputs
        ]

    def forward(ctx, *inputs):
        note(ctx, inputs)
        return function.forward(ctx, *inputs)

    def setup_context(ctx, inputs, output):
        note(ctx, inputs)
        return function.setup_context(ctx, inputs, output)

    def backward(ctx, *gradients):
        found = function.backward(ctx, *gradients)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(
            torch.zeros(like[0], dtype=like[1], device=like[2]) if gradient is None and like is not None else gradient
            for gradient, like in zip(found, ctx.ort_zero_inputs, strict=False)
        )

    if function.setup_context is not torch.autograd.Function.setup_context:
        own = {"setup_context": staticmethod(setup_context), "forward": staticmethod(function.forward)}
    else:
        own = {"forward": staticmethod(forward)}
    # ORT registers what derives from torch's class directly, and nothing else
    return type(function.__name__, (torch.autograd.Function,), {**own, "backward": staticmethod(backward)})


def _registered_shapes(node: Any, input_shapes: list, input_types: list) -> list | None:
    """Return the shapes by the rule that a user's autograd Function brought along, if it has one."""
    from onnxruntime.capi._pybind_state import get_shape_inference_function

    name = next(a.s.decode() for a in node.attribute if a.name == "func_name")
    rule = get_shape_inference_function(name)
    return rule(node, input_shapes, input_types)[0] if rule is not None else None


def onnx_type(torch_dtype: Any) -> int:
    """Return the ONNX element type of a torch dtype."""
    from onnxruntime.training.utils import pytorch_type_to_onnx_dtype

    return int(pytorch_type_to_onnx_dtype(torch_dtype))


def patches() -> tuple[Patch, ...]:
    """Return the patch table that connects :class:`Seams` to ORTModule 1.19.2."""

    def managed(original):
        @functools.wraps(original)
        def forward(self, *inputs, **kwargs):
            seams = _seams(self)
            _calls.append(seams)
            try:
                if seams is None:
                    return original(self, *inputs, **kwargs)
                return seams.call(self._ort_zero_view, inputs, kwargs, lambda: self._original_module(*inputs, **kwargs))
            finally:
                _calls.pop()

        return forward

    def flattened(original):
        @functools.wraps(original)
        def forward(self, *args):
            seams = _current()
            if seams is None:
                return original(self, *args)
            from onnxruntime.training.ortmodule._io import _OutputIdentityOp

            tensors, self._output_schema = seams.run_module(self._original_module, args)
            # an input that is returned as it is would confuse the gradient builder
            return [_OutputIdentityOp.apply(tensor) for tensor in tensors]

        return forward

    def is_training(original):
        @functools.wraps(original)
        def is_training(self):
            # users switch the module that they know, not only the engine
            self._flattened_module.training = self._original_module.training
            return original(self)

        return is_training

    def backward_of_its_own_graph(original):
        @functools.wraps(original)
        def _create_autofunction_class(self):
            function = original(self)
            forward, backward = function.forward, function.backward

            def keeping_forward(ctx, *inputs):
                ctx.ort_zero_all = bool(inputs) and isinstance(inputs[0], _Inputs)
                result = forward(ctx, *(inputs[0] if ctx.ort_zero_all else inputs))
                # upstream takes the newest graph: an export between forward and backward would free this one
                ctx.ort_zero_graph = {name: getattr(self, name) for name in _GRAPH}
                # upstream marks them one by one, and each mark replaces the one before
                plain = self._graph_info.output_grad_indices_non_differentiable
                ctx.mark_non_differentiable(*(result[i] for i in plain))
                return result

            def own_backward(ctx, *grads):
                if not hasattr(ctx.run_info, "state"):
                    raise RuntimeError(
                        "a second backward through one forward call: ONNX Runtime keeps nothing for it, with "
                        "retain_graph=True or without; add the losses up, or call the model again"
                    )
                newest = {name: getattr(self, name) for name in _GRAPH}
                vars(self).update(ctx.ort_zero_graph)
                try:
                    found = backward(ctx, *grads)
                    return (None, *found) if ctx.ort_zero_all else found
                finally:
                    vars(self).update(newest)

            function.forward, function.backward = staticmethod(keeping_forward), staticmethod(own_backward)
            return function

        return _create_autofunction_class

    def users_function(original):
        @functools.wraps(original)
        def register_torch_autograd_function(name, function):
            return original(name, with_all_gradients(function))

        return register_torch_autograd_function

    def without_descriptors(original):
        @functools.wraps(original)
        def _suppress_os_stream_output(*args, **kwargs):
            # with the descriptors redirected, a crash or a breakpoint would be invisible; see graph.exporter_output
            return contextlib.nullcontext() if _current() is not None else original(*args, **kwargs)

        return _suppress_os_stream_output

    tm, im, io = (f"{_PACKAGE}.{n}" for n in ("_training_manager", "_inference_manager", "_io"))
    table: list[Patch] = []

    def add(target: str, build: Callable, why: str, guarded: bool = True) -> None:
        home = target.partition(":")[0]
        table.append(Patch(target=target, build=build, why=why, guard=defined_in(home) if guarded else None))

    for home, cls in ((tm, "TrainingManager"), (im, "InferenceManager")):
        add(f"{home}:{cls}.forward", managed, "the graph layer decides, builds and runs")
    add(
        f"{_PACKAGE}._custom_autograd_function_exporter:register_torch_autograd_function",
        users_function,
        "gradients that a user's function leaves out",
        guarded=False,
    )
    add(f"{io}:_FlattenedModule.forward", flattened, "arguments and outputs of any type")
    add(f"{tm}:TrainingManager._create_autofunction_class", backward_of_its_own_graph, "an export before the backward")
    add(f"{_PACKAGE}._torch_module_ort:TorchModuleORT.is_training", is_training, "modes set on the user's module")
    add(
        f"{_PACKAGE}._logger:_suppress_os_stream_output",
        without_descriptors,
        "no descriptor is ever redirected",
        guarded=False,
    )
    return tuple(table)
