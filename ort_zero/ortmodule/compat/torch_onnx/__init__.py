"""The TorchScript exporter: the modules' old names, traced operators, symbolics' helpers, the routing of operators."""

from ort_zero.ortmodule.compat.torch_onnx.export_routing import Router, routing
from ort_zero.ortmodule.compat.torch_onnx.symbolic_helpers import Symbolic, Unexportable
from ort_zero.ortmodule.compat.torch_onnx.trace_records import NotRecorded, Recorder, TraceRecord, traces_shown
from ort_zero.ortmodule.compat.torch_onnx.traced import (
    STOP_GRADIENT,
    Schema,
    TracedNode,
    TracedPlace,
    TracedValue,
    stops_gradient,
    torch_dtype,
)

__all__ = [
    "STOP_GRADIENT",
    "NotRecorded",
    "Recorder",
    "Router",
    "Schema",
    "Symbolic",
    "TraceRecord",
    "TracedNode",
    "TracedPlace",
    "TracedValue",
    "Unexportable",
    "routing",
    "stops_gradient",
    "torch_dtype",
    "traces_shown",
]
