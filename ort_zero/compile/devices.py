"""Tell which execution provider of ONNX Runtime serves a device, and what the provider can run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnxruntime
import torch
from onnx import helper

from ort_zero.compat import onnxruntime_binding
from ort_zero.compat.torch_compile import computes_in_tf32
from ort_zero.compile.assembly import model_of
from ort_zero.compile.conversion.fragments import ONNX_TYPES, Fragment

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""Names of ONNX Runtime's providers by torch's types of devices."""
_ERRORS = 3
"""ONNX Runtime's level of messages that are no warnings."""
_DEFAULT_STREAM = 1
"""CUDA's handle of the default stream (cudaStreamLegacy); for torch's 0, a session makes a stream of its own."""


def provider_of(device: torch.device) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the options of the provider for a device; None if the installed ONNX Runtime has none."""
    name = PROVIDERS.get(device.type)
    if name is None or name not in onnxruntime.get_available_providers():
        return None
    if device.type == "cpu":
        return name, {}
    # 1.31 warns for each session that CUDA's provider is no plugin
    onnxruntime.set_default_logger_severity(_ERRORS)
    copies = ("Identity", "", (), (torch.float32,), (torch.float32,))
    if not _has_kernel(*copies, device.type):  # the provider's libraries do not load
        return None
    return name, {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(torch.cuda.current_stream(device).cuda_stream or _DEFAULT_STREAM),
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "use_tf32": str(int(computes_in_tf32())),
    }


def computes_in_float32(device: torch.device) -> bool:
    """Return True if the device's provider has no 16-bit kernels, so that segments compute in float32 between casts."""
    return device.type == "cpu"


def unsupported(fragment: Fragment, device: torch.device) -> str | None:
    """Return which operator of a fragment the device's provider has no right kernel for; None if it has all."""
    for node in fragment.nodes:
        dtypes = tuple(fragment.dtypes[name] if name else None for name in node.inputs)
        fault = onnxruntime_binding.fault_of(node.operator, device.type, dtypes)
        if fault is not None:
            return fault
        results = tuple(fragment.dtypes[name] for name in node.outputs)
        if not _has_kernel(node.operator, node.domain, node.attributes, dtypes, results, device.type):
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None)
            return f"ONNX Runtime has no {node.operator} of {names}"
    return None


@functools.cache
def _has_kernel(
    operator: str,
    domain: str,
    attributes: tuple[tuple[str, Any], ...],
    dtypes: Sequence[torch.dtype | None],
    results: Sequence[torch.dtype],
    device: str,
) -> bool:
    """Return True if ONNX Runtime makes a session of the operator alone; it refuses one without a kernel.

    On a GPU the session must not fall back to the CPU. A kernel can still refuse a call, and the first run of a segment
    would tell.
    """
    names = [f"in{index}" if dtype is not None else "" for index, dtype in enumerate(dtypes)]
    outputs = [f"out{index}" for index in range(len(results))]
    graph = helper.make_graph(
        [helper.make_node(operator, names, outputs, domain=domain, **dict(attributes))],
        "probe",
        [
            helper.make_tensor_value_info(name, ONNX_TYPES[dtype], None)
            for name, dtype in zip(names, dtypes)
            if dtype is not None
        ],
        [helper.make_tensor_value_info(name, ONNX_TYPES[dtype], None) for name, dtype in zip(outputs, results)],
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if device != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        onnxruntime.InferenceSession(model_of(graph).SerializeToString(), options, providers=[PROVIDERS[device]])
    except Exception:  # ONNX Runtime's exceptions have no public base class
        return False
    return True
