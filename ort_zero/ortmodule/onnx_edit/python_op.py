"""Makes PythonOp nodes, by which ORT calls an autograd Function, for graphs that ORT has exported already."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from onnx import helper

Value = tuple[str, int, int]
"""Name, ONNX element type and rank (number of dimensions) of what a node reads or produces."""

_registered: set[str] = set()


def register_once(register_function: Callable[[str, type], None], functions: Mapping[str, type]) -> None:
    """Register those autograd Functions with ORT, by their names, that this process has not registered yet.

    Args:
        register_function: see :func:`ort_zero.ortmodule.compat.ortmodule.register_function`.
        functions: ORT calls their ``forward`` alone, with a stand-in for the context.
    """
    for name, function in functions.items():
        if name not in _registered:
            register_function(name, function)
            _registered.add(name)


def python_op(
    function: str, name: str, scalars: Sequence[int], read: Sequence[Value], made: Sequence[Value]
) -> onnx.NodeProto:
    """Return the node `name` that calls `function` with the integers `scalars` and then the tensors `read`."""
    constants: dict[str, Any] = {} if not scalars else {
        "input_int_scalars": list(scalars),
        "input_int_scalar_positions": list(range(len(scalars))),
    }  # fmt: skip
    return helper.make_node(
        "PythonOp",
        [value for value, _, _ in read],
        [f"{name}_ctx", *(value for value, _, _ in made)],
        name,
        "",
        "com.microsoft",
        func_name=function,
        input_convention="c" * len(scalars) + "d" * len(read),
        input_tensor_types=[kind for _, kind, _ in read],
        input_tensor_ranks=[rank for _, _, rank in read],
        output_tensor_types=[kind for _, kind, _ in made],
        output_tensor_ranks=[rank for _, _, rank in made],
        # no context is made or kept: nothing that a node reads outlives its readers
        training_mode=0,
        safe_run_mode=0,
        comment="",
        **constants,
    )
