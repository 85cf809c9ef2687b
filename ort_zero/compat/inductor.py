"""Compile graphs of ATen calls by Inductor, through its inner entry (torch 2.7 to 2.15), which has no public name.

``torch.compile`` divides forward and backward itself, and may keep a view of a weight, which ZeRO-3 must release.
Inductor is imported by the first call, since that takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from ort_zero.compat.torch_graphs import is_random

_OPTIONS = {"fallback_random": True}
"""Random numbers are PyTorch's own, in the order of the graph."""


@functools.cache
def unavailable(device_type: str) -> str | None:
    """Return why Inductor cannot compile for a type of devices; None if it can."""
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler; install g++, or name one in the variable CXX"
        return None
    from torch.utils._triton import has_triton

    return None if has_triton() else "Triton is not installed, or does not know the device"


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return Inductor's decompositions, without those of random operators: PyTorch draws."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(_OPTIONS):
        table = select_decomp_table()
    return {target: function for target, function in table.items() if not is_random(target)}


def compile_graph(
    module: GraphModule, inputs: Sequence[Any], direction: str, returned: int | None
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a graph of AOTAutograd by Inductor; the function that is returned empties the list of its inputs.

    Args:
        module: the graph, which Inductor changes.
        inputs: fake tensors and sizes; those of a backward have the strides that the forward's code gives them.
        direction: ``forward``, ``backward`` or ``inference``.
        returned: number of results that keep the strides of the graph, the first ones; None for all.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    (output,) = module.graph.find_nodes(op="output")
    results = output.args[0][:returned]
    output.meta["user_visible_output_idxs"] = [i for i, node in enumerate(results) if isinstance(node, Node)]
    with config.patch(_OPTIONS):
        code: Any = compile_fx_inner(
            module, inputs, is_backward=direction == "backward", is_inference=direction == "inference"
        )
    return code
