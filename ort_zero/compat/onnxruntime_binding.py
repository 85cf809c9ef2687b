"""Run a session of ONNX Runtime on the memory of torch's tensors, with one call for all inputs.

A vector of values takes one call for all tensors, an IOBinding one for each. But the vector names element types by
NumPy, which has no bfloat16, and in the plain wheels of 1.19 and 1.20 it takes no such call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime.capi import _pybind_state

ElementType = Any
"""A type of NumPy, or the number of a type in ONNX."""
Shapes = Sequence[Sequence[int]]
_FAULTS = {"Sqrt": ((1, 22), "returns NaN for infinity")}
"""What an operator on CPUs does wrong before a release; 1.22 is the first one after 1.19 that was tried."""
_SUMS = frozenset({"ReduceSum", "ReduceMean"})
"""Operators that PyTorch runs in 16 bits on a GPU: ReduceSum adds in 16 bits there, with an error of 1e-2 over 4,096
rows in bfloat16, where PyTorch's is 3e-3 (onnxruntime-gpu 1.31.1)."""


def fault_of(operator: str, device: str, dtypes: Sequence[torch.dtype | None]) -> str | None:
    """Return what the installed ONNX Runtime does wrong in an operator; None for an operator without a known fault."""
    if device == "cuda":
        sums_in_16_bits = operator in _SUMS and dtypes[0] in (torch.float16, torch.bfloat16)
        return f"{operator} of ONNX Runtime adds partial sums in 16 bits on a GPU" if sums_in_16_bits else None
    until, fault = _FAULTS.get(operator, ((0, 0), ""))
    installed = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    return f"{operator} of ONNX Runtime {onnxruntime.__version__} {fault}" if installed < until else None


def runner_of(
    session: onnxruntime.InferenceSession,
    device: tuple[str, int],
    inputs: Sequence[tuple[str, ElementType]],
    sizes: Sequence[str],
    outputs: Sequence[tuple[str, ElementType]],
) -> Callable[[Sequence[Any], Shapes, Sequence[Any], Shapes], None]:
    """Return a function that runs a session: of inputs and changing sizes, their shapes, the results and theirs.

    Tensors are dense; shapes are as they lie in memory, outermost dimension first.

    Args:
        device: kind and number of the device of inputs and results.
        inputs: name and element type of each input.
        sizes: names of further inputs, int64 on CPU.
        outputs: name and element type of each result.
    """
    names = [*(name for name, _ in inputs), *sizes]
    types = [*(kind for _, kind in inputs), *(np.int64 for _ in sizes)]
    result_names, result_types = [name for name, _ in outputs], [kind for _, kind in outputs]
    cpu, place = (onnxruntime.OrtDevice.make(*each)._get_c_device() for each in (("cpu", 0), device))
    devices, result_devices = [place] * len(inputs) + [cpu] * len(sizes), [place] * len(outputs)
    options = _pybind_state.RunOptions()
    if device[0] != "cpu":  # calls of PyTorch follow on the same stream, and no call waits for the device
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    in_one_call = hasattr(_pybind_state.OrtValueVector, "push_back_batch")
    if not in_one_call or any(isinstance(kind, int) for kind in (*types, *result_types)):

        def bind(feeds: Sequence[Any], shapes: Shapes, results: Sequence[Any], result_shapes: Shapes) -> None:
            binding = _pybind_state.SessionIOBinding(session._sess)
            for name, where, kind, each, shape in zip(names, devices, types, feeds, shapes):
                binding.bind_input(name, where, kind, shape, each.data_ptr())
            for name, kind, each, shape in zip(result_names, result_types, results, result_shapes):
                binding.bind_output(name, place, kind, shape, each.data_ptr())
            session._sess.run_with_iobinding(binding, options)

        return bind
    run, make = session._sess.run_with_ortvaluevector, _pybind_state.OrtValueVector

    def call(feeds: Sequence[Any], shapes: Shapes, results: Sequence[Any], result_shapes: Shapes) -> None:
        read, made = make(), make()
        read.push_back_batch(feeds, [each.data_ptr() for each in feeds], types, shapes, devices)
        made.push_back_batch(
            results, [each.data_ptr() for each in results], result_types, result_shapes, result_devices
        )
        run(options, names, read, result_names, made, result_devices)

    return call
