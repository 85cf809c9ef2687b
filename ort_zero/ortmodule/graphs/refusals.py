"""Refuse graphs that ONNX Runtime would compute wrongly, also where the first run would not show that.

A run of the graph on fake tensors tells which functions and ATen operators the graph has, where a gradient ends, what
is changed in place, and which results share memory. The check of first runs sees only what has an effect on them: a
factor that begins at 0 hides a ``detach``. It is for kernels and exports, not for what is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ort_zero.compat import torch_graphs
from ort_zero.compat.torch_compile import tensors_in
from ort_zero.compat.torch_modules import version_of
from ort_zero.errors import ExportError

Reason = str | Callable[..., str | None]
"""Why PyTorch runs a graph with an operator, or a function of the operator's arguments that returns why, or None."""


def _of_integers(input: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return None if input.is_floating_point() else "ONNX Runtime computes with floating-point numbers there"


def _truncating(input: Any, other: Any, *, rounding_mode: str | None = None, **_: Any) -> str | None:
    return "the exporter rounds by way of integers" if rounding_mode is not None and input.is_floating_point() else None


def _of_real_numbers(input: torch.Tensor, *_: Any, **__: Any) -> str | None:
    return "the exporter asks integers, to which numbers below 1 are 0" if input.is_floating_point() else None


def _accumulating(input: Any, indices: Any, values: Any, accumulate: bool = False) -> str | None:
    return _TWICE if accumulate else None


def _between_tensors(input: Any, low: Any = None, high: Any = None) -> str | None:
    if isinstance(low, torch.Tensor) or isinstance(high, torch.Tensor):
        return "ONNX Runtime divides the gradient among equal operands"
    return None


def _several(input: Any, indices: Sequence[torch.Tensor | None], **_: Any) -> str | None:
    return _FROM_THE_END if sum(index is not None for index in indices) > 1 else None


def _of_power(input: Any, power: Any = 2, *_: Any, **__: Any) -> str | None:
    return None if power in (1, 2, None) else "ONNX Runtime's gradient is not a number for a norm of 0"


def _to_the_power(input: Any, exponent: Any, *_: Any, **__: Any) -> str | None:
    is_zero = isinstance(exponent, (int, float)) and exponent == 0
    return "ONNX Runtime's gradient of 0 to the power of 0 is not a number" if is_zero else None


_TWICE = "ONNX Runtime is wrong where an index occurs twice"
_TOWARDS_ZERO = "the exporter rounds negative numbers towards zero"
_OTHER_NAN = "ONNX Runtime treats NaN otherwise"
_OVERFLOWS = "the exporter's form overflows"
_FROM_THE_END = "ONNX Runtime computes with an index that PyTorch refuses, or takes a negative one for another"
_WITHOUT_LARGEST = "ONNX Runtime overlooks NaN, and writes out of bounds where a window has nothing above -inf"
REFUSED: dict[str, Reason] = {
    **dict.fromkeys(("index_add", "scatter_add", "scatter_reduce", "masked_scatter", "index_copy"), _TWICE),
    **dict.fromkeys(("index_put", "index_put_", "_unsafe_index_put"), _accumulating),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _between_tensors),
    **dict.fromkeys(("floor_divide", "__rshift__", "bitwise_right_shift"), _TOWARDS_ZERO),
    **dict.fromkeys(("any", "all"), _of_real_numbers),
    **dict.fromkeys(("erf", "softshrink", "hardshrink", "nan_to_num"), _OTHER_NAN),
    **dict.fromkeys(("topk", "sort"), "ONNX Runtime orders NaN and equal numbers otherwise"),
    **dict.fromkeys(("pow", "pow_"), _to_the_power),
    **dict.fromkeys(("log_sigmoid_forward", "binary_cross_entropy_with_logits"), _OVERFLOWS),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), "ONNX Runtime has no gradient for Loop"),
    **dict.fromkeys(("std", "std_mean"), "the exporter's gradient is not a number for a deviation of 0"),
    **dict.fromkeys(("_unique2", "unique_dim"), "ONNX returns the places of elements as one row"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "batch_norm"), "changes running statistics"),
    **dict.fromkeys(("gather", "index_select", "scatter", "scatter_"), _FROM_THE_END),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _FROM_THE_END),
    **dict.fromkeys(("linalg_vector_norm", "norm"), _of_power),
    **dict.fromkeys(("hardtanh", "hardtanh_"), "ONNX Runtime's gradient is another one at the limits"),
    **dict.fromkeys(("max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"), _WITHOUT_LARGEST),
    "index": _several,
    "div": _truncating,
    "fmod": _of_integers,
    "remainder": _of_integers,
    "logsumexp": "ONNX Runtime's gradient is not a number where all elements are -inf",
    "log1p": "the exporter's form loses the digits of small numbers",
    "linspace": "ONNX Runtime crashes on its gradient",
}
"""ATen operators whose form in ONNX Runtime differs from PyTorch for some values, not only for some sizes."""
REFUSED_FUNCTIONS = {
    **dict.fromkeys(("max_pool1d", "max_pool1d_with_indices", "max_pool2d_with_indices"), _WITHOUT_LARGEST),
    "cosine_similarity": "the exporter's gradient is not a number for a row of 0",
    "kl_div": _OTHER_NAN,
    "one_hot": _FROM_THE_END,
}
"""The same for functions of torch that the exporter sees as one, and ATen as several operators or as another one."""


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


@contextmanager
def unnoticed() -> Iterator[None]:
    """Keep hooks of saved tensors, as activation checkpointing has, from what runs of the engine's own save."""
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def refuse_by_fake_run(module: fx.GraphModule, fakes: Sequence[Any], draws: Sequence[torch.Tensor]) -> list[int]:
    """Run a graph on fake tensors, and refuse it for what the run shows; return the results that PyTorch computes.

    These are views of arguments, and constants, which ONNX Runtime's builder takes for no results.

    Args:
        module: the graph, without its random operators.
        fakes: the fake tensors and symbolic numbers of the arguments.
        draws: fake tensors of the draws, the last arguments.

    Raises:
        ExportError: an operator is in :data:`REFUSED` or draws random numbers, a gradient ends, results share memory,
            or an argument or a tensor whose memory others read is changed.
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
    arguments = {
        torch_graphs.memory_of(tensor): node.name
        for node, tensor in zip(_tensor_inputs(module.graph), tensors, strict=True)
    }
    trains = torch.is_grad_enabled()
    with unnoticed(), torch.set_grad_enabled(trains), torch_graphs.fake_mode_of(tensors):
        with _Functions(trains), _Operators():
            run = _Run(module, arguments)
            results = run.run(*fakes, *draws)
    if run.changed:
        raise ExportError(f"the graph changes its argument {run.changed[0]}; keep what changes outside of the module")
    nodes = module.graph.find_nodes(op="output")[0].args[0]
    in_torch = [
        index
        for index, (result, node) in enumerate(zip(results, nodes, strict=True))
        if torch_graphs.memory_of(result) in arguments or not _reads_tensors(node)
    ]
    memories = [torch_graphs.memory_of(result) for index, result in enumerate(results) if index not in in_torch]
    if len(set(memories)) < len(memories):
        raise ExportError("two results share memory, as a tensor and a part of it; return a copy of one of them")
    return in_torch


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


class _Functions(TorchFunctionMode):
    """Refuses functions of torch as they are called: by name, and where a gradient ends, which the exporter drops.

    Args:
        trains: gradients are computed.
    """

    def __init__(self, trains: bool):
        super().__init__()
        self._trains = trains

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        reason = REFUSED_FUNCTIONS.get(name)
        if reason is not None:
            raise ExportError(f"{name}: {reason}; exclude the module, or write it otherwise")
        results = function(*args, **(kwargs or {}))
        if self._trains and not name.endswith("_like") and not name.startswith("new_"):
            sources = args[:1] if name in _LIKE_ANOTHER else (args, kwargs)
            made = args[0] if name == "__setitem__" else results
            if any(each.requires_grad for each in _real_tensors(sources)) and any(
                not (each.requires_grad and torch.is_grad_enabled()) for each in _real_tensors(made)
            ):
                raise ExportError(
                    f"{name} ends a gradient, by detach() or no_grad(); do that outside of the module, or exclude the "
                    "module"
                )
        return results


_LIKE_ANOTHER = frozenset(("type_as", "expand_as", "view_as", "reshape_as", "to"))
"""Methods that read sizes or types of further arguments alone."""


def _real_tensors(values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(values) if tensor.is_floating_point()]


class _Run(fx.Interpreter):
    """Runs a graph, and refuses it where memory is changed that other values share which are read later.

    The exporter follows the tensor that is changed, not the others.

    Args:
        module: the graph.
        arguments: the memory of each argument, and the argument's name.
    """

    def __init__(self, module: fx.GraphModule, arguments: Mapping[int, str]):
        super().__init__(module)
        self.extra_traceback = False
        self._arguments = arguments
        self.changed: list[str] = []
        """Names of the arguments that nodes have changed."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node.

        Raises:
            ExportError: the node changes memory that other values share.
        """
        tensors = tensors_in([self.env[each] for each in n.all_input_nodes])
        versions = [version_of(tensor) for tensor in tensors]
        result = super().run_node(n)
        for tensor, before in zip(tensors, versions, strict=True):
            if version_of(tensor) != before:
                self._refuse_sharing(n, tensor)
        return result

    def _refuse_sharing(self, node: fx.Node, changed: torch.Tensor) -> None:
        memory = torch_graphs.memory_of(changed)
        if memory in self._arguments:
            self.changed.append(self._arguments[memory])
            return
        done = self.user_to_last_uses.get(node, ())
        later = tensors_in([value for each, value in self.env.items() if each not in done])
        if any(other is not changed and torch_graphs.memory_of(other) == memory for other in later):
            raise ExportError(
                f"{torch_graphs.line_of(node)} changes a tensor in place of which a view is read later; change a copy"
            )


def _are_sizes(arguments: Sequence[Any]) -> bool:
    """Return True if the tensors among arguments are numbers, as sizes are."""
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    return bool(tensors) and not any(tensor.dim() for tensor in tensors)
