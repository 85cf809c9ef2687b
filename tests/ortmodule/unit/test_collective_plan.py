"""The plan of gathers and reduces on hand-made graphs: where, in which order, for which readers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_zero.errors import GraphEditError
from ort_zero.ortmodule.onnx_edit.topology import topological_order
from ort_zero.ortmodule.runtime.zero3.collective_plan import (
    MAX_LEVEL_DISTANCE,
    CollectivePlan,
    Gather,
    Phase,
    Reduce,
    Weight,
    plan_collectives,
)
from ort_zero.ortmodule.runtime.zero3.graph_analysis import analyse
from ort_zero.ortmodule.runtime.zero3.insert_collectives import insert_collectives

SIZE = 4
FLOAT = TensorProto.FLOAT
F, B = Phase.FORWARD, Phase.BACKWARD


def node(op: str, inputs: str, outputs: str, **attributes) -> onnx.NodeProto:
    """Return a node named after its first output; values are separated by blanks."""
    domain = "com.microsoft" if op in ("YieldOp", "ReluGrad", "PythonOp") else ""
    outs = outputs.split()
    if op == "YieldOp":
        attributes = {"full_shape_outputs": [0], **attributes}
    return helper.make_node(op, inputs.split(), outs, f"n_{outs[0]}", domain=domain, **attributes)


def value(name: str, shape=(SIZE, SIZE), elem_type: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem_type, shape)


def model_of(nodes, inputs, outputs, *, initializers=(), infos=()) -> onnx.ModelProto:
    """Return a model of `nodes`; inputs and outputs are names (then 4 by 4 floats) or value infos."""

    def infos_of(items):
        return [value(i) if isinstance(i, str) else i for i in items]

    graph = helper.make_graph(
        list(nodes), "graph", infos_of(inputs), infos_of(outputs), list(initializers), value_info=infos_of(infos)
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def weights_of(*names: str, shape=(SIZE, SIZE), frozen=()) -> dict[str, Weight]:
    return {n: Weight(name=n, shape=shape, elem_type=FLOAT, trainable=n not in frozen) for n in names}


MLP_WEIGHTS = {
    **weights_of("a.weight", "b.weight"),
    **weights_of("a.bias", "b.bias", shape=(SIZE,)),
}


def mlp() -> onnx.ModelProto:
    """Return linear, relu, linear with its gradients, as ORT builds them."""
    nodes = [
        node("Transpose", "a.weight", "a_t"),
        node("MatMul", "x a_t", "a_mm"),  # level 2
        node("Add", "a_mm a.bias", "a_out"),
        node("Relu", "a_out", "r"),  # level 4
        node("Transpose", "b.weight", "b_t"),
        node("MatMul", "r b_t", "b_mm"),
        node("Add", "b_mm b.bias", "out"),  # level 6
        node("YieldOp", "out", "out_grad"),  # level 7
        node("ReduceSum", "out_grad", "b.bias_grad"),  # level 8
        node("Transpose", "out_grad", "out_grad_t"),
        node("MatMul", "out_grad_t r", "b.weight_grad"),  # level 9
        node("MatMul", "out_grad b.weight", "r_grad"),
        node("ReluGrad", "r_grad r", "a_out_grad"),  # level 9
        node("ReduceSum", "a_out_grad", "a.bias_grad"),  # level 10
        node("Transpose", "a_out_grad", "a_out_grad_t"),
        node("MatMul", "a_out_grad_t x", "a.weight_grad"),  # level 11
        node("MatMul", "a_out_grad a.weight", "x_grad"),
    ]
    bias = [value(n, (SIZE,)) for n in ("a.bias", "b.bias")]
    bias_grads = [value(f"{v.name}_grad", (SIZE,)) for v in bias]
    inputs = ["x", "a.weight", bias[0], "b.weight", bias[1]]
    outputs = ["x_grad", "a.weight_grad", bias_grads[0], "b.weight_grad", bias_grads[1]]
    return model_of(nodes, inputs, outputs)


def chain_model(length: int, uses: dict[int, str]) -> onnx.ModelProto:
    """Return a forward graph of Relus h1, h2, ... in which node `i` of `uses` adds that weight instead."""
    nodes = []
    for i in range(1, length + 1):
        before = f"h{i - 1}" if i > 1 else "x"
        nodes.append(node("Add", f"{before} {uses[i]}", f"h{i}") if i in uses else node("Relu", before, f"h{i}"))
    return model_of(nodes, ["x", *sorted(set(uses.values()))], [f"h{length}"])


def gather_tuples(p: CollectivePlan, phase: Phase | None = None) -> list[tuple]:
    return [(g.phase, g.weights, g.anchor, g.readers) for _, g in p.gathers(phase)]


def test_linear_relu_linear_gathers_once_per_phase_and_reduces_each_gradient_where_it_exists():
    p = plan_collectives(mlp(), MLP_WEIGHTS, training=True)
    assert p.events == (
        Gather(phase=F, weights=("a.weight", "a.bias"), anchor="x", readers=(("a_mm",), ("a_out",))),
        Gather(phase=F, weights=("b.weight", "b.bias"), anchor="r", readers=(("b_mm",), ("out",))),
        Gather(phase=B, weights=("b.weight",), anchor="out_grad", readers=(("r_grad",),)),
        Reduce(phase=B, weights=("b.bias",), gradients=("b.bias_grad",)),
        Gather(phase=B, weights=("a.weight",), anchor="a_out_grad", readers=(("x_grad",),)),
        Reduce(phase=B, weights=("b.weight",), gradients=("b.weight_grad",)),
        Reduce(phase=B, weights=("a.bias",), gradients=("a.bias_grad",)),
        Reduce(phase=B, weights=("a.weight",), gradients=("a.weight_grad",)),
    )
    assert [i for i, _ in p.gathers(F)] == [0, 1]
    assert [i for i, _ in p.gathers(B)] == [2, 4]
    assert [i for i, _ in p.gathers()] == [0, 1, 2, 4]
    assert [i for i, _ in p.reduces()] == [3, 5, 6, 7]


def test_gradients_of_one_level_are_reduced_together_in_the_order_of_names():
    nodes = [
        node("Add", "x z", "h"),
        node("Add", "h a", "out"),
        node("YieldOp", "out", "g"),
        node("Identity", "g", "z_grad"),
        node("Identity", "g", "a_grad"),
    ]
    model = model_of(nodes, ["x", "z", "a"], ["z_grad", "a_grad"])
    (_, only), = plan_collectives(model, weights_of("z", "a"), training=True).reduces()  # fmt: skip
    assert only == Reduce(phase=B, weights=("a", "z"), gradients=("a_grad", "z_grad"))


def test_weights_that_the_graph_has_not_are_ignored():
    p = plan_collectives(mlp(), {**MLP_WEIGHTS, **weights_of("elsewhere")}, training=True)
    assert set(p.weights) == set(MLP_WEIGHTS)
    assert p == plan_collectives(mlp(), MLP_WEIGHTS, training=True)


def test_without_training_nothing_is_reduced():
    p = plan_collectives(chain_model(3, {2: "w"}), weights_of("w"), training=False)
    assert p.reduces() == []
    assert gather_tuples(p) == [(F, ("w",), "h1", (("h2",),))]


def test_reduces_alone_leave_the_weights_where_they_are():
    p = plan_collectives(mlp(), MLP_WEIGHTS, training=True, gather=False)
    assert p.gathers() == []
    assert [r.weights for _, r in p.reduces()] == [("b.bias",), ("a.bias",), ("b.weight",), ("a.weight",)]


def test_reduces_alone_come_in_one_order_whatever_the_graph():
    other = mlp()  # here the last layer's weight gets its gradient last
    for made in other.graph.node:
        if made.output[0] == "b.weight_grad":
            made.CopyFrom(node("MatMul", "late r", "b.weight_grad"))
    other.graph.node.append(node("Add", "out_grad_t x_grad", "late"))
    plans = [plan_collectives(model, MLP_WEIGHTS, training=True, gather=False) for model in (mlp(), other)]
    assert [e.weights for e in plans[0].events] == [e.weights for e in plans[1].events]
    assert plans[0].digest() == plans[1].digest()
    apart = [plan_collectives(model, MLP_WEIGHTS, training=True) for model in (mlp(), other)]
    assert apart[0].digest() != apart[1].digest()


def test_small_reduces_alone_share_a_node():
    p = plan_collectives(mlp(), MLP_WEIGHTS, training=True, gather=False, merge_elements=SIZE * SIZE)
    assert [r.weights for _, r in p.reduces()] == [("b.bias", "a.bias"), ("b.weight",), ("a.weight",)]


@pytest.mark.parametrize("gather", [True, False])
def test_reduces_share_a_node_until_it_is_full(gather):
    names = list("abcdefg")
    nodes = [node("Sum", f"x {' '.join(names)}", "out"), node("YieldOp", "out", "g0")]
    for i, name in enumerate(names):  # one level deeper each
        nodes += [node("Identity", f"g{i}", f"{name}_grad"), node("Relu", f"g{i}", f"g{i + 1}")]
    model = model_of(nodes, ["x", *names], [f"{name}_grad" for name in names])
    p = plan_collectives(model, weights_of(*names), training=True, gather=gather, merge_elements=3 * SIZE * SIZE)
    expected = [tuple("abc"), tuple("def"), ("g",)] if gather else [tuple("gfe"), tuple("dcb"), ("a",)]
    assert [r.weights for _, r in p.reduces()] == expected
    assert [r.gradients for _, r in p.reduces()] == [tuple(f"{name}_grad" for name in part) for part in expected]


def _own(*nodes) -> frozenset[str]:
    """Return which gradients of u and w share their memory with nothing, in a graph whose backward is `nodes`."""
    model = model_of([node("Relu", "x", "out"), node("YieldOp", "out", "g"), *nodes], "xuw", ["u_grad", "w_grad"])
    return plan_collectives(model, weights_of("u", "w"), training=True, gather=False).own_memory


def test_gradients_that_share_their_memory_are_known():
    apart = node("Transpose", "g", "t"), node("MatMul", "t x", "u_grad")
    assert _own(*apart, node("ReduceSum", "g", "w_grad")) == {"u_grad", "w_grad"}
    # a name for another value, and a kernel that writes into its input's memory
    assert _own(*apart, node("Identity", "g", "w_grad")) == {"u_grad"}
    assert _own(*apart, node("Add", "g t", "w_grad")) == {"u_grad"}
    # read by somebody else
    assert _own(*apart, node("MatMul", "u_grad x", "w_grad")) == {"w_grad"}
    # one value once ORT has found equal expressions, at any depth
    assert _own(*apart, node("MatMul", "t x", "w_grad")) == frozenset()
    assert _own(*apart, node("Transpose", "g", "t2"), node("MatMul", "t2 x", "w_grad")) == frozenset()
    assert _own(*apart, node("MatMul", "g x", "w_grad")) == {"u_grad", "w_grad"}
    backward = node("ATen", "g x", "w_grad", operator="embedding_backward")
    assert _own(*apart, backward) == {"u_grad", "w_grad"}
    assert _own(*apart, node("ATen", "g x", "w_grad", operator="view")) == {"u_grad"}


def test_of_a_transposed_gradient_only_that_of_a_product_is_sure_to_have_its_own_memory():
    product = node("MatMul", "g x", "p")
    assert _own(product, node("Transpose", "p", "u_grad"), node("Gemm", "g g", "w_grad")) == {"u_grad", "w_grad"}
    # somebody else reads the product, or it is a result
    assert _own(product, node("Transpose", "p", "u_grad"), node("Add", "p g", "w_grad")) == frozenset()
    # ORT may cancel it against another one, and leave what is in the memory of something else
    twice = node("Transpose", "g", "t"), node("Transpose", "t", "u_grad")
    assert _own(*twice, node("ReduceSum", "g", "w_grad")) == {"w_grad"}


@pytest.mark.parametrize(("distance", "gathers"), [(1, 1), (MAX_LEVEL_DISTANCE, 1), (MAX_LEVEL_DISTANCE + 1, 2)])
def test_a_far_use_of_a_weight_gathers_again_and_a_near_one_does_not(distance, gathers):
    model = chain_model(distance + 4, {2: "tied.weight", 2 + distance: "tied.weight"})
    p = plan_collectives(model, weights_of("tied.weight"), training=False)
    if gathers == 1:
        expected = [(F, ("tied.weight",), "h1", (("h2", f"h{2 + distance}"),))]
    else:
        expected = [
            (F, ("tied.weight",), "h1", (("h2",),)),
            (F, ("tied.weight",), f"h{1 + distance}", ((f"h{2 + distance}",),)),
        ]
    assert gather_tuples(p) == expected


def embeddings(second: str) -> onnx.ModelProto:
    """Return the sum of what is looked up in two tables, the second one by `second`."""
    indices = [value("i", (2,), TensorProto.INT64), value("j", (2,), TensorProto.INT64)]
    nodes = [
        node("Gather", "words.weight i", "a"),
        node("Gather", f"places.weight {second}", "b"),
        node("Add", "a b", "out"),
    ]
    tables = [value("words.weight", (8, SIZE)), value("places.weight")]
    return model_of(nodes, [*indices, *tables], [value("out", (2, SIZE))], infos=[value("b", (2, SIZE))])


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_gather_that_would_exceed_the_largest_weight_waits_for_the_readers_of_the_one_before(one_by_one):
    weights = {**weights_of("words.weight", shape=(8, SIZE)), **weights_of("places.weight")}
    model = embeddings("j")
    plan = plan_collectives(model, weights, training=False, one_by_one=one_by_one)
    first, second = (event for _, event in plan.gathers())
    assert (first.weights, second.weights) == (("places.weight",), ("words.weight",))
    assert first.after == () and second.after == (("b",) if one_by_one else ())
    rewritten, _ = insert_collectives(model, plan, executor=0, training=False)
    _, waiting = [n for n in topological_order(rewritten.graph) if n.op_type == "PythonOp"]
    assert list(waiting.input)[1:] == (["i", "b"] if one_by_one else ["i"])


def test_no_gather_waits_for_what_needs_it():
    nodes = [
        node("MatMul", "x first.weight", "a"),
        node("MatMul", "a second.weight", "b"),
        node("MatMul", "b first.weight", "out"),  # the last reader of the first gather needs the second one
    ]
    model = model_of(nodes, ["x", "first.weight", "second.weight"], ["out"], infos=["a", "b"])
    plan = plan_collectives(model, weights_of("first.weight", "second.weight"), training=False, one_by_one=True)
    assert [event.after for _, event in plan.gathers()] == [(), ("a",)]
    rewritten, _ = insert_collectives(model, plan, executor=0, training=False)
    topological_order(rewritten.graph)


def test_weights_of_one_module_share_a_gather_only_if_near():
    near = plan_collectives(chain_model(20, {2: "m.u", 5: "m.v"}), weights_of("m.u", "m.v"), training=False)
    assert gather_tuples(near) == [(F, ("m.u", "m.v"), "h1", (("h2",), ("h5",)))]
    far = plan_collectives(chain_model(20, {2: "m.u", 15: "m.v"}), weights_of("m.u", "m.v"), training=False)
    assert gather_tuples(far) == [(F, ("m.u",), "h1", (("h2",),)), (F, ("m.v",), "h14", (("h15",),))]
    other = plan_collectives(chain_model(20, {2: "m.u", 5: "n.v"}), weights_of("m.u", "n.v"), training=False)
    assert gather_tuples(other) == [(F, ("m.u",), "h1", (("h2",),)), (F, ("n.v",), "h4", (("h5",),))]


def test_a_tied_weight_is_gathered_at_both_ends_and_reduced_once():
    length = 2 * MAX_LEVEL_DISTANCE
    nodes = [
        node("Gather", "wte ids", "h0"),
        *(node("Relu", f"h{i}", f"h{i + 1}") for i in range(length)),
        node("Transpose", "wte", "wte_t"),
        node("MatMul", f"h{length} wte_t", "logits"),
        node("YieldOp", "logits", "g"),
        node("MatMul", "g wte", "h_grad"),
        node("MatMul", "g h0", "from_head"),
        node("Add", "h_grad from_head", "wte_grad"),
    ]
    model = model_of(nodes, [value("ids", (SIZE,), TensorProto.INT64), "wte"], ["wte_grad"])
    assert plan_collectives(model, weights_of("wte"), training=True).events == (
        Gather(phase=F, weights=("wte",), anchor="ids", readers=(("h0",),)),
        Gather(phase=F, weights=("wte",), anchor=f"h{length}", readers=(("logits",),)),
        Gather(phase=B, weights=("wte",), anchor="g", readers=(("h_grad",),)),
        Reduce(phase=B, weights=("wte",), gradients=("wte_grad",)),
    )


def test_the_anchor_is_the_latest_activation_and_in_the_backward_a_backward_one():
    nodes = [
        node("Relu", "x", "early"),
        node("Relu", "early", "late"),
        node("Sum", "early w late", "out"),
        node("YieldOp", "out", "g"),
        node("Sum", "late w g", "x_grad"),
    ]
    p = plan_collectives(model_of(nodes, ["x", "w"], ["x_grad"]), weights_of("w"), training=True)
    assert [(g.phase, g.anchor) for _, g in p.gathers()] == [(F, "late"), (B, "g")]


def test_an_operator_that_reads_weights_and_constants_only_is_no_reader():
    """A Transpose and a Cast of a weight move with it; the gather serves whoever reads the result."""
    constant = numpy_helper.from_array(np.array(2.0, dtype=np.float32), "two")
    nodes = [
        node("Cast", "w", "w_c", to=FLOAT),
        node("Transpose", "w_c", "w_t"),
        node("Mul", "w_t two", "w_2"),
        node("Relu", "x", "h"),
        node("MatMul", "h w_2", "out"),
    ]
    model = model_of(nodes, ["x", "w"], ["out"], initializers=[constant])
    assert gather_tuples(plan_collectives(model, weights_of("w"), training=False)) == [(F, ("w",), "h", (("out",),))]


def test_a_value_made_of_two_weights_needs_both_at_its_reader():
    nodes = [node("Add", "p.u q.v", "uv"), node("Relu", "x", "h"), node("MatMul", "h uv", "out")]
    p = plan_collectives(model_of(nodes, ["x", "p.u", "q.v"], ["out"]), weights_of("p.u", "q.v"), training=False)
    assert gather_tuples(p) == [(F, ("p.u",), "h", (("out",),)), (F, ("q.v",), "h", (("out",),))]


def test_a_random_operator_on_a_weight_is_a_reader_so_that_both_phases_see_one_mask():
    rate = numpy_helper.from_array(np.array(0.5, dtype=np.float32), "rate")
    on = numpy_helper.from_array(np.array(True), "on")
    nodes = [
        node("Dropout", "w rate on", "w_d mask"),
        node("MatMul", "x w_d", "out"),
        node("YieldOp", "out", "g"),
        node("MatMul", "x g", "w_d_grad"),
        node("Where", "mask w_d_grad w_d_grad", "w_grad"),
        node("MatMul", "g w_d", "x_grad"),
    ]
    model = model_of(nodes, ["x", "w"], ["w_grad", "x_grad"], initializers=[rate, on])
    p = plan_collectives(model, weights_of("w"), training=True)
    assert gather_tuples(p) == [(F, ("w",), None, (("w_d",),))]
    rewritten, _ = insert_collectives(model, p, executor=0, training=True)
    assert sum(n.op_type == "Dropout" for n in rewritten.graph.node) == 1


def test_noise_added_to_a_weight_is_drawn_once():
    nodes = [
        node("Constant", "", "like", value=numpy_helper.from_array(np.zeros((SIZE, SIZE), np.float32))),
        node("RandomNormalLike", "like", "noise"),
        node("Add", "w noise", "noisy"),
        node("MatMul", "x noisy", "out"),
    ]
    p = plan_collectives(model_of(nodes, ["x", "w"], ["out"]), weights_of("w"), training=False)
    assert gather_tuples(p) == [(F, ("w",), "noise", (("noisy",),))]


def test_the_shape_of_a_weight_is_a_constant_and_needs_no_gather():
    nodes = [
        node("Shape", "w", "dims"),
        node("Size", "w", "count"),
        node("Shape", "w", "last", start=-1),
        node("Reshape", "x dims", "h"),
        node("Sum", "h count last", "out"),
    ]
    model = model_of(nodes, ["x", value("w", (3, 5))], ["out"])
    p = plan_collectives(model, weights_of("w", shape=(3, 5)), training=False)
    assert p.events == ()
    assert {"dims", "count", "last"} <= analyse(model.graph, p.weights).constant


def test_shapes_are_folded_to_the_full_shape():
    nodes = [
        node("Shape", "w", "dims"),
        node("Size", "w", "count"),
        node("Shape", "w", "last", start=-1),
        node("Transpose", "w", "w_t"),
        node("Shape", "w_t", "dims_t"),
        node("MatMul", "x w_t", "mm"),
        node("Reshape", "mm dims", "h"),
        node("Sum", "h count last dims_t", "out"),
    ]
    model = model_of(nodes, ["x", value("w", (3, 5))], ["out"], infos=[value("w_t", (5, 3))])
    p = plan_collectives(model, weights_of("w", shape=(3, 5)), training=False)
    rewritten, _ = insert_collectives(model, p, executor=0, training=False)
    folded = {i.name: numpy_helper.to_array(i) for i in rewritten.graph.initializer}
    assert {name: array.tolist() for name, array in folded.items()} == {
        "dims": [3, 5], "count": 15, "last": [5], "dims_t": [5, 3],
    }  # fmt: skip
    assert {array.dtype for array in folded.values()} == {np.dtype(np.int64)}
    assert not any(n.op_type in ("Shape", "Size") for n in rewritten.graph.node)


def test_a_shape_of_something_made_of_weights_without_a_static_type_is_refused():
    nodes = [node("Transpose", "w", "w_t"), node("Shape", "w_t", "dims"), node("Reshape", "x dims", "out")]
    model = model_of(nodes, ["x", "w"], ["out"])
    p = plan_collectives(model, weights_of("w"), training=False)
    with pytest.raises(GraphEditError, match="shape of 'w_t'"):
        insert_collectives(model, p, executor=0, training=False)


def if_node(weight: str, output: str) -> onnx.NodeProto:
    """Return an If whose branches read `weight` and the activation h without naming them as inputs."""
    branches = [
        helper.make_graph([node(op, f"h {weight}", f"{output}_{op}")], op, [], [value(f"{output}_{op}")])
        for op in ("Add", "Sub")
    ]
    return helper.make_node("If", ["flag"], [output], f"n_{output}", then_branch=branches[0], else_branch=branches[1])


def test_weights_captured_by_the_branches_of_an_if_are_gathered_for_it():
    flag = value("flag", (), TensorProto.BOOL)
    model = model_of([node("Relu", "x", "h"), if_node("w", "out")], ["x", flag, "w"], ["out"])
    p = plan_collectives(model, weights_of("w"), training=False)
    assert gather_tuples(p) == [(F, ("w",), "h", (("out",),))]
    rewritten, _ = insert_collectives(model, p, executor=0, training=False)
    branch_inputs = [
        list(inner.input) for n in rewritten.graph.node if n.op_type == "If" for a in n.attribute for inner in a.g.node
    ]
    assert branch_inputs == [["h", "w__gathered_0"], ["h", "w__gathered_0"]]


def test_weights_captured_by_the_body_of_a_loop_are_gathered_unless_a_name_is_bound_inside():
    body = helper.make_graph(
        [node("Add", "carried w", "sum"), node("Identity", "cond", "cond_out"), if_node("v", "deep")],
        "body",
        [value("i", (), TensorProto.INT64), value("cond", (), TensorProto.BOOL), value("carried"), value("flag")],
        [value("cond_out", (), TensorProto.BOOL), value("deep")],
    )
    loop = helper.make_node("Loop", ["", "go", "h"], ["out"], "n_out", body=body)
    go = value("go", (), TensorProto.BOOL)
    nodes = [node("Relu", "x", "h"), loop]
    # the graph has an input named like a value that is bound in the body
    model = model_of(nodes, ["x", go, "w", "v", "carried"], ["out"])
    p = plan_collectives(model, weights_of("w", "v", "carried"), training=False)
    assert gather_tuples(p) == [(F, ("v", "w"), "h", (("out",), ("out",)))]
    rewritten, _ = insert_collectives(model, p, executor=0, training=False)
    inner = next(n for n in rewritten.graph.node if n.op_type == "Loop").attribute[0].g
    assert list(inner.node[0].input) == ["carried", "w__gathered_0"]
    deepest = inner.node[2].attribute[0].g.node[0]
    assert list(deepest.input) == ["h", "v__gathered_0"]


@pytest.mark.parametrize("output", ["w", "w_t"])
def test_a_weight_as_an_output_of_the_graph_is_refused_by_name(output):
    model = model_of([node("Transpose", "w", "w_t"), node("MatMul", "x w_t", "h")], ["x", "w"], ["h", output])
    with pytest.raises(GraphEditError, match="returns w .*under ZeRO-3"):
        plan_collectives(model, weights_of("w"), training=False)
    assert plan_collectives(model, weights_of("w"), training=False, gather=False).events == ()


def test_a_frozen_weight_is_gathered_but_its_gradient_is_not_reduced():
    weights = {**MLP_WEIGHTS, **weights_of("a.weight", frozen=("a.weight",))}
    p = plan_collectives(mlp(), weights, training=True)
    assert [r.weights for _, r in p.reduces()] == [("b.bias",), ("b.weight",), ("a.bias",)]
    assert [g.weights for _, g in p.gathers()] == [
        ("a.weight", "a.bias"), ("b.weight", "b.bias"), ("b.weight",), ("a.weight",),
    ]  # fmt: skip


def test_equal_graphs_have_equal_digests():
    one, other = (plan_collectives(mlp(), MLP_WEIGHTS, training=True) for _ in range(2))
    assert one.digest() == other.digest()


def test_the_digest_tells_the_phase_of_a_gather():
    """The phase decides what is prefetched together: ranks that differ in it would wait for different collectives."""
    weights = weights_of("w")
    digests = [
        CollectivePlan(
            events=(Gather(phase=phase, weights=("w",), anchor=None, readers=((),)),), weights=weights
        ).digest()
        for phase in Phase
    ]
    assert digests[0] != digests[1]


def test_the_digest_tells_another_order_shape_type_or_set_of_gradients():
    weights = weights_of("u", "v")

    def digest(uses, weights=weights):
        return plan_collectives(chain_model(6, uses), weights, training=False).digest()

    base = digest({2: "u", 4: "v"})
    half = {**weights, "u": Weight(name="u", shape=(SIZE, SIZE), elem_type=TensorProto.FLOAT16)}
    other = {
        "order": plan_collectives(chain_model(40, {2: "v", 30: "u"}), weights, training=False).digest(),
        "same uses, far apart": plan_collectives(chain_model(40, {2: "u", 30: "v"}), weights, training=False).digest(),
        "shape": digest({2: "u", 4: "v"}, weights_of("u", "v", shape=(2, 8))),
        "type": digest({2: "u", 4: "v"}, half),
        "fewer": digest({2: "u"}),
    }
    assert base not in other.values()
    assert len(set(other.values())) == len(other)
    trained = plan_collectives(mlp(), MLP_WEIGHTS, training=True).digest()
    frozen = {**MLP_WEIGHTS, **weights_of("a.weight", frozen=("a.weight",))}
    assert plan_collectives(mlp(), frozen, training=True).digest() != trained


def test_the_order_of_the_nodes_in_the_file_does_not_change_the_plan():
    shuffled = mlp()
    nodes = list(reversed(shuffled.graph.node))
    copies = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    shuffled.graph.ClearField("node")
    shuffled.graph.node.extend(copies)
    assert plan_collectives(shuffled, MLP_WEIGHTS, training=True) == plan_collectives(mlp(), MLP_WEIGHTS, training=True)


def test_neither_the_plan_nor_the_rewrite_changes_its_graph():
    model = mlp()
    before = model.SerializeToString(deterministic=True)
    insert_collectives(model, plan_collectives(model, MLP_WEIGHTS, training=True), executor=0, training=True)
    assert model.SerializeToString(deterministic=True) == before


def test_sorting_refuses_a_cycle_and_a_value_that_nothing_makes():
    cyclic = model_of([node("Add", "x b", "a"), node("Relu", "a", "b")], ["x"], ["b"])
    with pytest.raises(GraphEditError, match="cycle through 'n_"):
        topological_order(cyclic.graph)
    dangling = model_of([node("Add", "x nowhere", "a")], ["x"], ["a"])
    with pytest.raises(GraphEditError, match="'n_a' reads 'nowhere', which nothing makes"):
        topological_order(dangling.graph)


def test_a_long_graph_is_sorted_without_recursion():
    length = 5000
    nodes = [node("Relu", f"h{i}" if i else "x", f"h{i + 1}") for i in range(length)]
    model = model_of(reversed(nodes), ["x"], [f"h{length}"])
    assert [n.output[0] for n in topological_order(model.graph)] == [f"h{i + 1}" for i in range(length)]
