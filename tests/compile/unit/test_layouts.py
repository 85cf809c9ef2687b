"""PyTorch's own backwards get their arguments in the memory order that they were traced with."""

from __future__ import annotations

import torch
from older_versions import older
from torch.fx import Graph, GraphModule

from ort_zero.compat.torch_graphs import SizeReader
from ort_zero.compile.executor import program_of
from ort_zero.compile.plan import make_plan

SIZES = (4, 16, 8, 8)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last)


def test_a_gradient_of_another_layout_does_not_spoil_a_group_norm():
    """The kernel for CPUs reads the gradient in the layout of x: ONNX Runtime may have returned another."""
    x, gradient, gain = torch.randn(SIZES), torch.randn(SIZES), torch.randn(16)
    _, mean, rstd = torch.ops.aten.native_group_norm(x, gain, None, 4, 16, 64, 4, 1e-5)
    rest = (4, 16, 64, 4, [True, True, True])
    backward = torch.ops.aten.native_group_norm_backward.default
    right = backward(gradient, x, mean, rstd, gain, *rest)
    if older("torch", than="2.14"):
        assert not torch.allclose(backward(gradient, channels_last(x), mean, rstd, gain, *rest)[0], right[0], atol=0.1)

    graph = Graph()
    values = [channels_last(gradient), channels_last(x), mean, rstd, gain]
    inputs = [graph.placeholder(f"input_{index}") for index in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    graph.output((graph.call_function(backward, (*inputs, *rest)),))
    plan = make_plan(graph, widen=False, supports=lambda node, fragment: "no", refusal=lambda node: None)
    program = program_of(
        GraphModule(torch.nn.Module(), graph), plan, [], SizeReader([node.meta.get("val") for node in inputs])
    )
    (ours,) = program([gradient, channels_last(x), mean, rstd, gain])
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
