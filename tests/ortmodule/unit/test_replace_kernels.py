"""Which nodes the table of kernels takes and which it leaves: types, shapes and attributes decide."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_zero.ortmodule.compat.ortmodule import GraphInfo
from ort_zero.ortmodule.runtime.kernels.replace import replace_kernels
from ort_zero.ortmodule.runtime.kernels.table import TABLE
from ort_zero.ortmodule.runtime.kernels.transposed_products import compute_transposed

ALL = frozenset(entry.name for entry in TABLE)
MS = "com.microsoft"


def info(full=()) -> GraphInfo:
    return GraphInfo(
        user_output_names=["loss", "logits"], output_grad_indices_non_differentiable=[],
        output_grad_indices_require_full_shape=list(full), module_output_indices_requires_save_for_backward=[],
        frontier_node_arg_map={}, cached_node_arg_names=[],
    )  # fmt: skip


def model(nodes, inputs, outputs, constants=()):
    def values(types):
        return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in types.items()]

    graph = helper.make_graph(nodes, "graph", values(inputs), values(outputs), list(constants))
    return helper.make_model(graph)


def operators(graph) -> list[str]:
    return [node.op_type for node in graph.graph.node]


FLOAT, DOUBLE, INT = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
def test_only_float32_is_replaced(kind):
    node = helper.make_node("FastGeluGrad", ["dy", "x"], ["dx"], domain=MS)
    graph = model([node], {"dy": (kind, [2, 3]), "x": (kind, [2, 3])}, {"dx": (kind, [2, 3])})
    _, counts = replace_kernels(graph, info(), ALL)
    assert operators(graph) == (["ATen"] if kind == FLOAT else ["FastGeluGrad"])
    assert counts == ({"gelu_gradient": 1} if kind == FLOAT else {})


@pytest.mark.parametrize(
    ("given", "inputs", "taken"),
    [
        ({"transA": 1}, 2, True),
        ({"transA": 1, "alpha": 1.0}, 2, True),
        ({"transA": 1, "alpha": 0.5}, 2, False),
        ({"transA": 1, "transB": 1}, 2, False),
        ({"transA": 1}, 3, False),
        ({}, 2, False),
    ],
)
def test_products_that_are_gradients_of_weights(given, inputs, taken):
    types = {"a": (FLOAT, [4, 4]), "b": (FLOAT, [4, 4]), "c": (FLOAT, [4])}
    node = helper.make_node("Gemm", list(types)[:inputs], ["out"], **given)
    graph = model([node], types, {"out": (FLOAT, [4, 4])})
    replace_kernels(graph, info(), ALL)
    assert operators(graph) == (["ATen"] if taken else ["Gemm"])


@pytest.mark.parametrize(
    ("form", "taken"), [({}, True), ({"approximate": "none"}, True), ({"approximate": "tanh"}, False)]
)
def test_a_gelu_of_another_form_stays(form, taken):
    graph = model([helper.make_node("Gelu", ["x"], ["y"], **form)], {"x": (FLOAT, [2, 3])}, {"y": (FLOAT, [2, 3])})
    replace_kernels(graph, info(), ALL)
    assert operators(graph) == (["ATen"] if taken else ["Gelu"])


@pytest.mark.parametrize(("given", "inputs", "read", "taken"), [
    ({"transA": 1}, 2, False, True),
    ({"transA": 1, "alpha": 0.5}, 2, False, True),
    ({"transA": 1}, 2, True, False),
    ({"transA": 1}, 3, False, False),
    ({"transA": 1, "transB": 1}, 2, False, False),
    ({}, 2, False, False),
])  # fmt: skip
def test_a_product_of_which_only_the_transpose_is_read_gives_that(given, inputs, read, taken):
    types = {"a": (FLOAT, [4, 4]), "b": (FLOAT, [4, 4]), "c": (FLOAT, [4])}
    product = helper.make_node("Gemm", list(types)[:inputs], ["out"], **given)
    swap = helper.make_node("Transpose", ["out"], ["swapped"], perm=[1, 0])
    results = {"swapped": (FLOAT, [4, 4])} | ({"out": (FLOAT, [4, 4])} if read else {})
    graph = model([product, swap], types, results)
    assert compute_transposed(graph) == taken
    assert operators(graph) == (["Gemm"] if taken else ["Gemm", "Transpose"])
    if taken:
        (node,) = graph.graph.node
        assert (list(node.input), list(node.output)) == (["b", "a"], ["swapped"])
        assert {attribute.name for attribute in node.attribute} == set(given)


def products(nodes, *, x=("rows", 2048), w=(2048, 64), bias=(64,), kind=FLOAT, made=False):
    """Return the graph of products of x with w, or with its transpose, after the kernels have been replaced."""
    inputs = {"x": (kind, list(x)), "w": (kind, list(w)), "bias": (kind, list(bias))}
    results = {name: (kind, None) for name in nodes[-1].output}
    nodes = [*nodes[:-1], helper.make_node("Neg", ["given"], ["bias"]), nodes[-1]] if made else nodes
    if made:
        inputs["given"] = inputs.pop("bias")
    graph = model(nodes, inputs, results)
    replace_kernels(graph, info(), ALL)
    return graph


SWAP = helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0])
ADD = helper.make_node("Add", ["bias", "y"], ["z"])


@pytest.mark.parametrize(("node", "sizes", "taken"), [
    (helper.make_node("MatMul", ["x", "w"], ["y"]), {}, "product"),
    (helper.make_node("Gemm", ["x", "w", "bias"], ["y"]), {}, "product"),
    (helper.make_node("Gemm", ["x", "w", "bias"], ["y"], transB=1), {"w": (64, 2048)}, "linear"),
    (helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain=MS, transB=1), {"w": (64, 2048)}, "linear"),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), {"x": (3, "rows", 2048)}, "product"),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), {"x": (2048,)}, ""),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": (1023, 64)}, ""),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": (2048, 63)}, ""),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": (2048, "n")}, ""),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": (3, 2048, 64)}, ""),
    (helper.make_node("MatMul", ["x", "w"], ["y"]), {"kind": DOUBLE}, ""),
    (helper.make_node("Gemm", ["x", "w", "bias"], ["y"], beta=0.5), {}, ""),
    (helper.make_node("Gemm", ["x", "w", "bias"], ["y"]), {"bias": ("rows", 64)}, ""),
    (helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain=MS, alpha=2.0), {}, ""),
    (helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain=MS, transA=1), {}, ""),
    (helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain=MS, transBatchA=1), {}, ""),
])  # fmt: skip
def test_products_with_a_matrix_whose_sums_are_long(node, sizes, taken):
    (found,) = products([node], **sizes).graph.node
    assert _operator(found) == (f"ort_zero_kernels::{taken}" if taken else node.op_type)


def test_a_long_product_takes_transpose_and_bias_in():
    product = helper.make_node("MatMul", ["x", "t"], ["y"])
    (node,) = products([SWAP, product, ADD], w=(64, 2048)).graph.node
    assert _operator(node) == "ort_zero_kernels::linear"
    assert (list(node.input), list(node.output)) == (["x", "w", "bias"], ["z"])


def test_a_transpose_that_others_read_and_a_bias_that_comes_later_stay():
    product = helper.make_node("MatMul", ["x", "t"], ["y"])
    last = helper.make_node("Mul", ["t", "t"], ["square"])
    assert [_operator(node) for node in products([SWAP, product, last], w=(64, 2048)).graph.node] == [
        "Transpose", "ort_zero_kernels::linear", "Mul"
    ]  # fmt: skip
    assert [_operator(node) for node in products([SWAP, product, ADD], w=(64, 2048), made=True).graph.node] == [
        "ort_zero_kernels::linear", "Neg", "Add"
    ]  # fmt: skip
    # both products read the transpose: the last one leaves it out
    other = helper.make_node("FusedMatMul", ["x2", "t"], ["dx"], domain=MS, transB=1)
    graph = model([SWAP, product, other], {"x": (FLOAT, ["rows", 2048]), "x2": (FLOAT, ["rows", 64]),
                  "w": (FLOAT, [64, 2048])}, {"y": (FLOAT, None), "dx": (FLOAT, None)})  # fmt: skip
    replace_kernels(graph, info(), ALL)
    assert [_operator(node) for node in graph.graph.node] == ["Transpose", "ort_zero_kernels::linear", "FusedMatMul"]
    graph = model([SWAP, product, helper.make_node("MatMul", ["y2", "t"], ["dx"])], {
        "x": (FLOAT, ["rows", 2048]), "y2": (FLOAT, ["rows", 2048]), "w": (FLOAT, [64, 2048])
    }, {"y": (FLOAT, None), "dx": (FLOAT, None)})  # fmt: skip
    replace_kernels(graph, info(), ALL)
    assert [_operator(node) for node in graph.graph.node] == ["ort_zero_kernels::linear"] * 2


def _operator(node) -> str:
    given = {attribute.name: attribute.s.decode() for attribute in node.attribute if attribute.name == "operator"}
    return given.get("operator", node.op_type)


@pytest.mark.parametrize(("axis", "size", "taken"), [(-1, 4, True), (1, 4, True), (0, 4, False), (-1, "n", False)])
def test_layer_norms_over_the_last_dimension_of_known_size(axis, size, taken):
    names = ["dy", "x", "scale", "mean", "deviation"]
    node = helper.make_node("LayerNormalizationGrad", names, ["dx", "ds", "db"], domain=MS, axis=axis)
    types = dict.fromkeys(names, (FLOAT, ["rows", size]))
    types["scale"] = (FLOAT, [size])
    graph = model([node], types, {name: (FLOAT, None) for name in ("dx", "ds", "db")})
    replace_kernels(graph, info(), ALL)
    assert operators(graph) == (["ATen"] if taken else ["LayerNormalizationGrad"])


def loss(*, reduction="mean", weights="", ignore="ignore", reads_log=False, summed=True):
    """Return a graph of a cross entropy, its gradient, and the sum with what the caller gives for the logits."""
    nodes = [
        helper.make_node("SoftmaxCrossEntropyLossInternal", ["logits", "labels", weights, ignore], ["loss", "log"],
                         domain=MS, reduction=reduction),
        helper.make_node("YieldOp", ["loss", "logits"], ["dloss", "given"], domain=MS),
        helper.make_node("SoftmaxCrossEntropyLossInternalGrad", ["dloss", "log", "labels", weights, ignore], ["own"],
                         domain=MS, reduction=reduction),
        helper.make_node("Sum" if summed else "Max", ["own", "given"], ["both"]),
        helper.make_node("Neg", ["both"], ["dlogits"]),
    ]  # fmt: skip
    if reads_log:
        nodes.append(helper.make_node("Neg", ["log"], ["other"]))
    inputs = {"logits": (FLOAT, [5, 7]), "labels": (INT, [5]), "weights": (FLOAT, [7]), "varies": (INT, [])}
    outputs = {"dlogits": (FLOAT, [5, 7])} | ({"other": (FLOAT, [5, 7])} if reads_log else {})
    return model(nodes, inputs, outputs, [numpy_helper.from_array(np.array(-100), "ignore")])


def test_a_cross_entropy_with_its_gradient_and_the_sum_behind_it():
    graph = loss()
    found, counts = replace_kernels(graph, info(full=[0, 1]), ALL)
    assert operators(graph) == ["ATen", "YieldOp", "ATen", "Neg"] and counts == {"cross_entropy": 2}
    assert "given" in graph.graph.node[2].input and found.output_grad_indices_require_full_shape == [0]
    assert all("log" not in (*node.input, *node.output) for node in graph.graph.node)


def test_what_the_caller_gives_stays_where_nothing_is_added_to_it():
    graph, given = loss(summed=False), info(full=[0, 1])
    found, _ = replace_kernels(graph, given, ALL)
    assert operators(graph) == ["ATen", "YieldOp", "ATen", "Max", "Neg"] and found is given


@pytest.mark.parametrize(
    "changes", [{"reduction": "none"}, {"weights": "weights"}, {"ignore": "varies"}, {"reads_log": True}]
)
def test_other_cross_entropies_stay(changes):
    graph = loss(**changes)
    before = operators(graph)
    _, counts = replace_kernels(graph, info(), ALL)
    assert operators(graph) == before and not counts
