"""Tell which execution provider of ONNX Runtime serves a device, and what the provider can run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime
import torch
from onnx import helper

from ort_zero.compat import onnxruntime_binding
from ort_zero.compile.assembly import model_of
from ort_zero.compile.conversion.fragments import ONNX_TYPES, Fragment

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def provider_of(device: torch.device) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the options of the provider for a device; None if the installed ONNX Runtime has none."""
    name = _PROVIDERS.get(device.type)
    if name is None or name not in onnxruntime.get_available_providers():
        return None
    if device.type == "cpu":
        return name, {}
    stream = torch.cuda.current_stream(device).cuda_stream
    return name, {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(stream),
        "arena_extend_strategy": "kSameAsRequested",
    }


def computes_in_float32(device: torch.device) -> bool:
    """Return True if the device's provider has no 16-bit kernels, so that segments compute in float32 between casts."""
    return device.type == "cpu"


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock that measures work on a device.

    A CPU with one thread has the time of that thread, which other processes do not disturb.
    """
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def after_work() -> float:
        torch.get_device_module(device).synchronize()
        return time.perf_counter()

    return after_work


def unsupported(fragment: Fragment, device: torch.device) -> str | None:
    """Return which operator of a fragment the device's provider has no right kernel for; None if it has all."""
    for node in fragment.nodes:
        fault = onnxruntime_binding.fault_of(node.operator) if device.type == "cpu" else None
        if fault is not None:
            return fault
        dtypes = tuple(fragment.dtypes[name] if name else None for name in node.inputs)
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

    A kernel can still refuse a call, and the first run of a segment would tell.
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
    try:
        onnxruntime.InferenceSession(model_of(graph).SerializeToString(), options, providers=[_PROVIDERS[device]])
    except Exception:  # ONNX Runtime's exceptions have no public base class
        return False
    return True
