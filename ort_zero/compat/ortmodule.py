"""Everything private of onnxruntime-training 1.19.2: importing it on today's torch, and the seams we work through.

:func:`import_ortmodule` is the only way in. :func:`patches` turns a :class:`Seams` (what the graph layer wants to
happen at each place) into the patch table; nothing under site-packages is edited.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ort_zero import env
from ort_zero.compat import versions
from ort_zero.compat.shape_inference import infer_shapes
from ort_zero.compat.torch_onnx import STOP_GRADIENT
from ort_zero.patching import Patch, defined_in

_PACKAGE = "onnxruntime.training.ortmodule"
_GTM = f"{_PACKAGE}._graph_transition_manager"
_GRAPH = ("_execution_agent", "_graph_info", "_gradient_map")
"""What upstream's backward reads of the manager."""
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

    extensions.load_modules()
    alias_exporter_modules()
    _silence_nvtx()
    import onnxruntime.training.ortmodule as package

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

    def call(self, manager: ManagerView, run: Callable[[], Any], run_in_torch: Callable[[], Any]) -> Any:
        """Surround a whole forward call of a manager; `run_in_torch` calls the user's module instead."""

    def transition(self, manager: ManagerView, proceed: Callable[[], Any]) -> Any:
        """Surround the check, the export and the post-processing."""

    def needs_export(self, verdict: bool) -> bool:
        """Get ORT's own verdict, return the one to act on."""

    def exporting(self, flattened_module: Any) -> AbstractContextManager:
        """Return a context that is held while the module is run and traced."""

    def exported(self, model: Any) -> None:
        """Repair, in place, the ModelProto that the exporter wrote."""

    def without_gradient(self, model: Any) -> set[str]:
        """Return the graph inputs that no result of the exported model depends on; None: of the last one."""

    def flatten_call(self, args: tuple, kwargs: dict) -> dict[str, Any]:
        """Return the call as one flat dict of tensors by name, and strings that stand for everything else."""

    def infer_python_op(self, node: Any, input_shapes: list, input_types: list) -> list | None:
        """Return the shapes of the results of a PythonOp; None if it is not one of ours."""

    def run_module(self, module: Any, tensors: tuple) -> tuple[list, Any]:
        """Run the user's module on the tensors of the call; return the tensors of its result, and its structure."""

    def restore_outputs(self, tensors: Any, structure: Any) -> Any:
        """Return the value that the user's module would have returned."""

    def graph_built(self, manager: ManagerView) -> None:
        """React to a new ``manager.model``; no session exists yet."""

    def session_created(self, manager: ManagerView) -> None:
        """React to a new ``manager.agent``."""

    def add_inputs(self, manager: ManagerView, trigger: str, inputs: dict, device: Any) -> None:
        """Add the trigger to the inputs of a run."""


_calls: list[tuple[Seams | None, Any]] = []
"""The managers whose forward runs at the moment, innermost last: ORT's static functions know no manager."""


def _seams(obj: Any) -> Seams | None:
    return getattr(obj, "_ort_zero_seams", None)


def _current() -> Seams | None:
    return _calls[-1][0] if _calls else None


def attach(ortmodule: Any, seams: Seams) -> None:
    """Give both managers of an ORTModule their seams."""
    # calls arrive flat, see Seams.flatten_call: upstream need not know the signature of the module
    flat = [inspect.Parameter("tensors", inspect.Parameter.VAR_KEYWORD)]
    for manager in managers_of(ortmodule):
        manager._ort_zero_seams = seams
        manager._graph_transition_manager._module_forward_func_parameters = flat


def view(manager: Any) -> ManagerView:
    """Return the few parts of an ORT execution manager that the graph layer needs."""
    return ManagerView(manager)


class ManagerView:
    """Names the private attributes of ORT's execution manager once."""

    def __init__(self, manager: Any):
        self.manager = manager

    @property
    def model(self) -> Any:
        """The optimized ModelProto: gradient graph in training, forward graph in inference."""
        return self.manager._onnx_models.optimized_model

    @model.setter
    def model(self, value: Any) -> None:
        self.manager._onnx_models.optimized_model = value

    @property
    def flattened_module(self) -> Any:
        return self.manager._flattened_module

    @property
    def training(self) -> bool:
        return type(self.manager).__name__ == "TrainingManager"

    @property
    def agent(self) -> Any:
        return self.manager._execution_agent

    def forget_graph(self) -> None:
        """Make the next call export again: nothing half-built is used."""
        gtm = self.manager._graph_transition_manager
        gtm._exported_model_info = None
        gtm._post_export_processed_model_info = None
        self.manager._execution_agent = None

    def guard_agent(self, around: Callable[[str, Callable[[], Any]], Any]) -> None:
        """Surround each run of the session: ``around("forward" or "backward", run)``."""
        agent = self.manager._execution_agent
        for name in ("run_forward", "run_backward"):
            original = getattr(agent, name, None)
            if original is not None:
                phase = name.removeprefix("run_")
                setattr(agent, name, functools.partial(_guarded, around, phase, original))

    def drop_graph_inputs(self, names: set[str], trigger: str, gradient_of_trigger: str | None) -> None:
        """Tell ORT that the weights `names` are no graph inputs any more and that `trigger` is one.

        Args:
            names: graph inputs that the rewrite removed.
            trigger: graph input that the rewrite added.
            gradient_of_trigger: graph output that is the gradient of `trigger`; None in inference.
        """
        info = self.manager._graph_transition_manager._post_export_processed_model_info
        # the memory observer fills this before the graph is built, when the weights were still inputs
        info._buffer_for_ort_runs = None
        info.onnx_graph_input_names = [n for n in info.onnx_graph_input_names if n not in names]
        info._ort_zero_trigger = trigger
        if gradient_of_trigger is None:
            return
        index = {output.name: i for i, output in enumerate(self.model.graph.output)}
        self.manager._gradient_map = [index.get(f"{n}_grad", -1) for n in info.onnx_graph_input_names]
        self.manager._gradient_map.append(index[gradient_of_trigger])


def _guarded(around, phase, original, *args, **kwargs):
    return around(phase, lambda: original(*args, **kwargs))


def make_ortmodule(module: Any, *, save_onnx: str | None = None) -> Any:
    """Return `module` wrapped in an ORTModule whose policies are ours.

    The input checks are on for every call (upstream's default skips them after the first, so that a later change of
    the inputs goes unnoticed). ORT's own fallback is off: it knows nothing of the other ranks.
    """
    package = import_ortmodule()
    from onnxruntime.training.ortmodule._fallback import _FallbackPolicy
    from onnxruntime.training.ortmodule.options import _SkipCheck

    save = save_onnx is not None and env.rank() == 0
    if save:
        os.makedirs(save_onnx, exist_ok=True)
    options = package.DebugOptions(
        log_level=package.LogLevel.ERROR, save_onnx=save, onnx_prefix="model" if save else "", save_path=save_onnx or ""
    )
    previous, package.ORTMODULE_FALLBACK_POLICY = package.ORTMODULE_FALLBACK_POLICY, _FallbackPolicy.FALLBACK_DISABLE
    try:
        modes = [(part, part.training) for part in module.modules()]
        wrapped = package.ORTModule(module, options)
        for part, training in modes:
            part.training = training  # upstream puts all of them into the mode of the whole
    finally:
        package.ORTMODULE_FALLBACK_POLICY = previous
    if hasattr(module, "generate"):
        # upstream's copy, bound to the wrapper, looks for transformers' methods in the wrapper's type
        wrapped.__dict__["generate"] = module.generate
    for manager in managers_of(wrapped):
        manager._runtime_options.skip_check = _SkipCheck.SKIP_CHECK_DISABLED
        manager._runtime_options.enable_zero_stage3_support = False
        # it moves a Slice over nodes that lack the axis
        manager._runtime_options.enable_compute_optimizer = False
        # ORT >= 1.14 takes further exporter arguments from here; torch >= 2.9 would choose the dynamo exporter
        manager._graph_transition_manager._export_extra_kwargs = {"dynamo": False}
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
            _calls.append((seams, self))
            try:
                if seams is None:
                    return original(self, *inputs, **kwargs)
                return seams.call(
                    view(self),
                    lambda: original(self, **seams.flatten_call(inputs, kwargs)),
                    lambda: self._original_module(*inputs, **kwargs),
                )
            finally:
                _calls.pop()

        return forward

    def transition(original):
        @functools.wraps(original)
        def get_post_processed_model(self, args, kwargs):
            seams, manager = _calls[-1] if _calls else (None, None)
            if seams is None:
                return original(self, args, kwargs)
            return seams.transition(view(manager), lambda: original(self, args, kwargs))

        return get_post_processed_model

    def export_check(original):
        @functools.wraps(original)
        def _export_check(*args, **kwargs):
            verdict = bool(original(*args, **kwargs))
            seams = _current()
            return verdict if seams is None else seams.needs_export(verdict)

        return _export_check

    def exported(original):
        @functools.wraps(original)
        def _get_exported_model(*args, **kwargs):
            seams = _current()
            if seams is None:
                return original(*args, **kwargs)
            # `exporting` keeps buffers; a deep copy of a partitioned model would copy nothing useful
            kwargs["deepcopy_before_model_export"] = False
            with seams.exporting(kwargs["flattened_module"]):
                model, schema = original(*args, **kwargs)
            seams.exported(model)
            return model, schema

        return _get_exported_model

    def trainable(original):
        @functools.wraps(original)
        def _export_model(*args, **kwargs):
            model, schema, names, require_grad = original(*args, **kwargs)
            # upstream lists every parameter, builds gradients of frozen ones, and re-processes at the second call
            left_out = {n for n, p in kwargs["flattened_module"].named_parameters() if not p.requires_grad}
            if _current() is not None:
                left_out |= _current().without_gradient(model)
            return model, schema, names, [n for n in require_grad if n not in left_out]

        return _export_model

    def reprocess(original):
        @functools.wraps(original)
        def _reprocess_check(*, flatten_module, exported_model_info, **kwargs):
            # upstream asserts that every graph input that no user gave is a parameter; BatchNorm has buffers
            hidden = {name for name, _ in flatten_module.named_buffers()}
            if _current() is not None:
                hidden |= _current().without_gradient(None)
            names = exported_model_info.onnx_graph_input_names
            exported_model_info.onnx_graph_input_names = [n for n in names if n not in hidden]
            try:
                return original(flatten_module=flatten_module, exported_model_info=exported_model_info, **kwargs)
            finally:
                exported_model_info.onnx_graph_input_names = names

        return _reprocess_check

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

    def shapes(original):
        @functools.wraps(original)
        def _infer_shapes(model):
            seams = _current()
            if seams is None:
                return original(model)

            def infer(*about):
                ours = seams.infer_python_op(*about)
                return ours if ours is not None else _registered_shapes(*about)

            return infer_shapes(model, infer)

        return _infer_shapes

    def restore(original):
        @functools.wraps(original)
        def restore_outputs(self, ort_flatten_outputs):
            seams = _current()
            if seams is None:
                return original(self, ort_flatten_outputs)
            return seams.restore_outputs(ort_flatten_outputs, self.module_forward_output_schema)

        return restore_outputs

    def construct(original):
        @functools.wraps(original)
        def construct_inputs(self, args, kwargs, constant_as_tensor, device):
            inputs = original(self, args, kwargs, constant_as_tensor, device)
            trigger = getattr(self, "_ort_zero_trigger", None)
            seams, manager = _calls[-1] if _calls else (None, None)
            if trigger is not None and seams is not None:
                seams.add_inputs(view(manager), trigger, inputs, device)
            return inputs

        return construct_inputs

    def built(original):
        @functools.wraps(original)
        def _build_graph(self, config):
            original(self, config)
            if _seams(self) is not None:
                _seams(self).graph_built(view(self))

        return _build_graph

    def created(original):
        @functools.wraps(original)
        def _create_execution_agent(self):
            original(self)
            if _seams(self) is not None:
                _seams(self).session_created(view(self))

        return _create_execution_agent

    def session_config(original):
        @functools.wraps(original)
        def _get_session_config(self):
            options, providers, provider_options = original(self)
            if _seams(self) is not None:
                # it refuses a Gemm that reads the third or a later output of a node, and a gather node has many
                options.add_session_config_entry("optimization.disable_specified_optimizers", "GemmSumFusion")
            if _seams(self) is not None and options.intra_op_num_threads == 0:
                # ORT's default is every core for every rank: ranks on one machine then fight for the cores
                options.intra_op_num_threads = env.threads_per_rank()
                options.inter_op_num_threads = 1
            return options, providers, provider_options

        return _get_session_config

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
                result = forward(ctx, *inputs)
                # upstream takes the newest graph: an export between forward and backward would free this one
                ctx.ort_zero_graph = {name: getattr(self, name) for name in _GRAPH}
                # upstream marks them one by one, and each mark replaces the one before
                plain = self._graph_info.output_grad_indices_non_differentiable
                ctx.mark_non_differentiable(*(result[i] for i in plain))
                return result

            def own_backward(ctx, *grads):
                newest = {name: getattr(self, name) for name in _GRAPH}
                vars(self).update(ctx.ort_zero_graph)
                try:
                    return backward(ctx, *grads)
                finally:
                    vars(self).update(newest)

            function.forward, function.backward = staticmethod(keeping_forward), staticmethod(own_backward)
            return function

        return _create_autofunction_class

    def quiet(original):
        @functools.wraps(original)
        def _log_feature_stats(self):
            # ours is one line for each graph
            return original(self) if _seams(self) is None else None

        return _log_feature_stats

    def users_function(original):
        @functools.wraps(original)
        def register_torch_autograd_function(name, function):
            return original(name, with_all_gradients(function))

        return register_torch_autograd_function

    tm, im, gem, io = (f"{_PACKAGE}.{n}" for n in ("_training_manager", "_inference_manager",
                                                   "_graph_execution_manager", "_io"))  # fmt: skip
    table: list[Patch] = []

    def add(target: str, build: Callable, why: str, guarded: bool = True) -> None:
        home = target.partition(":")[0]
        table.append(Patch(target=target, build=build, why=why, guard=defined_in(home) if guarded else None))

    for home, cls in ((tm, "TrainingManager"), (im, "InferenceManager")):
        add(f"{home}:{cls}.forward", managed, "errors with a cause, no silent fallback")
        # decorated by ORT's TrackTime, whose wrapper lives in _logger
        add(f"{home}:{cls}._build_graph", built, "the bridge rewrites the graph here", guarded=False)
        add(f"{home}:{cls}._create_execution_agent", created, "counts runs, re-raises errors of nodes", guarded=False)
    add(f"{_GTM}:GraphTransitionManager.get_post_processed_model", transition, "ranks agree on a transition")
    add(f"{_GTM}:GraphTransitionManager._export_check", export_check, "ranks agree on a transition")
    add(f"{_GTM}:GraphTransitionManager._get_exported_model", exported, "export with stand-in weights")
    add(f"{_GTM}:GraphTransitionManager._export_model", trainable, "no gradients of frozen weights", guarded=False)
    add(
        f"{_PACKAGE}._custom_autograd_function_exporter:register_torch_autograd_function",
        users_function,
        "gradients that a user's function leaves out",
        guarded=False,
    )
    add(f"{_GTM}:GraphTransitionManager._infer_shapes", shapes, "goes on where upstream stops")
    add(f"{_GTM}:GraphTransitionManager._reprocess_check", reprocess, "buffers are no parameters")
    add(f"{_GTM}:PostExportProcessedModelInfo.construct_inputs", construct, "the trigger input")
    add(f"{_GTM}:PostExportProcessedModelInfo.restore_outputs", restore, "outputs of any type")
    add(f"{io}:_FlattenedModule.forward", flattened, "arguments and outputs of any type")
    add(f"{gem}:GraphExecutionManager._get_session_config", session_config, "threads from the cores of a rank")
    add(f"{tm}:TrainingManager._create_autofunction_class", backward_of_its_own_graph, "an export before the backward")
    add(f"{_PACKAGE}._torch_module_ort:TorchModuleORT.is_training", is_training, "modes set on the user's module")
    add(f"{gem}:GraphExecutionManager._log_feature_stats", quiet, "one line instead of a table")
    return tuple(table)
