"""The path of the planner: what it computes again first, and what only together saves memory."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from ort_zero.ortmodule.recompute import candidates
from ort_zero.ortmodule.recompute.graph_model import GraphModel
from ort_zero.ortmodule.recompute.planner import Search, budget_for

MIB = 1 << 20
SIZES = {"loss": 0, "big": 4, "two": 2}
"""MiB of the values whose names begin so; the others have one MiB."""


def search_of(nodes: list[tuple[str, str, str]], result: str, **recomputed: str) -> Search:
    """Return the search in a graph of (operator, what it reads, what it makes).

    Args:
        nodes: names are separated by blanks; what lies behind YieldOp is the backward.
        result: the graph's output.
        recomputed: by the name of a value that the backward is to compute again, the cluster that does it.
    """

    def info(name: str) -> onnx.ValueInfoProto:
        mib = next((mib for begin, mib in SIZES.items() if name.startswith(begin)), 1)
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [512, 512 * mib] if mib else [])

    made, backward = [], False
    for operator, reads, makes in nodes:
        names = [f"{name}_recompute" if backward and name in recomputed else name for name in reads.split()]
        made.append(helper.make_node(operator, names, [makes], name=f"{makes}_node"))
        backward = backward or operator == "YieldOp"
        if makes in recomputed:
            made.append(helper.make_node(operator, names, [f"{makes}_recompute"], name=f"{makes}_node_recompute"))
    values = [info(makes) for _, _, makes in nodes if makes != result]
    graph = helper.make_graph(made, "g", [info("x"), info("w")], [info(result)], value_info=values)
    model = GraphModel.from_onnx(helper.make_model(graph), {})
    found = candidates.find_candidates(model, dict.fromkeys(recomputed.values(), 1))
    assert {candidate.cluster for candidate in found} == {f"{name}:1" for name in recomputed.values()}
    return Search(model, found)


def moves_of(search: Search) -> list[set[str]]:
    """Return which clusters each step of the path adds or grows."""
    counts = [dict(point.counts) for point in search.path()]
    return [{key for key in after if after[key] != before.get(key)} for before, after in zip(counts, counts[1:])]


def test_the_cheapest_recomputation_comes_first_though_another_saves_more():
    search = search_of(
        [
            ("FastGelu", "x", "gelu"),
            ("MatMul", "x w", "two"),
            ("ReduceSum", "gelu two", "loss"),
            ("YieldOp", "loss", "loss_grad"),
            ("Expand", "loss_grad", "big"),  # the peak, while both are held
            ("ReduceSum", "big", "loss_of_big"),
            ("ReduceSum", "loss_of_big gelu", "loss_of_gelu"),
            ("Mul", "loss_of_gelu two", "two_result"),
        ],
        "two_result",
        gelu="FastGelu+",
        two="MatMul+",
    )
    whole = search.point({})
    cheap, dear = search.point({"FastGelu+:1": 1}), search.point({"MatMul+:1": 1})
    assert whole.live - dear.live > whole.live - cheap.live > 0
    assert dear.seconds > 3 * cheap.seconds
    assert moves_of(search)[0] == {"FastGelu+:1"}
    # a budget that both alone would keep takes the one that costs less time
    assert search.fit(budget_for(cheap.resident)) == cheap


def test_two_recomputations_that_save_nothing_alone_are_tried_together():
    """Each of two equal peaks holds one of the values: without the one the other peak is as high as before."""
    search = search_of(
        [
            ("FastGelu", "x", "early"),
            ("ReduceSum", "early", "loss_first"),
            ("Relu", "x", "big_of_the_forward"),
            ("ReduceSum", "big_of_the_forward", "loss_part"),
            ("Tanh", "x", "late"),
            ("ReduceSum", "loss_part loss_first late", "loss"),
            ("YieldOp", "loss", "loss_grad"),
            ("ReduceSum", "loss_grad early", "loss_after"),
            ("Relu", "loss_after", "big_of_the_backward"),
            ("ReduceSum", "big_of_the_backward", "loss_of_big"),
            ("Mul", "loss_of_big late", "result"),
        ],
        "result",
        early="FastGelu+",
        late="Tanh+",
    )
    whole = search.point({})
    both = search.point({"FastGelu+:1": 1, "Tanh+:1": 1})
    for name in ("FastGelu+:1", "Tanh+:1"):
        assert abs(search.point({name: 1}).live - whole.live) < 1024
    assert both.live < whole.live - MIB / 2
    assert moves_of(search) == [{"FastGelu+:1", "Tanh+:1"}]
    assert search.path()[-1] == both
