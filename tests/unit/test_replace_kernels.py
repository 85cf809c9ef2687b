"""Which nodes the table of kernels takes and which it leaves: types, shapes and attributes decide."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_zero.compat.ortmodule import GraphInfo
from ort_zero.runtime.kernels.replace import replace_kernels
from ort_zero.runtime.kernels.table import TABLE

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


def test_a_product_that_others_read_keeps_its_transpose():
    product = helper.make_node("Gemm", ["a", "b"], ["out"], transA=1)
    swap = helper.make_node("Transpose", ["out"], ["swapped"], perm=[1, 0])
    types = {"a": (FLOAT, [4, 2]), "b": (FLOAT, [4, 3])}
    graph = model([product, swap], types, {"out": (FLOAT, [2, 3]), "swapped": (FLOAT, [3, 2])})
    replace_kernels(graph, info(), ALL)
    assert operators(graph) == ["ATen", "Transpose"]
    graph = model([product, swap], types, {"swapped": (FLOAT, [3, 2])})
    replace_kernels(graph, info(), ALL)
    assert operators(graph) == ["ATen"] and list(graph.graph.node[0].input[:2]) == ["b", "a"]


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
