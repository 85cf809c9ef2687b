"""Sizes, lifetimes, the arena and the order of execution, on graphs small enough to count by hand."""

from __future__ import annotations

import random

import onnx
import pytest
from onnx import TensorProto, helper

from ort_zero.ortmodule.compat.ort_kernels import BACKWARD
from ort_zero.ortmodule.recompute import candidates, peak_memory, schedule
from ort_zero.ortmodule.recompute.arena_model import Arena
from ort_zero.ortmodule.recompute.graph_edits import in_given_order, only_copies, ordered
from ort_zero.ortmodule.recompute.graph_model import GraphModel, Node, evaluate
from ort_zero.ortmodule.recompute.planner import Search, budget_for

MIB = 1 << 20
ROWS, COLUMNS = 1024, 256
"""A value of ``[batch, COLUMNS]`` of floats takes one MiB."""
SHAPES = {"loss": [], "bias": [2048], "half": ["batch", COLUMNS // 2]}
"""Of values whose names begin so."""


def graph(nodes: list, outputs: list[str]) -> onnx.ModelProto:
    """Return a model of (operator, reads, makes) in which every value but those of SHAPES is ``[batch, COLUMNS]``."""

    def info(name: str):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPES.get(name[:4], ["batch", COLUMNS]))

    made = [
        helper.make_node(kind, reads, makes, name=f"{makes[0]}_node" if not makes[0].endswith("_recompute") else
                         f"{makes[0].removesuffix('_recompute')}_node_recompute")
        for kind, reads, makes in nodes
    ]  # fmt: skip
    names = dict.fromkeys(name for node in made for name in node.output if not name.endswith("_recompute"))
    return helper.make_model(
        helper.make_graph(
            made, "g", [info("x"), info("w")], [info(name) for name in outputs],
            value_info=[info(name) for name in names if name not in outputs],
        )
    )  # fmt: skip


LAYERS = 4


def chain() -> onnx.ModelProto:
    """Return a forward of gelus and products, and its backward: each gelu is stashed, so is each product."""
    nodes, last = [], "x"
    for i in range(LAYERS):
        nodes += [("MatMul", [last, "w"], [f"p{i}"]), ("FastGelu", [f"p{i}"], [f"g{i}"])]
        last = f"g{i}"
    nodes += [("ReduceSum", [last], ["loss"]), ("YieldOp", ["loss"], ["loss_grad"])]
    gradient = "loss_grad"
    nodes.append(("Expand", [gradient, last], ["d"]))
    gradient, weights = "d", []
    for i in reversed(range(LAYERS)):
        before = f"g{i - 1}" if i else "x"
        nodes += [
            ("FastGeluGrad", [gradient, f"p{i}"], [f"dp{i}"]),
            ("MatMul", [f"dp{i}", "w"], [f"dg{i}"]),
        ]
        weights.append(("MatMul", [before, f"dp{i}"], [f"w{i}_grad"]))
        gradient = f"dg{i}"
    # as ORT's own order has it: all gradients of weights at the end
    return graph(nodes + weights, [f"w{i}_grad" for i in range(LAYERS)])


def recomputed() -> onnx.ModelProto:
    """Return the same with every gelu computed again for the gradients of weights."""
    model = chain()
    yielded = next(i for i, node in enumerate(model.graph.node) if node.op_type == "YieldOp")
    for i, node in enumerate(model.graph.node):
        if i > yielded:
            for k, name in enumerate(node.input):
                if name.startswith("g") and name[1:].isdigit():
                    node.input[k] = f"{name}_recompute"
    copies = [
        helper.make_node("FastGelu", [f"p{i}"], [f"g{i}_recompute"], name=f"g{i}_node_recompute") for i in range(LAYERS)
    ]
    model.graph.node.extend(copies)
    return in_given_order(model, [node.name for node in chain().graph.node])


def graph_model(model: onnx.ModelProto) -> GraphModel:
    return GraphModel.from_onnx(model, {"batch": ROWS})


def test_symbolic_sizes():
    values = {"a": 6, "b": 4}
    assert evaluate("a", values) == 6
    assert evaluate("a*b + 1", values) == 25
    assert evaluate("floor(a/4) - -b", values) == 5
    assert evaluate("unknown*2", values) is None
    assert evaluate("__import__('os')", values) is None
    assert evaluate("a b", values) is None


def test_a_graph_model_knows_bytes_and_memory_of_others():
    model = graph(
        [("MatMul", ["x", "w"], ["a"]), ("Reshape", ["a", "w"], ["r"]), ("Relu", ["r"], ["b"])], ["b"]
    )  # fmt: skip
    g = graph_model(model)
    size = dict(zip(g.values, g.sizes, strict=True))
    assert (size["a"], size["r"], size["b"], size["x"]) == (MIB, 0, MIB, 0)
    # a lives until the reshaped value has been read
    assert peak_memory.peak(g, steps=1).live == 2 * MIB


def test_unknown_sizes_are_named():
    model = chain()
    model.graph.value_info[0].type.tensor_type.shape.dim[0].dim_param = "something_else"
    assert model.graph.value_info[0].name in graph_model(model).unknown


def test_values_die_with_their_last_reader():
    nodes = [("Relu", ["x"], ["a"]), ("Relu", ["a"], ["b"]), ("Relu", ["b"], ["c"]), ("Relu", ["c"], ["d"])]
    assert peak_memory.peak(graph_model(graph(nodes, ["d"])), steps=1).live == 2 * MIB
    kept = [*nodes, ("Add", ["a", "d"], ["e"])]
    assert peak_memory.peak(graph_model(graph(kept, ["e"])), steps=1).live == 3 * MIB


def test_the_order_of_execution_saves_what_the_given_one_holds():
    g = graph_model(recomputed())
    order = schedule.order(g)
    assert sorted(order) == list(range(len(g.nodes)))
    done: set[int] = set(g.given)
    for i in order:
        assert done.issuperset(g.nodes[i].reads), g.nodes[i].name
        done.update(g.nodes[i].makes)
    assert order[: g.barrier + 1] == [i for i in range(g.barrier + 1) if not g.nodes[i].copy]
    assert peak_memory.peak(g.in_order(order)).live < peak_memory.peak(g).live


def test_gradients_of_a_weight_and_its_bias_run_together_where_only_both_free_what_they_read():
    nodes = [("ReduceSum", ["x"], ["loss"]), ("YieldOp", ["loss"], ["loss_grad"]), ("Expand", ["loss_grad"], ["d0"])]
    nodes += [("Relu", [f"d{i}"], [f"d{i + 1}"]) for i in range(LAYERS - 1)]
    for i in range(LAYERS):
        nodes += [("ReduceSum", [f"d{i}"], [f"bias{i}"]), ("MatMul", ["x", f"d{i}"], [f"half{i}"])]
    g = graph_model(graph(nodes, [f"{name}{i}" for i in range(LAYERS) for name in ("bias", "half")]))
    names = [g.nodes[i].name for i in schedule.order(g)]
    for i in range(LAYERS - 2):
        both = [names.index(f"{name}{i}_node") for name in ("bias", "half")]
        assert sorted(both) == [both[0], both[0] + 1] and max(both) < names.index(f"d{i + 2}_node")
    # two gradients on their way, and half of each layer's
    assert peak_memory.peak(g.in_order(schedule.order(g))).live < (2 + LAYERS / 2 + 0.1) * MIB
    assert peak_memory.peak(g).live > LAYERS * MIB


def test_what_can_run_early_but_reads_a_copy_belongs_to_the_backward():
    nodes = [
        ("Relu", ["x"], ["a"]), ("Relu", ["a"], ["early"]), ("Relu", ["early"], ["too"]), ("Relu", ["x"], ["other"]),
        ("ReduceSum", ["a"], ["loss"]), ("YieldOp", ["loss"], ["d"]), ("Add", ["d", "too", "other"], ["e"]),
    ]  # fmt: skip
    model = graph(nodes, ["e"])
    names = [node.name for node in model.graph.node]
    assert [node.name for node in in_given_order(model, names).graph.node] == names
    model.graph.node[1].input[0] = "a_recompute"
    model.graph.node.append(helper.make_node("Relu", ["x"], ["a_recompute"], name="a_node_recompute"))
    expected = ["a", "other", "loss", "d", "a_node_recompute", "early", "too", "e"]
    assert [node.name.removesuffix("_node") for node in in_given_order(model, names).graph.node] == expected
    (candidate,) = candidates.find_candidates(graph_model(in_given_order(model, names)), {"Relu+": 1})
    assert candidate.values == ("a",)


def test_a_copy_runs_when_it_is_needed():
    g = graph_model(recomputed())
    nodes = [g.nodes[i] for i in schedule.order(g)]
    for i, node in enumerate(nodes):
        if node.copy:
            assert set(node.makes) & set(nodes[i + 1].reads), f"{node.name} waits"


def test_what_the_barrier_needs_runs_before_it_and_soon():
    nodes = [
        ("Relu", ["x"], ["a"]), ("Relu", ["a"], ["b"]), ("Relu", ["b"], ["c"]), ("ReduceSum", ["c"], ["loss"]),
        ("YieldOp", ["loss", "seen"], ["d"]), ("Relu", ["d"], ["e"]), ("Reader", ["a"], ["seen"]),
    ]  # fmt: skip
    g = graph_model(graph(nodes, ["e"]))
    names = [g.nodes[i].name for i in schedule.order(g)]
    assert names == ["a_node", "seen_node", "b_node", "c_node", "loss_node", "d_node", "e_node"]


def test_candidates_and_what_is_left_of_them():
    g = graph_model(recomputed())
    found = candidates.find_candidates(g, {"FastGelu+": 1})
    assert [(e.cluster, e.number, e.values, e.saving) for e in found] == [
        ("FastGelu+:1", i, (f"g{i}",), MIB) for i in range(LAYERS)
    ]
    plain, none = graph_model(chain()), candidates.applied(g, [])
    assert [n.name for n in none.nodes] == [n.name for n in plain.nodes]
    assert peak_memory.peak(none) == peak_memory.peak(plain)
    two = candidates.choose(found, {"FastGelu+:1": 2})
    assert [e.values for e in two] == [("g0",), ("g1",)]
    names = {n.name for n in candidates.applied(g, two).nodes if n.copy}
    assert names == {"g0_node_recompute", "g1_node_recompute"} == candidates.copies_of(two)


def test_the_model_is_edited_as_the_graph_model_is():
    model, g = recomputed(), graph_model(recomputed())
    two = candidates.choose(candidates.find_candidates(g, {"FastGelu+": 1}), {"FastGelu+:1": 2})
    edited = graph_model(only_copies(model, candidates.copies_of(two)))
    ours = candidates.applied(g, two)
    assert [(n.name, {ours.values[v] for v in n.reads}) for n in ours.nodes] == [
        (n.name, {edited.values[v] for v in n.reads}) for n in edited.nodes
    ]
    assert peak_memory.peak(edited) == peak_memory.peak(ours)


def test_the_backward_is_marked_in_the_file():
    model = recomputed()
    order = schedule.order(graph_model(model))
    result = ordered(model, order)
    assert [n.name for n in result.graph.node] == [model.graph.node[i].name for i in order]
    marks = [any(a.name == BACKWARD for a in n.attribute) for n in result.graph.node]
    barrier = next(i for i, n in enumerate(result.graph.node) if n.op_type == "YieldOp")
    assert not any(marks[: barrier + 1]) and all(marks[barrier + 1 :])
    # a second time changes nothing
    again = ordered(result, range(len(order)))
    assert again.SerializeToString(deterministic=True) == result.SerializeToString(deterministic=True)


def test_smaller_budgets_never_need_more():
    g = graph_model(recomputed())
    search = Search(g, candidates.find_candidates(g, {"FastGelu+": 1}))
    whole, least = search.point({}), search.least()
    assert least.resident < whole.resident and least.seconds > 0 == whole.seconds
    before = None
    for budget in range(whole.resident * 11 // 10, least.resident * 9 // 10, -MIB // 8):
        point = search.fit(budget)
        if point is None:
            assert budget < budget_for(least.resident)
            continue
        assert budget_for(point.resident) <= budget
        assert before is None or (point.resident <= before.resident and point.seconds >= before.seconds)
        before = point
    assert search.fit(least.resident // 2) is None
    assert search.fit(budget_for(least.resident)) == least


def test_a_budget_leaves_room_for_gaps():
    assert budget_for(100 * MIB) == pytest.approx(100 * MIB / 0.98, abs=1)
    assert budget_for(1000 * MIB) == pytest.approx(1016 * MIB / 0.98, abs=1)
    needed = [budget_for(n * MIB) for n in range(80, 400)]
    steps = [after - before for before, after in zip(needed, needed[1:], strict=False)]
    assert all(MIB < step < 1.2 * MIB for step in steps), "no jump anywhere"
    left = [(budget - n * MIB) / MIB for n, budget in zip(range(80, 400), needed, strict=True)]
    assert left[0] < 2 and 20 < left[200] < 24


def test_a_later_step_finds_the_arena_as_large_as_the_first_one_left_it():
    nodes = [
        Node("early", "ATen", (), (0,)), Node("early_read", "Neg", (0,), ()),
        Node("late", "Neg", (), (1,)), Node("late_read", "Neg", (1,), ()),
    ]  # fmt: skip
    numbers = GraphModel(nodes, ["a", "b"], [4 * MIB, 4 * MIB], frozenset(), frozenset(), -1, frozenset({0}))
    peak = peak_memory.peak(numbers)
    assert peak.first - peak_memory.OVERHEAD == 4 * MIB
    assert peak.resident - peak_memory.OVERHEAD == 8 * MIB


def test_what_a_session_holds_before_its_first_run_is_no_part_of_a_step():
    numbers = GraphModel([Node("a", "Neg", (), (0,))], ["a"], [4 * MIB], frozenset(), frozenset({0}), -1)
    numbers.constants = (MIB,)
    assert peak_memory.peak(numbers).first - peak_memory.OVERHEAD == 4 * MIB


def test_copies_of_a_fused_loss_are_made_when_its_logits_are_gone():
    def heap(operator: str, copies: list[str]) -> int:
        results = ["loss", "rows", "gradient", *copies]
        made = helper.make_node("ATen", ["hidden", "weight", "labels"], results, "n", domain="x", operator=operator)
        typed = {"hidden": ["batch", COLUMNS], "rows": ["batch", COLUMNS], "loss": []}
        infos = {
            name: helper.make_tensor_value_info(name, TensorProto.FLOAT, typed.get(name, [1024, COLUMNS]))
            for name in ("hidden", "weight", *results)
        }
        given = [
            infos["hidden"],
            infos["weight"],
            helper.make_tensor_value_info("labels", TensorProto.INT64, ["batch"]),
        ]
        model = helper.make_model(helper.make_graph([made], "g", given, [infos[name] for name in results]))
        return GraphModel.from_onnx(model, {"batch": ROWS}).nodes[0].heap

    plain, copied = heap("ort_zero_loss::loss", []), heap("ort_zero_loss::loss_copies", ["copy"])
    assert plain - copied == 4 * 1024 * COLUMNS > 0


class TestArena:
    def test_pages_count_that_were_written(self):
        arena = Arena()
        arena.take(3 * MIB)
        assert arena.resident == 3 * MIB  # of a region of four

    def test_freed_memory_is_used_again(self):
        arena = Arena()
        for _ in range(10):
            arena.give(arena.take(MIB))
        assert arena.resident == MIB

    def test_neighbours_grow_together(self):
        arena = Arena()
        places = [arena.take(MIB // 4) for _ in range(4)]
        for place in places:
            arena.give(place)
        arena.take(MIB)
        assert arena.resident == MIB

    def test_the_best_fit_is_taken(self):
        arena = Arena()
        small, wall, large, end = (arena.take(n * MIB) for n in (1, 1, 2, 1))
        arena.give(large)
        arena.give(small)
        assert arena.take(MIB) == small
        assert arena.take(2 * MIB) == large
        assert wall != end

    def test_a_rest_is_given_away_where_ort_is_told_so(self):
        for dead, after in ((1, True), (128 * MIB, False)):
            arena = Arena(dead)
            first = arena.take(3 * MIB)  # of a region of four
            assert (arena.take(MIB) == first + 3 * MIB) is after

    @pytest.mark.parametrize("seed", range(5))
    def test_blocks_never_overlap(self, seed):
        chance, arena, held = random.Random(seed), Arena(), {}
        for _ in range(2000):
            if held and chance.random() < 0.5:
                place = chance.choice(list(held))
                arena.give(place)
                del held[place]
            else:
                size = chance.choice((100, 4096, MIB, chance.randrange(1, 8 * MIB)))
                held[arena.take(size)] = size
        ends = sorted((place, place + size) for place, size in held.items())
        assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
        assert arena.resident >= sum(held.values())
