"""Refuse graphs that ONNX Runtime would compute wrongly, also where the first run would not show that.

A run of the graph on fake tensors tells which ATen operators the graph has, which arguments it changes, and which
results share memory with arguments. The check of first runs is for kernels and exports, not for what is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ort_zero.compat import torch_graphs
from ort_zero.compat.torch_modules import version_of
from ort_zero.errors import ExportError

Reason = str | Callable[..., str | None]
"""Why PyTorch runs a graph with an operator, or a function of the operator's arguments that returns why, or None."""


def _of_integers(input: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return None if input.is_floating_point() else "ONNX Runtime computes with floating-point numbers there"


def _truncating(input: Any, other: Any, *, rounding_mode: str | None = None) -> str | None:
    return "the exporter rounds by way of integers" if rounding_mode is not None and input.is_floating_point() else None


def _of_real_numbers(input: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return "the exporter asks integers, to which numbers below 1 are 0" if input.is_floating_point() else None


def _accumulating(input: Any, indices: Any, values: Any, accumulate: bool = False) -> str | None:
    return _TWICE if accumulate else None


def _between_tensors(input: Any, low: Any = None, high: Any = None) -> str | None:
    if isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
        return "ONNX Runtime divides the gradient among equal operands"
    return None


_TWICE = "ONNX Runtime is wrong where an index occurs twice"
_TOWARDS_ZERO = "the exporter rounds negative numbers towards zero"
_OVERFLOWS = "the exporter's form overflows"
REFUSED: dict[str, Reason] = {
    **dict.fromkeys(("index_add", "scatter_add", "scatter_reduce", "masked_scatter", "index_copy"), _TWICE),
    **dict.fromkeys(("index_put", "index_put_", "_unsafe_index_put"), _accumulating),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _between_tensors),
    **dict.fromkeys(("floor_divide", "__rshift__", "bitwise_right_shift"), _TOWARDS_ZERO),
    **dict.fromkeys(("any", "all"), _of_real_numbers),
    **dict.fromkeys(("softshrink", "hardshrink", "nan_to_num"), "ONNX Runtime treats NaN otherwise"),
    **dict.fromkeys(("log_sigmoid_forward", "binary_cross_entropy_with_logits"), _OVERFLOWS),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), "ONNX Runtime has no gradient for Loop"),
    **dict.fromkeys(("std", "std_mean"), "the exporter's gradient is not a number for a deviation of 0"),
    **dict.fromkeys(("_unique2", "unique_dim"), "ONNX returns the places of elements as one row"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "batch_norm"), "changes running statistics"),
    "div": _truncating,
    "fmod": _of_integers,
    "remainder": _of_integers,
    "logsumexp": "ONNX Runtime's gradient is not a number where all elements are -inf",
    "log1p": "the exporter's form loses the digits of small numbers",
    "linspace": "ONNX Runtime crashes on its gradient",
}
"""ATen operators whose form in ONNX Runtime differs from PyTorch for some values, not only for some sizes."""


def refuse_nested(graph: fx.Graph) -> None:
    """Refuse a graph with graphs inside.

    Raises:
        ExportError: an operator has a graph of its own, as activation checkpointing inside of a module has.
    """
    for node in graph.nodes:
        if isinstance(node.target, torch_graphs.HigherOrderOperator):
            raise ExportError(
                f"{node.target} has a backward of its own; move it out of the module, so that it calls the module"
            )


def refuse_by_fake_run(module: fx.GraphModule, fakes: Sequence[Any], draws: Sequence[torch.Tensor]) -> list[int]:
    """Run a graph on fake tensors, and refuse it for what the run shows; return the results that PyTorch computes.

    These are views of arguments, and constants, which ONNX Runtime's builder takes for no results.

    Args:
        module: the graph, without its random operators.
        fakes: the fake tensors and symbolic numbers of the arguments.
        draws: fake tensors of the draws, the last arguments.

    Raises:
        ExportError: an operator is in :data:`REFUSED` or draws random numbers, or an argument is changed.
    """
    tensors = [fake for fake in (*fakes, *draws) if isinstance(fake, torch.Tensor)]
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) > 1:
        raise ExportError(f"tensors on several devices ({', '.join(sorted(devices))}); move them to one")
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes & {torch.float16, torch.bfloat16} if devices == {"cpu"} else ():
        raise ExportError(f"ONNX Runtime has no kernels for {dtype} on CPUs; train in float32, or on a GPU")
    if any(dtype.is_complex for dtype in dtypes):
        raise ExportError("ONNX has no complex numbers")
    versions = [version_of(tensor) for tensor in tensors]
    with torch.no_grad(), torch_graphs.fake_mode_of(tensors), _Operators():
        results = module(*fakes, *draws)
    for node, before, tensor in zip(_tensor_inputs(module.graph), versions, tensors, strict=True):
        if version_of(tensor) != before:
            raise ExportError(f"the graph changes its argument {node.name}; keep what changes outside of the module")
    memories = {torch_graphs.memory_of(tensor) for tensor in tensors}
    nodes = module.graph.find_nodes(op="output")[0].args[0]
    return [
        index
        for index, (result, node) in enumerate(zip(results, nodes, strict=True))
        if torch_graphs.memory_of(result) in memories or not _reads_tensors(node)
    ]


def _reads_tensors(node: fx.Node) -> bool:
    """Return True if a value depends on a tensor that goes into the graph."""
    seen, waiting = {node}, [node]
    while waiting:
        each = waiting.pop()
        if each.op == "placeholder" and isinstance(each.meta.get("example_value"), torch.Tensor):
            return True
        waiting += [before for before in each.all_input_nodes if before not in seen]
        seen.update(each.all_input_nodes)
    return False


def _tensor_inputs(graph: fx.Graph) -> list[fx.Node]:
    holders = graph.find_nodes(op="placeholder")
    return [node for node in holders if isinstance(node.meta.get("example_value"), torch.Tensor)]


class _Operators(torch_graphs.TorchDispatchMode):
    """Refuses ATen operators as they are called."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = torch_graphs.name_of(function)
        if torch_graphs.is_random(function):
            raise ExportError(f"{name} draws random numbers that depend on values; draw them outside of the module")
        reason = REFUSED.get(name)
        why = reason(*args, **(kwargs or {})) if callable(reason) else reason
        if why is not None and not _are_sizes(args):
            raise ExportError(f"{name}: {why}; exclude the module, or write it otherwise")
        return function(*args, **(kwargs or {}))


def _are_sizes(arguments: Sequence[Any]) -> bool:
    """Return True if the tensors among arguments are numbers, as sizes are."""
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    return bool(tensors) and not any(tensor.dim() for tensor in tensors)
