"""The table of patches that connects a :class:`~.compat.ortmodule.runner.ModelRunner` to ORTModule 1.19.2."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from ort_zero import log
from ort_zero.ortmodule.compat.ortmodule.functions import SYMBOLICS, contiguous, with_all_gradients
from ort_zero.ortmodule.compat.ortmodule.loading import PACKAGE
from ort_zero.ortmodule.compat.ortmodule.runner import current_runner, runner_of, running
from ort_zero.ortmodule.compat.ortmodule.sessions import AllInputs
from ort_zero.ortmodule.compat.ortmodule.wrapper_class import warn_of_collisions
from ort_zero.ortmodule.compat.torch_autograd import keeps_graph
from ort_zero.ortmodule.compat.torch_compile import not_compiled
from ort_zero.utils.patching import Patch, defined_in

_GRAPH = ("_execution_agent", "_graph_info", "_gradient_map")
"""Attributes of the manager that upstream's backward reads."""
RANGES = "onnxruntime.training.utils.torch_profile_utils"
"""Module of the functions that begin and end a profiling range."""
STATISTICS = "onnxruntime.training.utils.hooks._statistics_subscriber"
"""Module of upstream's own collection of statistics."""


def patches() -> tuple[Patch, ...]:
    """Return the patches of ORTModule's own code; needs :func:`~.loading.import_ortmodule` before they are applied."""
    table = [
        _patch(f"{PACKAGE}._training_manager:TrainingManager.forward", _patch_forward, "the runner does the call"),
        _patch(f"{PACKAGE}._inference_manager:InferenceManager.forward", _patch_forward, "the runner does the call"),
        _patch(f"{PACKAGE}._io:_FlattenedModule.forward", _patch_flattened, "arguments and outputs of any type"),
        _patch(
            f"{PACKAGE}._training_manager:TrainingManager._create_autofunction_class",
            _patch_create_autofunction_class,
            "an export before the backward",
        ),
        _patch(
            f"{PACKAGE}._torch_module_ort:TorchModuleORT.is_training",
            _patch_is_training,
            "modes set on the user's module",
        ),
        _patch(
            f"{PACKAGE}._utils:check_for_name_collisions_and_bind_methods_to_ortmodule",
            _patch_bind_methods,
            "methods stay bound to the user's module",
        ),
        _patch(
            f"{PACKAGE}._utils:_torch_tensor_to_dlpack",
            _patch_torch_tensor_to_dlpack,
            "tensors without elements in any layout",
        ),
        _patch(
            f"{PACKAGE}:_defined_from_envvar",
            _patch_defined_from_envvar,
            "activation checkpointing is seen while a module is traced",
        ),
        # a builtin, and a function that contextlib made: neither says where it was defined
        Patch(
            target=f"{PACKAGE}._custom_autograd_function_exporter:register_torch_autograd_function",
            build=_patch_register_torch_autograd_function,
            why="gradients that a user's function leaves out",
        ),
        Patch(
            target=f"{PACKAGE}._logger:_suppress_os_stream_output",
            build=_patch_suppress_os_stream_output,
            why="no descriptor is ever redirected",
        ),
    ]
    return (*table, *_patches_without_cuda())


def symbolic_patches(symbolics: Mapping[str, Callable]) -> tuple[Patch, ...]:
    """Return the patches that put `symbolics` into ORT's own table, by ``"domain::name"``."""

    def patch(name: str, symbolic: Callable) -> Patch:
        why = "a symbolic that suits ONNX Runtime's gradients"
        return Patch(target=f"{SYMBOLICS}[{name}]", build=lambda _: symbolic, why=why, may_be_new=True)

    return tuple(patch(name, symbolic) for name, symbolic in symbolics.items())


def _patch(target: str, build: Callable, why: str) -> Patch:
    return Patch(target=target, build=build, why=why, guard=defined_in(target.partition(":")[0]))


def _patches_without_cuda() -> tuple[Patch, ...]:
    """Return the patch of the function that asks torch for CUDA to name a device."""
    import torch

    if torch.cuda.is_available():
        return ()
    why = "names of devices on a torch without CUDA"
    return (_patch(f"{PACKAGE}._utils:get_device_str", _patch_get_device_str, why),)


def range_patches() -> tuple[Patch, ...]:
    """Return the patches of ORT's profiling ranges, which its hooks and ORTModule share; none where torch has CUDA."""
    import torch

    if torch.cuda.is_available():
        return ()
    why = "profiling ranges on a torch without NVTX"
    return tuple(_patch(f"{RANGES}:torch_nvtx_range_{way}", _patch_nvtx_range, why) for way in ("push", "pop"))


def statistics_patches() -> tuple[Patch, ...]:
    """Return the patch that names ort_zero's statistics to programs that use those of onnxruntime-training."""
    why = "one line names ort_zero.hooks"
    return (_patch(f"{STATISTICS}:StatisticsSubscriber.__init__", _patch_statistics_subscriber, why),)


def _patch_statistics_subscriber(original: Callable) -> Callable:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        log.get_logger().info(
            "these statistics are those of onnxruntime-training 1.19.2; ort_zero.hooks has GlobalSubscriberManager and "
            "StatisticsSubscriber of its own, with gradients, and `ort-zero stats compare` for what they write"
        )
        original(self, *args, **kwargs)

    return __init__


def _patch_nvtx_range(original: Callable) -> Callable:
    @functools.wraps(original)
    def nothing(*args: Any) -> None:
        return None

    return nothing


def _patch_get_device_str(original: Callable) -> Callable:
    import torch

    @functools.wraps(original)
    def get_device_str(device):
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device) and device.index is None:
            return f"{device.type}:0"  # upstream asks CUDA for the current one, whatever the type
        return original(device)

    return get_device_str


def _patch_forward(original: Callable) -> Callable:
    def run(self, *inputs, **kwargs):
        runner = runner_of(self)
        with running(runner):
            if runner is None:
                return original(self, *inputs, **kwargs)
            return runner.call(self._ort_zero_views, inputs, kwargs, lambda: self._original_module(*inputs, **kwargs))

    run = not_compiled(run)

    @functools.wraps(original)
    def forward(self, *inputs, **kwargs):
        return run(self, *inputs, **kwargs)

    return forward


def _patch_flattened(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(self, *args):
        runner = current_runner()
        if runner is None:
            return original(self, *args)
        from onnxruntime.training.ortmodule._io import _OutputIdentityOp

        tensors, self._output_schema = runner.run_module(self._original_module, args)
        # an input that is returned as it is would confuse the gradient builder
        return [_OutputIdentityOp.apply(tensor) for tensor in tensors]

    return forward


def _patch_bind_methods(original: Callable) -> Callable:
    @functools.wraps(original)
    def check_for_name_collisions_and_bind_methods_to_ortmodule(ortmodule, user_module, logger):
        warn_of_collisions(ortmodule, user_module, logger)

    return check_for_name_collisions_and_bind_methods_to_ortmodule


def _patch_is_training(original: Callable) -> Callable:
    @functools.wraps(original)
    def is_training(self):
        # users switch the module that they know, not only the engine
        self._flattened_module.training = self._original_module.training
        return original(self)

    return is_training


def _patch_create_autofunction_class(original: Callable) -> Callable:
    """Let each backward run the graph of its own forward, whatever has been built in between."""
    import torch

    @functools.wraps(original)
    def _create_autofunction_class(self):
        function = original(self)
        forward, backward = function.forward, function.backward

        def keeping_forward(ctx, *inputs):
            ctx.ort_zero_all = bool(inputs) and isinstance(inputs[0], AllInputs)
            ctx.ort_zero_again = inputs[0].again if ctx.ort_zero_all else None
            result = forward(ctx, *(inputs[0] if ctx.ort_zero_all else inputs))
            # upstream takes the newest graph: an export between forward and backward would free this one
            ctx.ort_zero_graph = {name: getattr(self, name) for name in _GRAPH}
            # upstream marks them one by one, and each mark replaces the one before
            plain = self._graph_info.output_grad_indices_non_differentiable
            ctx.mark_non_differentiable(*(result[i] for i in plain))
            return result

        def own_backward(ctx, *grads):
            if torch.is_grad_enabled() and ctx.ort_zero_again is not None:  # autograd says so by this
                return None, *ctx.ort_zero_again.differentiable(grads)
            if ctx.ort_zero_again is not None:
                ctx.ort_zero_again.begin_backward(grads)
            newest = {name: getattr(self, name) for name in _GRAPH}
            vars(self).update(ctx.ort_zero_graph)
            try:
                found = backward(ctx, *grads) if hasattr(ctx.run_info, "state") else backward_again(ctx, *grads)
            finally:
                vars(self).update(newest)
            again = ctx.ort_zero_again
            if again is not None:
                found = again.left_out(grads, found)
                if not again.note_backward(grads, keeps_graph()):
                    ctx.ort_zero_again = None  # as PyTorch lets go of what it has saved
            return (None, *found) if ctx.ort_zero_all else found

        def backward_again(ctx, *grads):
            again = ctx.ort_zero_again
            if again is None or not again.is_new(grads):
                _ = ctx.saved_tensors  # PyTorch's own error, where the graph was not kept
            if again is None:
                raise RuntimeError("a second backward through a run that nobody can repeat")
            with again.prepared(grads) as agent:
                self._execution_agent = agent or self._execution_agent  # put back with the rest of the graph
                _, ctx.run_info = self.execution_session_run_forward(
                    self._execution_agent,
                    self._onnx_models.optimized_model,
                    self._device,
                    self._gradient_accumulation_manager,
                    *again.inputs,
                )
                return backward(SimpleNamespace(run_info=ctx.run_info, saved_tensors=()), *grads)

        function.forward, function.backward = staticmethod(keeping_forward), staticmethod(own_backward)
        return function

    return _create_autofunction_class


def _patch_torch_tensor_to_dlpack(original: Callable) -> Callable:
    @functools.wraps(original)
    def _torch_tensor_to_dlpack(tensor):
        # the gradient of a sum over nothing is expanded, which ORT refuses
        return original(tensor if tensor.numel() else contiguous(tensor))

    return _torch_tensor_to_dlpack


def _patch_defined_from_envvar(original: Callable) -> Callable:
    @functools.wraps(original)
    def _defined_from_envvar(name, default_value, warn=True):
        # by this, upstream's own replacement of checkpoint() would call the function before we see it
        if name == "ORTMODULE_MEMORY_OPT_LEVEL" and current_runner() is not None:
            return default_value
        return original(name, default_value, warn)

    return _defined_from_envvar


def _patch_register_torch_autograd_function(original: Callable) -> Callable:
    @functools.wraps(original)
    def register_torch_autograd_function(name, function):
        return original(name, with_all_gradients(function))

    return register_torch_autograd_function


def _patch_suppress_os_stream_output(original: Callable) -> Callable:
    @functools.wraps(original)
    def _suppress_os_stream_output(*args, **kwargs):
        # with the descriptors redirected, a crash or a breakpoint would be invisible
        return contextlib.nullcontext() if current_runner() is not None else original(*args, **kwargs)

    return _suppress_os_stream_output
