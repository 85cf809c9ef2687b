"""Run an ONNX model on torch's tensors without copies, in and out by DLPack as upstream's own agents do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from onnxruntime.capi import _pybind_state
from onnxruntime.capi.onnxruntime_inference_collection import get_ort_device_type
from torch._C import _from_dlpack, _to_dlpack

from ort_zero.runtimes.sessions import register_arena, report_session, session_options
from ort_zero.utils.named_ranges import SESSION, named_range

_TYPES = {
    "float": onnx.TensorProto.FLOAT, "double": onnx.TensorProto.DOUBLE, "float16": onnx.TensorProto.FLOAT16,
    "bool": onnx.TensorProto.BOOL, "uint8": onnx.TensorProto.UINT8, "int8": onnx.TensorProto.INT8,
    "int16": onnx.TensorProto.INT16, "int32": onnx.TensorProto.INT32, "int64": onnx.TensorProto.INT64,
}  # fmt: skip


class SessionError(Exception):
    """The error of ONNX Runtime in a run."""


class Session:
    """A session of one model on the CPU. Tensors go in contiguous; results are in new memory of ONNX Runtime.

    Args:
        model: the model; its serialized form must be smaller than 2 GiB, which holds since weights are inputs.
        is_optimized: ONNX Runtime's graph optimizers have run already.
    """

    def __init__(self, model: onnx.ModelProto, is_optimized: bool = False):
        serialized = model.SerializeToString(deterministic=True)
        self.key = hashlib.sha256(serialized).hexdigest()[:16]
        """Name of the model's content, the same in all processes."""
        self._serialized = serialized
        self.nodes = len(model.graph.node)
        self.runs = 0
        """Number of runs."""
        self._session = onnxruntime.InferenceSession(serialized, _options(is_optimized), ["CPUExecutionProvider"])
        self.inputs = tuple(each.name for each in self._session.get_inputs())
        self.outputs = tuple(each.name for each in self._session.get_outputs())
        device = _pybind_state.OrtDevice(get_ort_device_type("cpu", 0), _pybind_state.OrtDevice.default_memory(), 0)
        self._devices = [device] * len(self.outputs)
        named = named_range(f"{SESSION} {self.key}, {self.nodes} nodes")
        self._run: Callable[..., None] = named(self._session._sess.run_with_ortvaluevector)
        self._names = list(self.inputs), list(self.outputs)
        self._options = onnxruntime.RunOptions()
        report_session(self)

    def types(self) -> Mapping[str, onnx.ValueInfoProto]:
        """Return element types and sizes of the results."""
        return {
            each.name: onnx.helper.make_tensor_value_info(each.name, _TYPES[each.type[7:-1]], each.shape)
            for each in self._session.get_outputs()
        }

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results for tensors in the order of :attr:`inputs`; strided tensors are copied.

        Raises:
            SessionError: ONNX Runtime failed.
        """
        self.runs += 1
        feeds, fetches = _pybind_state.OrtValueVector(), _pybind_state.OrtValueVector()
        feeds.reserve(len(tensors))
        for tensor in tensors:
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            if tensor.dtype is torch.bool:
                feeds.push_back(_to_dlpack(tensor.view(torch.uint8)), True)
            else:
                feeds.push_back(_to_dlpack(tensor), False)
        try:
            self._run(self._options, self._names[0], feeds, self._names[1], fetches, self._devices)
        except Exception as error:  # ONNX Runtime's exceptions have no public base class
            raise SessionError(str(error)) from error
        results = fetches.to_dlpacks(_from_dlpack)
        for index in fetches.bool_tensor_indices():
            results[index] = results[index].view(torch.bool)
        return results

    def save(self, path: Path) -> None:
        """Write the model as an ONNX file."""
        path.write_bytes(self._serialized)

    def end_profiling(self) -> str:
        """End the recording of nodes, and return the file with the profile."""
        return self._session.end_profiling()


def _options(is_optimized: bool) -> Any:
    register_arena(torch.device("cpu"), "CPUExecutionProvider")
    options = session_options(torch.get_num_threads())
    options.enable_mem_pattern = False
    # with reuse, graphs of upstream's builder had wrong results: kernels there write into their inputs
    options.enable_mem_reuse = False
    if is_optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # weights are inputs, and change; a packed copy would be of no use
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options
