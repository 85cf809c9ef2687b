"""The partition of a joint graph: equal calls become one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func

from ort_zero.compile.partition import partition


def test_a_forward_makes_one_call_of_equal_calls():
    graphs = []

    def compiler(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).sin() * x.to(torch.bfloat16).cos()

    compiled = aot_function(function, fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    x, eager = (torch.arange(4.0, requires_grad=True) for _ in range(2))
    compiled(x).sum().backward()
    function(eager).sum().backward()
    assert len([name for name in graphs[0] if "_to_copy" in name or "convert" in name]) == 1
    torch.testing.assert_close(x.grad, eager.grad)
