"""Have upstream's own ORTModule export a captured graph and build the training graph, without its session."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import torch

from ort_zero import env, log
from ort_zero.ortmodule.upstream.loading import import_ortmodule
from ort_zero.ortmodule.upstream.patches import make_ortmodule
from ort_zero.utils.patching import replaced

_building = threading.RLock()
"""Held while functions of upstream are replaced for one graph."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """How upstream builds graphs."""

    log_level: str = "WARNING"
    """Name of a level of :mod:`ort_zero.log`."""
    save_onnx: str | None = None
    """Folder into which rank 0 writes the models of each step of a build; None writes none."""
    name: str = "graph"
    """Beginning of the names of these files."""
    recomputes: bool = False
    """The backward is to compute values again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltGraph:
    """A model as upstream's builder makes it; weights are inputs."""

    model: onnx.ModelProto
    """The training graph, with a YieldOp between forward and backward; without a backward the exported graph."""
    places: dict[str, int]
    """Name of each input that the model reads, and the place of its tensor among the inputs."""
    gradients: dict[int, int]
    """For each input with a gradient, by its place: the number of the model's output with the gradient."""
    without_gradient: frozenset[int]
    """Numbers of the results that lead to no input with a gradient."""
    table: Mapping[str, int] = field(default_factory=dict)
    """The configurations of upstream's memory optimizer, and the number of their places; empty unless asked for."""
    with_plan: Callable[[Sequence[str]], onnx.ModelProto] | None = None
    """Returns the training graph with configurations applied, after ONNX Runtime's graph optimizers."""
    is_optimized: bool = False
    """Whether ONNX Runtime's graph optimizers have run already."""


def build(
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    axes: tuple[Sequence[dict[int, str]], Sequence[dict[int, str]]],
    is_training: bool,
    symbolics: dict[str, Callable[..., Any]],
    options: BuildOptions,
) -> BuiltGraph:
    """Return the model of a captured graph.

    Args:
        module: takes the tensors, and returns a tuple of tensors.
        tensors: the inputs of a call, whole and with values: the exporter traces them.
        axes: a name for each size that changes, by dimension: of each input, and of each result.
        is_training: build a backward.
        symbolics: ``"::name"`` of an ATen operator to its symbolic function; wins over upstream's.
        options: how to build.

    Raises:
        Exception: whatever the exporter or upstream's builder raises.
    """
    import_ortmodule()
    from onnxruntime.training.ortmodule import _io
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    with _building, ExitStack() as stack:
        stack.enter_context(_quiet(options.log_level))
        CustomOpSymbolicRegistry._SYMBOLICS.update(symbolics)
        wrapper = make_ortmodule(module, _debug_options(options))
        manager = wrapper._torch_module._execution_manager(is_training)
        stack.enter_context(replaced(_io, "parse_inputs_for_onnx_export", lambda parse: _with_axes(parse, axes[0])))
        stack.enter_context(
            replaced(_io, "parse_outputs_for_onnx_export_and_extract_schema", lambda _: _names_and_axes(axes[1]))
        )
        _, info = manager._graph_transition_manager.get_post_processed_model(tuple(tensors), {})
        names = {name: place for place, name in enumerate(_exported_names(manager))}
        if not is_training:
            model = info._post_export_processed_model
            return BuiltGraph(
                model=model,
                places={each.name: names[each.name] for each in model.graph.input},
                gradients={},
                without_gradient=frozenset(range(len(model.graph.output))),
            )
        manager._initialize_graph_builder(info)
        manager._detect_from_inputs(tuple(tensors), {})
        manager._build_graph(manager._get_graph_transformer_config())
        model = manager._onnx_models.optimized_model
        trained = [name for name in info.onnx_graph_input_names if name in info.onnx_graph_input_names_require_grad]
        built = BuiltGraph(
            model=model,
            places={name: names[name] for name in info.onnx_graph_input_names},
            gradients={names[name]: index for index, name in enumerate(trained)},
            without_gradient=frozenset(manager._graph_info.output_grad_indices_non_differentiable),
        )
        asked = manager._runtime_options.memory_optimizer_is_enabled()  # by upstream's variables
        if not (options.recomputes or asked or not _is_quiet(options.log_level)):
            return built
        planner = _Planner(manager)
        if asked:
            return replace(built, model=planner.as_upstream(), is_optimized=True)
        return replace(built, table=planner.table(), with_plan=planner.with_plan, is_optimized=options.recomputes)


class _Planner:
    """Asks upstream's memory optimizer for its table, and has it apply plans to one training graph.

    Args:
        manager: upstream's, with the graph built.
    """

    def __init__(self, manager: Any):
        self._manager = manager

    def table(self) -> dict[str, int]:
        """Return the configurations, and the number of their places; at upstream's level INFO also print the table."""
        self._session(None)
        observer = self._manager._runtime_inspector.memory_ob
        if observer.is_enabled():
            self._manager._log_feature_stats()
        return {each: int(row.freq) for each, row in observer.cluster_id_combination_to_saving_symbolics_map.items()}

    def as_upstream(self) -> onnx.ModelProto:
        """Return the training graph with what upstream's own variables ask for, and print the table."""
        model = self._session(None)
        self._manager._log_feature_stats()
        return model

    def with_plan(self, plan: Sequence[str]) -> onnx.ModelProto:
        """Return the training graph with configurations applied."""
        with _building, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(list(plan), file)
            file.flush()
            return self._session(file.name)

    def _session(self, plan: str | None) -> onnx.ModelProto:
        manager = self._manager
        config, observer = manager._get_session_config, manager._runtime_inspector.memory_ob
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            path = str(Path(folder) / "training.onnx")

            def with_file() -> Any:
                session_options, providers, provider_options = config()
                session_options.optimized_model_filepath = path
                return session_options, providers, provider_options

            stack.enter_context(replaced(manager, "_get_session_config", lambda _: with_file))
            if plan is not None:
                manager._runtime_options.memory_optimizer_config_file_path = plan
                stack.enter_context(replaced(observer, "_is_enabled", lambda _: False))
            manager._create_execution_agent()
            manager._execution_agent = None
            return onnx.load(path)


def _exported_names(manager: Any) -> list[str]:
    return manager._graph_transition_manager._model_info_for_export.onnx_graph_input_names


def _debug_options(options: BuildOptions) -> Any:
    from onnxruntime.training.ortmodule import DebugOptions, LogLevel

    # from INFO on, upstream notes for each graph what its builder leaves out
    level = LogLevel.VERBOSE if log.chosen(options.log_level) == logging.DEBUG else LogLevel.DEVINFO
    level = LogLevel.ERROR if _is_quiet(options.log_level) else level
    if options.save_onnx is None or env.rank() != 0:
        return DebugOptions(level)
    Path(options.save_onnx).mkdir(parents=True, exist_ok=True)
    return DebugOptions(level, save_onnx=True, onnx_prefix=options.name, save_path=options.save_onnx)


def _with_axes(parse: Callable[..., Any], axes: Sequence[dict[int, str]]) -> Callable[..., Any]:
    """Return a function that parses inputs as upstream's, with the names of sizes that Dynamo's guards leave open."""

    def parse_inputs(*args: Any, **kwargs: Any) -> Any:
        info = parse(*args, **kwargs)
        info.onnx_graph_input_dynamic_axes_map = dict(zip(info.onnx_graph_input_names, axes, strict=True))
        return info

    return parse_inputs


def _names_and_axes(axes: Sequence[dict[int, str]]) -> Callable[..., Any]:
    """Return a function that names the results; upstream's runs a copy of the module to see them."""
    names = [f"output-{index}" for index in range(len(axes))]
    return lambda *args, **kwargs: (names, dict(zip(names, axes)), None)


@contextmanager
def _quiet(level: str) -> Any:
    """Keep notes of ONNX Runtime's builder and warnings of the exporter from each graph and rank, but at DEVINFO."""
    import onnxruntime

    if not _is_quiet(level):
        yield
        return
    onnxruntime.set_default_logger_severity(3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        onnxruntime.set_default_logger_severity(2)


def _is_quiet(level: str) -> bool:
    return log.chosen(level) >= logging.INFO
