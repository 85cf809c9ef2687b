"""What ORTModule's users read of its managers, shown as it is under our runner; nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ort_zero.errors import PatchError

if TYPE_CHECKING:
    from ort_zero.ortmodule.compat.ortmodule.manager import Manager


class _UnpatchedError(PatchError, AttributeError):
    """Upstream's code runs a manager of ours; an AttributeError too, as ``hasattr`` and ``copy`` expect."""


def _unpatched(name: str) -> _UnpatchedError:
    return _UnpatchedError(
        f"ORTModule's own code asks for {name}: this model was wrapped while ort_zero was enabled, and "
        "ort_zero.disable() has taken away the patches that its calls need; call disable() when the model is done"
    )


class _Facts(SimpleNamespace):
    """Attributes to read; upstream's code, which would do more with them, is to know that it must not."""

    def __getattr__(self, name: str) -> Any:
        raise _unpatched(name)


class TransitionsView:
    """Stands in for the graph transition manager that the rest of ORTModule asks; all decisions are the runner's.

    Args:
        view: the manager to which it belongs.
        current: returns the graph of the last call with that manager, None before the first one.
    """

    def __init__(self, view: Manager, current: Callable[[], Any]):
        self._view = view
        self._current = current
        self._export_extra_kwargs: dict[str, Any] = {}
        """Further arguments of ``torch.onnx.export``, which users may set."""
        self._original_model_has_changed = False
        """Whether an attribute was set through the wrapper after the last call."""
        self._parsed: tuple[Any, Any] = (None, None)

    @property
    def _device(self) -> Any:
        return self._view.device

    @property
    def _exported_model_info(self) -> Any:
        """The export behind the graph of the last call: its model, the names of its inputs, what it was called with."""
        graph = self._current()
        if graph is None:
            return None
        if self._parsed[0] is not graph:
            self._parsed = graph, _exported(graph)
        return self._parsed[1]

    @property
    def _model_info_for_export(self) -> Any:
        """The arguments of the call that was exported."""
        graph = self._current()
        if graph is None:
            return None
        return _Facts(
            onnx_graph_input_names=[tensor.name for tensor in graph.known.export.tensors],
            onnx_graph_input_names_require_grad=list(graph.known.process.inputs),
            onnx_graph_input_dynamic_axes_map=graph.info.dynamic_axes_map,
        )

    @property
    def _post_export_processed_model_info(self) -> Any:
        """The inputs of the graph that runs; upstream's session options ask for one more fact."""
        graph = self._current()
        facts = {"is_mem_efficient_grad_management_enabled": False}
        if graph is not None:
            names = (name for name in type(graph.info).__slots__ if name.startswith("onnx_graph_input_names"))
            facts |= {name: list(getattr(graph.info, name)) for name in names}
            facts["module_forward_output_schema"] = graph.info.module_forward_output_schema
        return _Facts(**facts)

    def __getattr__(self, name: str) -> Any:
        raise _unpatched(name)

    def signal_model_changed(self) -> None:
        """Note it for whoever reads it: the runner looks at the module itself at each call."""
        self._original_model_has_changed = True


def _exported(graph: Any) -> Any:
    import onnx

    info, key = graph.exported.info, graph.known.export
    return _Facts(
        exported_model=onnx.load_model_from_string(info.exported_model),
        module_forward_args_schema=key.structure,
        module_forward_kwargs_schema=key.tensors,
        module_forward_output_schema=info.module_forward_output_schema,
        onnx_graph_input_names=list(info.onnx_graph_input_names),
        onnx_graph_input_names_user_defined=list(info.onnx_graph_input_names_user_defined),
        onnx_graph_input_names_require_grad=list(graph.info.onnx_graph_input_names_require_grad),
        onnx_graph_input_names_require_grad_user_defined=list(
            graph.info.onnx_graph_input_names_require_grad_user_defined
        ),
    )
