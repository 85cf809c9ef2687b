"""What a runner sees of one of ORTModule's execution managers: it exports, builds and runs."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ort_zero import log
from ort_zero.compat import third_party
from ort_zero.ortmodule.compat.ortmodule.functions import registered_shapes
from ort_zero.ortmodule.compat.ortmodule.sessions import (
    AllInputs,
    GraphInfo,
    Recompute,
    RunAgain,
    Session,
    has_gradients,
    inference_agent,
    set_options,
    training_agent,
)
from ort_zero.ortmodule.compat.shape_inference import TakenSizes, infer_shapes
from ort_zero.ortmodule.compat.torch_onnx.exporter_modules import legacy_exporter
from ort_zero.utils.patching import replaced


class Manager:
    """The part of an ORT execution manager that works for a runner: it exports, builds and runs."""

    def __init__(self, manager: Any):
        self.manager = manager
        manager._logger = _ThroughOurs(manager._logger, {"is_users": getattr(manager, "_ort_zero_is_users", False)})
        self.training = self.wants_gradients(manager)
        """Whether the graphs have gradients; the mode of the module is another matter."""
        self.flattened_module = manager._flattened_module
        self.device: Any = manager._graph_transition_manager._device
        """Set by the runner: engines move a module after it is wrapped."""
        self.save_onnx = manager._debug_options.save_onnx_models.save
        self.level: log.Level = getattr(manager, "_ort_zero_level", None) or log.chosen(log.DEFAULT)

    @staticmethod
    def wants_gradients(manager: Any) -> bool:
        """Return whether one of ORTModule's two managers is the one whose graphs have gradients."""
        return type(manager).__name__ == "TrainingManager"

    @property
    def mode(self) -> str:
        """Name of what the manager runs: ``"training"`` (with gradients) or ``"inference"``."""
        return "training" if self.training else "inference"

    def export(self, tensors: Mapping[str, Any]) -> tuple[Any, Any, dict[str, dict[int, str]]]:
        """Return ModelProto, structure of the result, and dynamic axes; runs and traces the module.

        Args:
            tensors: arguments by name.
        """
        from onnxruntime.training import ortmodule
        from onnxruntime.training.ortmodule import _graph_transition_manager, _io, _logger

        m = self.manager
        flat = [inspect.Parameter("tensors", inspect.Parameter.VAR_KEYWORD)]
        # torch >= 2.9 would choose the dynamo exporter
        more = {**legacy_exporter(), **m._graph_transition_manager._export_extra_kwargs}
        info = _io.parse_inputs_for_onnx_export(
            flat, (), dict(tensors), True, self.device, m._export_mode, m._logger, more
        )
        self.flattened_module._device = self.device
        options = m._runtime_options
        m._graph_transition_manager._original_model_has_changed = False
        transitions = _graph_transition_manager.GraphTransitionManager
        # it puts a node before a loss that prints the share of padding; switched off, it returns what cannot be read
        no_labels = replaced(transitions, "_add_check_label_sparsity_hook", lambda _: staticmethod(lambda *about: []))
        with third_party.quiet_exporter(), ortmodule.export_context(), no_labels:
            model, schema, _, _ = transitions._export_model(
                flattened_module=self.flattened_module,
                model_info_for_export=info,
                flatten_module_inputs=list(tensors.values()),
                # the runner restores buffers; a deep copy of a partitioned model would copy nothing useful
                deepcopy_before_model_export=False,
                device=self.device,
                ortmodule_cache_dir="",
                enable_custom_autograd_function=options.enable_custom_autograd_function,
                enable_zero_stage3_support=False,
                enable_embedding_sparse_optimizer=options.enable_embedding_sparse_optimizer,
                onnx_opset_version=options.onnx_opset_version,
                stage3_param_handle=None,
                # all that is read of it here: below WARNING the exporter is verbose
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

    def process(self, model: Any, infer: Callable, sizes: Mapping[str, int]) -> tuple[Any, TakenSizes]:
        """Return the exported `model` with the attributes of custom autograd Functions, and shapes.

        Args:
            model: as :meth:`export` returns it.
            sizes: of the inputs in the call that was traced, by the names of their axes.
            infer: returns the shapes of the results of a PythonOp (node, input shapes, input types), None if unknown.
        """
        if self.manager._runtime_options.enable_custom_autograd_function:
            from onnxruntime.training.ortmodule._custom_autograd_function_exporter import (
                post_process_enabling_autograd_function,
            )

            model = post_process_enabling_autograd_function(model)

        def shapes(*about: Any) -> list | None:
            ours = infer(*about)
            return ours if ours is not None else registered_shapes(*about)

        model, taken = infer_shapes(model, shapes, sizes)
        self._save(model, "post_processed")
        return model, taken

    def save_shared(self, model: Any) -> None:
        """Save the export of another graph, which serves this mode too, under the names of an export of its own."""
        for name in ("torch_exported", "post_processed"):
            self._save(model, name)

    def build(
        self, model: bytes, names: Sequence[str], trained: Sequence[str], inputs: Sequence[str]
    ) -> tuple[Any, GraphInfo]:
        """Return the optimized gradient graph, or the forward graph if no gradient is wanted; and ORT's facts about it.

        Args:
            model: serialized, from :meth:`process`.
            names: names of all graph inputs.
            trained: names of those whose gradient is wanted.
            inputs: names of those among `trained` that are arguments of the call.
        """
        import onnx
        from onnxruntime.capi import _pybind_state as C
        from onnxruntime.training.ortmodule.graph_optimizer_registry import GraphOptimizerRegistry

        m = self.manager
        config = C.OrtModuleGraphBuilderConfiguration()
        config.initializer_names = list(names)
        config.initializer_names_to_train = list(trained)
        config.input_names_require_grad = list(inputs)
        config.build_gradient_graph = bool(trained)
        config.enable_caching = False
        config.loglevel = C.Severity(self.level.backend)
        config.use_memory_efficient_gradient = m._runtime_options.use_memory_efficient_gradient
        builder = C.OrtModuleGraphBuilder()
        builder.initialize(model, config)
        transformers = m._get_graph_transformer_config()
        if self.save_onnx and trained:
            transformers.optimized_pre_grad_filepath = self._file("optimized_pre_grad")
        builder.build(transformers)
        info = GraphInfo.of(builder.get_graph_info())
        if not trained:
            forward = onnx.load_model_from_string(builder.get_forward_model())
            self._save(forward, "optimized")
            return forward, info
        built = onnx.load_model_from_string(builder.get_gradient_model())
        GraphOptimizerRegistry.optimize_all(type(m._original_module).__name__, self.device.type, built.graph)
        self._save(built, "optimized")
        return built, info

    def note_layerwise_recompute(self) -> None:
        """Say that the backward computes layers again in place of the model's own activation checkpointing."""
        self.manager._logger.info(
            "Layer-wise memory optimization is enabled: the model uses activation checkpointing, and "
            "ORTMODULE_MEMORY_OPT_LEVEL is 1"
        )

    def note_text(self) -> None:
        """Say that a text among the arguments is a part of the graph."""
        self.manager._logger.info(
            f"Received input of type {str} is treated as a constant by ORT by default. Another text is exported anew."
        )

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
        options, providers, provider_options = self.manager._get_session_config()
        if self.save_onnx:
            options.optimized_model_filepath = self._file("execution_model")
        set_options(
            options,
            model,
            severity=self.level.backend,
            on_cpu=self.device.type == "cpu",
            optimized=optimized is not None,
            write_to=write_to,
            in_order=in_order,
        )
        data = optimized or model.SerializeToString()
        if not has_gradients(model):
            return inference_agent(data, options, providers, provider_options)
        return training_agent(data, model, info, self.device, recompute, (options, providers, provider_options))

    def recomputable(self, agent: Any, probe: str) -> dict[str, tuple[str, int]]:
        """Return what ORT's memory optimizer could compute again, by cluster: symbolic saving in bytes, frequency.

        Args:
            agent: agent of a training graph in which nothing is computed again.
            probe: see :class:`Recompute`.
        """
        _, found = agent.get_serialized_ortmodule_memory_stat("", probe, False)
        return {cluster: (saving, int(frequency)) for cluster, (saving, frequency) in found.items()}

    def follow_determinism(self) -> None:
        """Let sessions that are made from now on be deterministic if torch is set to be."""
        import torch
        from onnxruntime.training import ortmodule

        ortmodule._use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())

    def run(self, session: Session, inputs: list[Any], again: RunAgain | None = None) -> Sequence[Any]:
        """Return the tensors that the session computes of `inputs`; in training autograd can run its backward.

        Args:
            session: from :meth:`create_session`.
            inputs: in the graph's order.
            again: runs the forward again for a second backward; None where that is an error.
        """
        from onnxruntime.training.ortmodule._inference_manager import InferenceManager

        m = self.manager
        self._show(session)
        if session.gradients:
            given = AllInputs(inputs)
            given.again = again
            return m._forward_class.apply(given, *(inputs[i] for i in session.differentiable))
        outputs, _ = InferenceManager.execution_session_run_forward(session.agent, session.model, self.device, *inputs)
        return outputs

    def _show(self, session: Session) -> None:
        """Let users read the graph that runs; also of the manager that upstream chooses, by the mode alone."""
        import torch

        by_mode = self.manager._original_module.training and torch.is_grad_enabled()
        for m in {self.manager, self.manager._ort_zero_views[by_mode].manager}:
            m._onnx_models.optimized_model = session.model
            m._execution_agent, m._graph_info = session.agent, session.info
            m._gradient_map, m._graph_builder = session.gradient_map, session.builder

    def _save(self, model: Any, name: str) -> None:
        if self.save_onnx:
            from onnxruntime.training.ortmodule._onnx_models import _save_model

            _save_model(model, self._file(name))

    def _file(self, name: str) -> str:
        """Return the path of a saved graph; upstream's names tell the modes of the module apart, not of autograd."""
        import torch
        from onnxruntime.training.ortmodule._onnx_models import _get_onnx_file_name

        options = self.manager._debug_options.save_onnx_models
        modes = torch.onnx.TrainingMode
        mode = modes.TRAINING if self.training and self.manager._original_module.training else modes.EVAL
        return os.path.join(options.path, _get_onnx_file_name(options.name_prefix, name, mode))


class _ThroughOurs(logging.LoggerAdapter):
    """Decides as ORTModule's logger does, and speaks through ours: it has no handler, and is not ours to give one.

    What an ORTModule of a user says goes to the handlers of the program, as upstream's does, if the program has any.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        # we make no deep copy on purpose, so advice about it is of no use
        if not self.logger.isEnabledFor(level) or "deep copy" in str(msg):
            return
        if self.extra and self.extra["is_users"] and logging.getLogger().handlers:
            self.logger.log(level, msg, *args, **kwargs)
        else:
            log.get_logger().log(level, f"ORTModule: {msg}", *args, **kwargs)
