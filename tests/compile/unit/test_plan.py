"""The plan of a graph: segments by level, views and constants inside of segments, order of random calls, reasons."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_zero.compile import devices
from ort_zero.compile.conversion import registry
from ort_zero.compile.partition import decompositions
from ort_zero.compile.plan import Plan, Segment, Supports, TorchCall, make_plan

aten = torch.ops.aten


def plan_of(
    function: Callable,
    *arguments: torch.Tensor,
    refusal: Callable[[torch.fx.Node], str | None] = lambda node: None,
    supports: Supports = lambda node, fragment: None,
) -> Plan:
    """Return the plan of a function, traced with fake tensors; without `supports` the provider has all kernels."""
    graph = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*arguments).graph
    return make_plan(graph, widen=False, supports=supports, refusal=refusal)


def targets(step: Segment | TorchCall) -> list[str]:
    """Return the names of the ATen calls of a step."""
    nodes = step.nodes if isinstance(step, Segment) else (step.node,)
    return [str(node.target).removeprefix("aten.").partition(".")[0] for node in nodes]


def test_no_conversion_is_shadowed_by_a_decomposition():
    assert {str(target) for target in registry.table().keys() & decompositions().keys()} <= {"aten.elu.default"}


def test_a_large_product_that_no_segment_reads_is_a_segment_of_its_own():
    def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tanh(g @ w), g.t() @ x, x.sum(0)

    with torch.device("meta"):
        large, small = (plan_of(gradients, torch.empty(n, n), torch.empty(n, n), torch.empty(n, n)) for n in (1024, 64))
    assert [targets(step)[-1] for step in large.steps] == ["sum", "mm"]
    assert [targets(step).count("mm") for step in large.steps] == [1, 1]
    assert [targets(step).count("mm") for step in small.steps] == [2]


def test_a_call_without_conversion_divides_the_segments_and_has_a_reason():
    plan = plan_of(lambda x: torch.tanh(torch.linalg.svdvals(torch.tanh(x))), torch.randn(4, 4))
    kinds = [type(step).__name__ for step in plan.steps]
    assert kinds[0] == kinds[-1] == "Segment" and "TorchCall" in kinds
    assert [reason for node, reason in plan.reasons.items() if "svd" in str(node.target)] == ["no conversion"]


def test_independent_nodes_of_one_level_share_a_segment():
    def two_ways(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left = torch.tanh(torch.linalg.svdvals(torch.tanh(x)))
        right = torch.tanh(torch.linalg.svdvals(torch.tanh(y)))
        return left + right

    plan = plan_of(two_ways, torch.randn(4, 4), torch.randn(4, 4))
    segments = [step for step in plan.steps if isinstance(step, Segment)]
    assert [targets(segment) for segment in segments] == [["tanh", "tanh"], ["tanh", "tanh", "add"]]


def test_a_view_that_two_segments_read_is_in_both():
    def reads_twice(x: torch.Tensor) -> torch.Tensor:
        turned = x.t()
        first = torch.tanh(turned)
        return torch.tanh(torch.linalg.matrix_exp(first)) + turned

    plan = plan_of(reads_twice, torch.randn(4, 4))
    segments = [step for step in plan.steps if isinstance(step, Segment)]
    assert len(segments) == 2
    for segment in segments:
        assert any(name in ("t", "permute", "transpose") for name in targets(segment))
        assert all(node.op == "placeholder" or "matrix_exp" in str(node.target) for node in segment.inputs)


def test_random_calls_keep_their_order():
    def draws(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        late = torch.rand_like(torch.linalg.matrix_exp(torch.tanh(x)))
        early = torch.rand_like(x)  # needs nothing before it, and would come first by its level
        return late, early

    plan = plan_of(draws, torch.rand(4, 4))
    order = [step.node for step in plan.steps if isinstance(step, TorchCall) and "rand_like" in str(step.node.target)]
    assert [str(node.args[0].op) for node in order] == ["call_function", "placeholder"]


def test_a_conversion_that_raises_leaves_its_node_to_torch(monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: object) -> None:
        raise KeyError("oops")

    monkeypatch.setitem(registry.table(), aten.tanh.default, broken)
    plan = plan_of(torch.tanh, torch.randn(4))
    assert list(plan.reasons.values()) == ["the conversion failed with KeyError: 'oops'"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [lambda x: x.sum(0), lambda x: x.mean((0, 1))])
def test_sums_in_16_bits_on_a_gpu_stay_in_pytorch(function: Callable, dtype: torch.dtype):
    gpu, x = torch.device("cuda"), torch.ones(4, 4, dtype=dtype)
    plan = plan_of(function, x, supports=lambda node, fragment: devices.unsupported(fragment, gpu))
    assert any("partial sums in 16 bits" in reason for reason in plan.reasons.values()), plan.reasons
