"""Read the values of observed tensors inside of ORTModule's training graph.

Autograd Functions take the place of the operators of :mod:`ort_zero.statistics.collect.graph_operators`, which Dynamo's
graph has and torch's exporter does not know. ORTModule runs them in Python, as PythonOp and PythonOpGrad.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_zero.ortmodule.upstream import PACKAGE
from ort_zero.statistics.collect import graph_operators
from ort_zero.statistics.collect.graph_operators import OBSERVE, OBSERVE_GRADIENT, PASS_THROUGH

_NOBODY = torch.full((3,), -1)
"""The token of a tensor whose gradient is not shown."""
_muted = [0]
_slots: list[tuple] = []
"""The arguments of `observe` behind the tensor, by the number that :class:`_Observe` has in a graph."""
_tokens: dict[int, list[torch.Tensor]] = {}
"""For the newest run of a graph, the token of each tensor whose gradient is followed, by the tensor's key."""
_keys = itertools.count()


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Show no values within the block, in which an engine exports a graph or checks the graph's first run."""
    _muted[0] += 1
    try:
        yield
    finally:
        _muted[0] -= 1


def observe_in_graph(module: GraphModule) -> bool:
    """Replace the observations in a graph of Dynamo by autograd Functions; return whether there are any.

    Subscribers then see the values and gradients that hooks show in PyTorch, in the same order. ONNX Runtime refuses
    to train a graph in which an input with a gradient leads to observed tensors alone, and to no result.
    """
    if not any(map(graph_operators.is_observation, module.graph.nodes)):
        return False
    graph_operators.follow_gradients(module)
    keys: dict[int, int] = {}
    token: Node | None = None
    for node in list(module.graph.nodes):
        if node.target is PASS_THROUGH:
            keys[node.args[1]] = key = next(_keys)
            node.target, node.args = pass_on, (node.args[0], None, key)
        elif node.target is OBSERVE:
            _slots.append((node.args[1:6], keys.get(next(iter(node.args[6:]), -1), -1)))
            # each observation takes the token of the one before: ONNX Runtime must not change their order
            node.target, node.args = observe, (node.args[0], token, len(_slots) - 1)
            token = node
    _keep(module, token)
    module.recompile()
    return True


def _keep(module: GraphModule, token: Node | None) -> None:
    """Let a result of the graph depend on the last token, without which ONNX Runtime would leave the Functions out."""
    output = next(node for node in module.graph.nodes if node.op == "output")
    result = next(arg for arg in output.all_input_nodes if isinstance(arg.meta.get("example_value"), torch.Tensor))
    with module.graph.inserting_before(output):
        kept = module.graph.call_function(pass_on, (result, token, -1))
    kept.meta = dict(result.meta)
    output.replace_input_with(result, kept)


class _PassOn(torch.autograd.Function):
    """Shows the whole gradient of a tensor, if :class:`_Observe` has shown the tensor in the same run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return a copy, since an alias could not be changed in place; `rest` is a token, or none, and the key."""
        ctx.tokens = _tokens[rest[-1]] = [_NOBODY]
        ctx.others = (None,) * len(rest)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient as it came."""
        if not _muted[0]:
            OBSERVE_GRADIENT(gradient, ctx.tokens[0])
        return gradient.clone(), *ctx.others  # ONNX Runtime copies, and says so, what is returned as it came

    @staticmethod
    def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
        """Return shape and type of the copy for ONNX Runtime."""
        return shapes[:1], types[:1]


class _Observe(torch.autograd.Function):
    """Shows a tensor of a module call."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        """Return the token, int64 [3]; `rest` is the token of the observation before, and the number of the slot."""
        slot, key = _slots[rest[-1]]
        token = _NOBODY.clone() if _muted[0] or _is_exporting() else OBSERVE(tensor, *slot)
        if key >= 0:
            _tokens[key][0] = token
        return token

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise, since a token has no gradient."""
        raise NotImplementedError

    @staticmethod
    def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
        """Return shape and type of a token for ONNX Runtime; 7 is int64."""
        return [[3]], [7]


def pass_on(tensor: torch.Tensor, before: torch.Tensor | None, key: int) -> torch.Tensor:
    """Return a copy of `tensor`, once the observation with the token `before` is made; show its whole gradient."""
    return _PassOn.apply(tensor, *(() if before is None else (before,)), key)


def observe(tensor: torch.Tensor, before: torch.Tensor | None, number: int) -> torch.Tensor:
    """Show `tensor` after the observation with the token `before`, and return a token."""
    return _Observe.apply(tensor, *(() if before is None else (before,)), number)


def _is_exporting() -> bool:
    """Return whether ORTModule runs the graph's Python code to export the graph."""
    package = sys.modules.get(PACKAGE)
    return package is not None and package.ORTMODULE_ONNX_EXPORT_CONTEXT[0]
