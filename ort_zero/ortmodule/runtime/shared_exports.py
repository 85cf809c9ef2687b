"""Lets two graphs of a model share one export: that for evaluation is mostly the training graph's without dropout.

The module is traced for each of them, so that nothing is assumed of what its Python code does with ``training``. Only
when both traces compute the same, but for dropout, the second one is not converted to ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import onnx

from ort_zero.ortmodule.compat.torch_onnx import NotRecorded, Recorder, TraceRecord
from ort_zero.ortmodule.onnx_edit.node_edits import keep_results
from ort_zero.ortmodule.runtime.built_graph import BuiltGraph, ExportedModule
from ort_zero.ortmodule.runtime.export.post_export_passes import (
    anchor_constant_results,
    remove_dropout,
    remove_gradient_stops,
)
from ort_zero.ortmodule.runtime.export.tracer import Tracer
from ort_zero.ortmodule.runtime.guards.keys import Observed


class ExportShared(BaseException):
    """Ends an export, since that of another graph serves.

    Not an Exception: no ``except`` of the exporter may take it for a failure.
    """

    def __init__(self, exported: ExportedModule, model: onnx.ModelProto):
        super().__init__("the trace is that of another graph")
        self.exported = exported
        """The other graph's export."""
        self.model = model
        """The same model for this trace."""


class SharedExports:
    """Looks whether the export of a graph of the same model serves a new one.

    Args:
        graphs: returns the graphs of all modes of the model.
    """

    def __init__(self, graphs: Callable[[], Iterable[BuiltGraph]]):
        self._graphs = graphs
        self.record: TraceRecord | None = None
        """Record of the last trace; None if it cannot be compared."""
        self.outcome = ""
        """Result of the last look, with the reason where no export serves; "" where there was none."""

    def begin(self) -> None:
        """Forget the last trace."""
        self.record, self.outcome = None, ""

    def take(self, trace: Any, observed: Observed, tracer: Tracer, *, gradients: bool, look: bool) -> None:
        """Note a trace, and end its export if that of another graph serves.

        Args:
            trace: the TorchScript graph.
            observed: the call that is exported.
            tracer: has followed the trace.
            gradients: whether the new graph has gradients.
            look: whether another export may serve.

        Raises:
            ExportShared: it does.
        """
        graphs = list(self._graphs()) if look else []
        try:
            recorder = Recorder(trace, tuple(tracer.graph_inputs), tracer.spare_results)
        except NotRecorded as error:
            if graphs:
                self.outcome = f"no: {error}"
            return
        self.record = recorder.record
        for graph in graphs:
            number, exported = graph.known.number, graph.exported
            if exported.trace is None:
                continue
            why = _difference(exported, exported.trace, recorder, observed, gradients)
            if why is None:
                model = _model_for(recorder.record, exported, gradients=gradients)
                if model is not None:
                    self.outcome = f"yes: that of graph {number}"
                    if exported.trace.drops and not recorder.record.drops:
                        self.outcome += ", without dropout"
                    raise ExportShared(exported, model)
                why = "it calls Python"
            self.outcome = f"no: graph {number}: {why}"


def _difference(
    exported: ExportedModule, known: TraceRecord, recorder: Recorder, observed: Observed, gradients: bool
) -> str | None:
    """Return why an export does not serve a trace; None if it may."""
    key, record = exported.key, recorder.record
    if exported.readers or observed.export.readers:
        return "subscribers read its values"
    if key.tensors != observed.export.tensors:
        return "it is for other arguments"
    if key.model.number != observed.export.model.number:
        return "the module has changed since"
    if key.torch_state != observed.export.torch_state:
        return "it is for other settings of torch"
    if record.inputs != known.inputs:
        return "other attributes are inputs"
    wanted = record.own_results
    if record.digest != known.digest or not set(wanted).issubset(known.results):
        return f"the traces differ {recorder.first_difference(known)}"
    if len(set(wanted)) < len(wanted):
        return "a value is returned twice"
    if record.drops and record.dropout != known.dropout:
        return "dropout differs"
    if gradients and (record.gradients != known.gradients or not set(wanted).issubset(known.own_results)):
        return "gradients stop elsewhere"
    if not key.size_guard.holds(observed.export.shapes):
        return "it is for other sizes"
    return None


def _model_for(record: TraceRecord, exported: ExportedModule, *, gradients: bool) -> onnx.ModelProto | None:
    """Return an exported model as it is for a trace that is the same but for dropout and results.

    Args:
        record: record of the trace.
        exported: the export.
        gradients: whether gradients go through the new graph.

    Returns:
        The model; None if nodes of it call Python.
    """
    assert exported.trace is not None
    model = onnx.load_model_from_string(exported.whole or exported.info.exported_model)
    if any(node.op_type == "PythonOp" for node in model.graph.node):
        return None
    if not record.drops:
        remove_dropout(model)
    if not gradients:
        remove_gradient_stops(model)
    keep_results(model, [exported.trace.results.index(name) for name in record.own_results])
    anchor_constant_results(model)
    return model
