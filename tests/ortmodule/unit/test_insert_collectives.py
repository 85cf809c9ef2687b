"""The rewritten graph: it computes what the original computes, keeps every rule, and a broken rule is found."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_collective_plan import MLP_WEIGHTS, SIZE, chain_model, gather_tuples, mlp, model_of, node, value, weights_of

from ort_zero.errors import GraphEditError
from ort_zero.ortmodule.onnx_edit.topology import input_names, node_key, topological_order
from ort_zero.ortmodule.runtime.zero3.collective_plan import (
    MAX_LEVEL_DISTANCE,
    CollectivePlan,
    Gather,
    Reduce,
    Weight,
    plan_collectives,
)
from ort_zero.ortmodule.runtime.zero3.graph_analysis import analyse
from ort_zero.ortmodule.runtime.zero3.insert_collectives import insert_collectives
from ort_zero.ortmodule.runtime.zero3.node_names import TRIGGER, gathered_name, token_name
from ort_zero.ortmodule.runtime.zero3.verify import verify

GRAPHS = 40
"""Random graphs that the property tests look at."""
OPERATORS: dict[str, Callable] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "MatMul": np.matmul,
    "Transpose": lambda a: a.T,
    "Cast": lambda a: a,
    "Identity": lambda a: a,
    "Relu": lambda a: np.maximum(a, 0),
    "Tanh": np.tanh,
    "Sum": lambda *a: sum(a),
    "ReduceSum": lambda a: a.sum(axis=0),
    "ReluGrad": lambda dy, y: dy * (y > 0),
    "Shape": lambda a: np.array(a.shape, dtype=np.int64),
    "Size": lambda a: np.array(a.size, dtype=np.int64),
    "Reshape": lambda a, shape: a.reshape(shape),
    "YieldOp": lambda *a: tuple(np.cos(x) for x in a),  # what the user would hand back
}


def attribute(n: onnx.NodeProto, name: str):
    return next(helper.get_attribute_value(a) for a in n.attribute if a.name == name)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], p: CollectivePlan | None = None, weights=None):
    """Run the nodes in the order of the file; return the values, and the gradients in the order of their reduction."""
    values = dict(feeds) | {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    reduced: list[tuple[str, np.ndarray]] = []
    for n in model.graph.node:
        read = [values[name] for name in n.input if name]
        if n.op_type == "PythonOp":
            event = p.events[attribute(n, "input_int_scalars")[1]]
            if isinstance(event, Gather):
                result = (None, np.zeros(1), *(weights[w] for w in event.weights))
            else:
                reduced += zip(event.weights, read[1:], strict=True)
                result = (None, np.zeros(1))
        else:
            result = OPERATORS[n.op_type](*read)
            result = result if isinstance(result, tuple) else (result,)
        values.update(zip(n.output, result, strict=True))
    return values, reduced


def assert_same_results(
    model: onnx.ModelProto, weights: dict[str, Weight], *, training: bool, seed: int = 0, merge_elements: int = 0
) -> CollectivePlan:
    """Assert that original and rewritten graph have one outcome: graph outputs, and each gradient reduced once."""
    p = plan_collectives(model, weights, training=training, merge_elements=merge_elements)
    rewritten, gradient = insert_collectives(model, p, executor=7, training=training)
    onnx.checker.check_model(rewritten)
    assert_valid_schedule(rewritten, p)
    generator = np.random.default_rng(seed)
    feeds = {
        i.name: generator.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim]).astype(np.float32)
        for i in model.graph.input
    }
    given = {name: array for name, array in feeds.items() if name in p.weights}
    ours = {name: array for name, array in feeds.items() if name not in p.weights} | {TRIGGER: np.zeros(1)}
    expected, _ = run(sorted_copy(model), feeds)
    values, reduced = run(rewritten, ours, p, given)
    outputs = [o.name for o in rewritten.graph.output]
    for name in outputs:
        if name != gradient:
            np.testing.assert_array_equal(values[name], expected[name], err_msg=name)
    trained = [w for _, r in p.reduces() for w in r.weights]
    assert [w for w, _ in reduced] == trained
    assert len(set(trained)) == len(trained)
    for name, array in reduced:
        np.testing.assert_array_equal(array, expected[f"{name}_grad"], err_msg=name)
    dropped = {f"{w}_grad" for w in p.weights}
    assert set(outputs) - {gradient} == {o.name for o in model.graph.output} - dropped
    return p


def sorted_copy(model: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto.FromString(model.SerializeToString())
    nodes = topological_order(result.graph)
    result.graph.ClearField("node")
    result.graph.node.extend(nodes)
    return result


def assert_valid_schedule(rewritten: onnx.ModelProto, p: CollectivePlan) -> None:
    """Assert, without the token chain, that no event waits for a later one, nor the forward for the backward."""
    before: dict[str, frozenset] = {}  # events and "yield" that a value depends on by data alone
    for n in rewritten.graph.node:
        ours = n.op_type == "PythonOp"
        names = list(n.input)[1:] if ours else input_names(n)
        depends = frozenset().union(*(before.get(name, frozenset()) for name in names))
        if ours:
            index = attribute(n, "input_int_scalars")[1]
            assert all(e == "yield" or e < index for e in depends), (index, depends)
            backward = p.events[index].phase.value == "backward"
            assert backward == ("yield" in depends), index
            depends |= {index}
        if n.op_type == "YieldOp":
            depends |= {"yield"}
        before.update(dict.fromkeys(n.output, depends))


def test_the_rewritten_mlp_computes_the_same_values_and_gradients():
    p = assert_same_results(mlp(), MLP_WEIGHTS, training=True)
    assert str(p) == "4 weights, 2 gathers forward, 2 backward, 4 reduces"


def test_inputs_outputs_and_nodes_of_the_rewritten_mlp():
    p = plan_collectives(mlp(), MLP_WEIGHTS, training=True)
    rewritten, gradient = insert_collectives(mlp(), p, executor=7, training=True)
    graph = rewritten.graph
    assert [i.name for i in graph.input] == ["x", TRIGGER]
    assert gradient == token_name(7)
    assert [o.name for o in graph.output] == ["x_grad", gradient]
    ours = [n for n in graph.node if n.op_type == "PythonOp"]
    assert [n.name for n in ours] == [
        "ort_zero_gather_0", "ort_zero_gather_1", "ort_zero_gather_2", "ort_zero_reduce_3", "ort_zero_gather_4",
        "ort_zero_reduce_5", "ort_zero_reduce_6", "ort_zero_reduce_7",
    ]  # fmt: skip
    assert [n.input[0] for n in ours] == [TRIGGER, *(token_name(i) for i in range(7))]
    first, third = ours[0], ours[3]
    assert list(first.input) == [TRIGGER, "x"]
    assert list(first.output) == ["ort_zero_gather_0_ctx", token_name(0), "a.weight__gathered_0", "a.bias__gathered_0"]
    assert attribute(first, "func_name") == b"ort_zero::gather"
    assert attribute(first, "input_convention") == b"ccdd"
    assert attribute(first, "input_int_scalars") == [7, 0]
    assert attribute(first, "input_int_scalar_positions") == [0, 1]
    assert attribute(first, "input_tensor_ranks") == [1, 2]
    assert attribute(first, "output_tensor_ranks") == [1, 2, 1]
    assert attribute(first, "output_tensor_types") == [1, 1, 1]
    assert list(third.input) == [token_name(2), "b.bias_grad"]
    assert list(third.output) == ["ort_zero_reduce_3_ctx", token_name(3)]
    assert attribute(third, "func_name") == b"ort_zero::reduce"
    assert attribute(third, "input_tensor_ranks") == [1, 1]
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.value_info}
    assert shapes["a.weight__gathered_0"] == [SIZE, SIZE]
    assert shapes["a.bias__gathered_0"] == [SIZE]
    assert shapes["a.bias_grad"] == [SIZE]  # no output any more, its type is kept
    assert gradient not in shapes


def test_the_type_of_an_anchor_is_that_of_the_graph():
    ids = value("ids", (2, 3), TensorProto.INT64)
    model = model_of([node("Gather", "w ids", "h")], [ids, "w"], [value("h", (2, 3, SIZE))])
    rewritten, gradient = insert_collectives(
        model, plan_collectives(model, weights_of("w"), training=False), executor=0, training=False
    )
    assert gradient is None
    gather = rewritten.graph.node[0]
    assert list(gather.input) == [TRIGGER, "ids"]
    assert attribute(gather, "input_tensor_types") == [1, TensorProto.INT64]
    assert attribute(gather, "input_tensor_ranks") == [1, 2]
    assert [o.name for o in rewritten.graph.output] == ["h"]


def weight_chain_model() -> onnx.ModelProto:
    """Return a graph whose Transpose of a Cast of w is read far and near, in both phases; the nodes have no names."""
    far = 2 * MAX_LEVEL_DISTANCE
    nodes = [
        node("Cast", "w", "w_c", to=1),
        node("Transpose", "w_c", "w_t"),
        node("MatMul", "x w_t", "h0"),
        node("MatMul", "h0 w_t", "near"),
        *(node("Relu", f"h{i}" if i else "near", f"h{i + 1}") for i in range(far)),
        node("MatMul", f"h{far} w_t", "out"),
        node("YieldOp", "out", "g"),
        node("MatMul", "g w_t", "h_grad"),
        node("MatMul", "h_grad w_c", "x_grad"),
        node("Identity", "h_grad", "w_grad"),
    ]
    for n in nodes:
        n.name = ""
    return model_of(nodes, ["x", "w"], ["x_grad", "w_grad"], infos=["w_c", "w_t"])


def test_a_chain_of_weight_only_nodes_is_cloned_for_each_gather_and_shared_by_near_readers():
    model = weight_chain_model()
    p = assert_same_results(model, weights_of("w"), training=True)
    assert [(g.phase.value, g.readers) for _, g in p.gathers()] == [
        ("forward", (("h0", "near"),)), ("forward", (("out",),)), ("backward", (("h_grad", "x_grad"),)),
    ]  # fmt: skip
    rewritten, _ = insert_collectives(model, p, executor=0, training=True)
    casts = [n for n in rewritten.graph.node if n.op_type == "Cast"]
    transposes = [n for n in rewritten.graph.node if n.op_type == "Transpose"]
    gathers = [i for i, _ in p.gathers()]
    assert sorted(n.input[0] for n in casts) == [gathered_name("w", i) for i in gathers]
    assert len(transposes) == 3
    read = {n.output[0]: n for n in rewritten.graph.node}
    assert read["h0"].input[1] == read["near"].input[1]
    assert len({read[key].input[1] for key in ("h0", "out", "h_grad")}) == 3
    typed = {v.name for v in rewritten.graph.value_info}
    assert {n.output[0] for n in casts + transposes} <= typed
    names = [n.name for n in rewritten.graph.node if n.name]
    assert len(set(names)) == len(names)


def test_the_gradient_of_a_frozen_weight_is_pruned_with_its_nodes():
    weights = {**MLP_WEIGHTS, **weights_of("a.weight", frozen=("a.weight",))}
    p = assert_same_results(mlp(), weights, training=True)
    rewritten, _ = insert_collectives(mlp(), p, executor=0, training=True)
    made = {out for n in rewritten.graph.node for out in n.output}
    assert "a.weight_grad" not in made
    assert "a_out_grad_t" not in made
    assert {"a.bias_grad", "x_grad"} <= made


def test_a_users_python_code_stays_though_nobody_reads_its_result_and_other_nodes_do_not():
    weights = {**MLP_WEIGHTS, **weights_of("a.weight", frozen=("a.weight",))}
    model = mlp()
    model.graph.node.extend(
        [
            node("Relu", "r", "for_python"),
            node("PythonOp", "for_python", "unread", func_name="a_users_log"),
            node("Relu", "r", "unread_too"),
        ]
    )
    for gather in (True, False):
        p = plan_collectives(model, weights, training=True, gather=gather)
        rewritten, _ = insert_collectives(model, p, executor=0, training=True)
        made = {out for n in rewritten.graph.node for out in n.output}
        assert {"for_python", "unread"} <= made
        assert "unread_too" not in made


def test_reduces_alone_keep_the_weights_as_inputs():
    p = plan_collectives(mlp(), MLP_WEIGHTS, training=True, gather=False)
    rewritten, gradient = insert_collectives(mlp(), p, executor=0, training=True)
    assert [i.name for i in rewritten.graph.input] == [i.name for i in mlp().graph.input] + [TRIGGER]
    assert [o.name for o in rewritten.graph.output] == ["x_grad", gradient]
    assert [n.name for n in rewritten.graph.node if n.op_type == "PythonOp"] == [
        f"ort_zero_reduce_{i}" for i in range(4)
    ]
    onnx.checker.check_model(rewritten)


def test_a_branch_that_returns_a_weight_gets_a_node_of_its_own():
    """A sub-graph's output must be made inside, also after the weight became the output of a gather."""
    branches = [
        helper.make_graph(nodes, "b", [], [value(out)])
        for nodes, out in (([], "w"), ([node("Add", "h w", "inner")], "inner"))
    ]
    flag = value("flag", (), TensorProto.BOOL)
    choose = helper.make_node("If", ["flag"], ["out"], "choose", then_branch=branches[0], else_branch=branches[1])
    model = model_of([node("Relu", "x", "h"), choose], ["x", flag, "w"], ["out"])
    p = plan_collectives(model, weights_of("w"), training=False)
    assert gather_tuples(p)[0][3] == (("out",),)
    rewritten, _ = insert_collectives(model, p, executor=0, training=False)
    then = attribute(next(n for n in rewritten.graph.node if n.op_type == "If"), "then_branch")
    assert [(n.op_type, list(n.input), list(n.output)) for n in then.node] == [
        ("Identity", ["w__gathered_0"], [then.output[0].name])
    ]


def test_a_weight_of_which_only_the_shape_is_used_is_no_input_any_more_though_nothing_is_gathered():
    model = model_of([node("Shape", "w", "dims"), node("Reshape", "x dims", "out")], ["x", "w", "unread"], ["out"])
    p = assert_same_results(model, weights_of("w", "unread"), training=False)
    assert p.events == ()
    rewritten, _ = insert_collectives(model, p, executor=0, training=False)
    assert [i.name for i in rewritten.graph.input] == ["x", TRIGGER]


def test_a_graph_is_not_rewritten_twice():
    p = plan_collectives(mlp(), MLP_WEIGHTS, training=True)
    rewritten, _ = insert_collectives(mlp(), p, executor=0, training=True)
    with pytest.raises(GraphEditError, match="rewritten already"):
        insert_collectives(rewritten, p, executor=0, training=True)


def broken(change: Callable[[onnx.GraphProto], None]) -> str:
    """Return what verify says about the rewritten MLP after `change`."""
    p = plan_collectives(mlp(), MLP_WEIGHTS, training=True)
    rewritten, _ = insert_collectives(mlp(), p, executor=0, training=True)
    verify(rewritten, p)
    change(rewritten.graph)
    with pytest.raises(GraphEditError) as error:
        verify(rewritten, p)
    return str(error.value)


def of(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(n for n in graph.node if n.name == name or name in n.output)


def test_verify_finds_a_weight_that_is_still_an_input():
    assert broken(lambda g: g.input.append(value("a.weight"))) == "weights are still graph inputs: ['a.weight']"


def test_verify_finds_a_node_that_still_reads_a_weight():
    def change(graph):
        graph.initializer.append(numpy_helper.from_array(np.zeros((SIZE, SIZE), np.float32), "b.weight"))
        of(graph, "r_grad").input[1] = "b.weight"

    assert broken(change) == "node 'n_r_grad' still reads the weight 'b.weight'"


def test_verify_finds_a_backward_node_that_reads_what_the_forward_gathered():
    def change(graph):
        of(graph, "r_grad").input[1] = gathered_name("b.weight", 1)

    message = broken(change)
    assert message == "backward node 'n_r_grad' reads 'b.weight__gathered_1', which the forward gathered"


def test_verify_finds_a_backward_node_that_reads_something_made_of_the_forwards_weight():
    def change(graph):
        of(graph, "r_grad").input[1] = of(graph, "b_mm").input[1]

    assert "backward node 'n_r_grad' reads 'b_t__copy" in broken(change)


def test_verify_finds_a_second_reduction():
    def change(graph):
        of(graph, "ort_zero_reduce_7").input.append("b.bias_grad")

    assert broken(change) == "the gradient of 'b.bias' is reduced 2 times, not once"


def test_verify_finds_a_missing_reduction():
    def change(graph):
        del of(graph, "ort_zero_reduce_3").input[1]

    assert broken(change) == "the gradient of 'b.bias' is reduced 0 times, not once"


def test_verify_finds_a_gradient_that_is_reduced_and_an_output():
    message = broken(lambda g: g.output.append(value("b.bias_grad", (SIZE,))))
    assert "gradient of 'b.bias'" in message


def test_verify_finds_a_broken_token_chain():
    def skip(graph):
        of(graph, "ort_zero_reduce_5").input[0] = token_name(3)

    assert broken(skip) == "event 5 is not in the token chain"

    def start_anew(graph):
        of(graph, "ort_zero_gather_2").input[0] = TRIGGER

    assert broken(start_anew) == "event 2 is not in the token chain"

    def lose(graph):
        graph.node.remove(of(graph, "ort_zero_reduce_7"))

    assert broken(lose) == "event 7 is not in the token chain"


def test_verify_finds_an_event_that_happens_twice():
    def change(graph):
        twin = onnx.NodeProto.FromString(of(graph, "ort_zero_reduce_3").SerializeToString())
        del twin.input[1:]
        twin.output[0], twin.output[1] = "twin_ctx", "twin_token"
        graph.node.append(twin)

    assert broken(change) == "event 3 happens twice"


def test_verify_finds_a_cycle():
    def change(graph):
        of(graph, "ort_zero_gather_0").input[1] = "r"

    assert "cycle" in broken(change)


def test_verify_finds_a_value_that_nothing_makes():
    def change(graph):
        graph.node.remove(of(graph, "r"))

    assert "'r', which nothing makes" in broken(change)


def test_a_plan_of_another_graph_is_refused():
    p = plan_collectives(chain_model(4, {2: "w"}), weights_of("w"), training=False)
    far = chain_model(40, {2: "w", 30: "w"})
    with pytest.raises(GraphEditError, match="no gather serves 'w' at node 'n_h30'"):
        insert_collectives(far, p, executor=0, training=False)


def random_training_graph(seed: int) -> tuple[onnx.ModelProto, dict[str, Weight]]:
    """Return a random graph as ORT's gradient builder might make it, and its weights."""
    r = random.Random(seed)
    weights = {
        name: Weight(name=name, shape=(SIZE, SIZE), elem_type=1, trainable=r.random() < 0.85)
        for name in (f"m{i % r.randint(1, 4)}.w{i}" for i in range(r.randint(1, 9)))
    }
    names = sorted(weights)
    constants = ["c0", "c1"]
    nodes: list[onnx.NodeProto] = []
    pure = list(names)  # weights and what is made of them only

    def add(op: str, *inputs: str) -> str:
        out = f"v{len(nodes)}"
        nodes.append(node(op, " ".join(inputs), out))
        if r.random() < 0.1:
            nodes[-1].name = ""
        return out

    def weight_value() -> str:
        choice = r.choice(names) if r.random() < 0.5 else r.choice(pure)
        if r.random() < 0.3:
            choice = add("Transpose", choice)
            pure.append(choice)
        elif r.random() < 0.15:
            choice = add(r.choice(["Add", "Mul"]), choice, r.choice(pure + constants))
            pure.append(choice)
        return choice

    def layers(values: list[str], count: int, others: list[str]) -> None:
        for _ in range(count):
            latest = values[-1] if r.random() < 0.7 else r.choice(values)
            kind = r.random()
            if kind < 0.35:
                values.append(add("MatMul", latest, weight_value()))
                values.append(add("Tanh", values[-1]))
            elif kind < 0.5:
                values.append(add("Sum", latest, weight_value(), weight_value(), r.choice(others or values)))
            elif kind < 0.6:
                values.append(add("Reshape", latest, add("Shape", r.choice(names))))
            elif kind < 0.7:
                values.append(add("Mul", latest, r.choice(constants)))
            elif kind < 0.85:
                for _ in range(r.randint(1, 2 * MAX_LEVEL_DISTANCE)):
                    values.append(add("Tanh", values[-1]))
            else:
                values.append(add("Add", latest, r.choice(others or values)))

    forward = ["x", "y"]
    layers(forward, r.randint(1, 14), [])
    outputs = [forward[-1]] + ([r.choice(forward)] if r.random() < 0.3 else [])
    outputs += [weight_value()] if r.random() < 0.1 else []
    yields = [f"yield_grad{i}" for i in range(len(outputs))]
    nodes.append(node("YieldOp", " ".join(outputs), " ".join(yields)))
    backward = list(yields)
    layers(backward, r.randint(1, 14), forward)
    grads = ["x_grad"]
    nodes.append(node("Identity", backward[-1], "x_grad"))
    for name in names:
        if r.random() < 0.9:
            grads.append(f"{name}_grad")
            operands = [r.choice(backward), r.choice(backward + forward + pure)]
            nodes.append(node("Add", " ".join(operands), grads[-1]))
    if r.random() < 0.5:
        r.shuffle(nodes)
    array = numpy_helper.from_array
    initializers = [array(np.full((SIZE, SIZE), 0.5, np.float32), "c0"), array(np.eye(SIZE, dtype=np.float32), "c1")]
    model = model_of(nodes, ["x", "y", *names], grads, initializers=initializers)
    return model, weights


def assert_readers_are_covered_once(model: onnx.ModelProto, p: CollectivePlan) -> None:
    """Assert that each (weight, reader) is in exactly one gather, that of the reader's phase."""
    a = analyse(model.graph, p.weights)
    seen: dict[tuple[str, str], str] = {}
    for _, gather in p.gathers():
        for weight, readers in zip(gather.weights, gather.readers, strict=True):
            for key in readers:
                assert (weight, key) not in seen
                seen[weight, key] = gather.phase.value
    for n in a.order:
        key = node_key(n)
        if key in a.source_weights or key in a.constant:
            continue
        for weight in {w for name in input_names(n) for w in a.source_weights.get(name, ())}:
            phase = "backward" if key in a.backward and n.op_type != "YieldOp" else "forward"
            assert seen.pop((weight, key)) == phase
    assert seen == {}


def test_random_graphs_keep_every_rule_and_compute_the_same():
    for seed in range(GRAPHS):
        for merge in (0, 100, 10**6):
            print(f"graph {seed}, merge_elements {merge}")  # the last line names the case that failed
            assert_every_rule_is_kept(seed, merge)


def assert_every_rule_is_kept(seed: int, merge: int) -> None:
    model, weights = random_training_graph(seed)
    before = model.SerializeToString(deterministic=True)
    p = assert_same_results(model, weights, training=True, seed=seed, merge_elements=merge)
    assert_readers_are_covered_once(model, p)
    first, _ = insert_collectives(model, p, executor=0, training=True)
    again, same_weights = random_training_graph(seed)
    same = plan_collectives(again, same_weights, training=True, merge_elements=merge)
    second, _ = insert_collectives(again, same, executor=0, training=True)
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert model.SerializeToString(deterministic=True) == before
    names = [n.name for n in first.graph.node if n.name]
    assert len(names) == len(set(names))
    reduced = {g for _, e in p.reduces() for g in e.gradients}
    outputs = {o.name for o in model.graph.output}
    assert reduced == {f"{w}_grad" for w, info in weights.items() if info.trainable} & outputs


def test_merged_events_hold_no_more_elements_than_allowed():
    fewer = 0
    for seed in range(GRAPHS):
        model, weights = random_training_graph(seed)
        apart = plan_collectives(model, weights, training=True)
        merged = plan_collectives(model, weights, training=True, merge_elements=100)
        fewer += len(merged.events) < len(apart.events)
        largest = max((sum(weights[w].numel for w in e.weights) for e in apart.events), default=0)
        for event in merged.events:
            assert sum(weights[w].numel for w in event.weights) <= max(100, largest), seed
    assert fewer > 10


def test_random_graphs_are_worth_their_name():
    """The generator makes what the property test is for: far reuse, shared gathers, weight-only chains, frozen ones."""
    found = dict.fromkeys(("far", "shared", "chain", "frozen", "yielded weight", "shape", "backward"), 0)
    for seed in range(GRAPHS):
        model, weights = random_training_graph(seed)
        p = plan_collectives(model, weights, training=True)
        phases = [(w, g.phase) for _, g in p.gathers() for w in g.weights]
        found["far"] += len(phases) != len(set(phases))
        found["shared"] += any(len(g.weights) > 1 for _, g in p.gathers())
        found["backward"] += any(phase.value == "backward" for _, phase in phases)
        a = analyse(model.graph, p.weights)
        found["chain"] += len(a.source_weights) > len(p.weights)
        found["frozen"] += any(not w.trainable for w in weights.values())
        yielded = next(n for n in model.graph.node if n.op_type == "YieldOp")
        found["yielded weight"] += any(name in a.source_weights for name in yielded.input)
        found["shape"] += any(n.op_type == "Shape" for n in model.graph.node)
        assert all(isinstance(e, (Gather, Reduce)) for e in p.events)
    assert min(found.values()) >= 3, found
