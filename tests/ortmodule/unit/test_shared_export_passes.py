"""What an export loses where it serves a graph without dropout, without gradients or with fewer results."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ort_zero.ortmodule.onnx_edit.node_edits import keep_results
from ort_zero.ortmodule.runtime.export.post_export_passes import (
    complete_dropout,
    remove_dropout,
    remove_gradient_stops,
)


def model_of(
    nodes: list[onnx.NodeProto], *, inputs=("x",), outputs=("out",), initializers: tuple[onnx.TensorProto, ...] = ()
) -> onnx.ModelProto:
    ports = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in names] for names in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "graph", *ports, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def number(name: str, value: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, np.float32), name)


def run(model: onnx.ModelProto, **values: list[float]) -> list[list[float]]:
    onnx.checker.check_model(model)
    given = {name: np.array(value, np.float32) for name, value in values.items()}
    return [result.tolist() for result in ReferenceEvaluator(model).run(None, given)]


def test_every_dropout_passes_on_what_it_is_given():
    nodes = [
        helper.make_node("Dropout", ["x", "rate"], ["a"], seed=1),
        helper.make_node("Mul", ["a", "two"], ["b"]),
        helper.make_node("Dropout", ["b", "rate"], ["out"], seed=2),
    ]
    model = model_of(nodes, initializers=(number("rate", 0.5), number("two", 2.0)))
    complete_dropout(model)
    assert remove_dropout(model) == 2
    keep_results(model, [0])
    assert run(model, x=[1, 2, 3, 4]) == [[2, 4, 6, 8]]
    assert {node.op_type for node in model.graph.node} == {"Identity", "Mul"}
    assert [tensor.name for tensor in model.graph.initializer] == ["two"]  # ONNX Runtime warns of all others


def test_only_operators_that_stop_gradients_pass_on():
    def aten(operator: str, source: str, result: str) -> onnx.NodeProto:
        return helper.make_node("ATen", [source], [result], domain="org.pytorch.aten", operator=operator)

    model = model_of([aten("detach_copy", "x", "a"), aten("aten::clone", "a", "out")])
    assert remove_gradient_stops(model) == 1
    assert [(node.op_type, node.domain, list(node.attribute)) for node in model.graph.node][0] == ("Identity", "", [])
    assert model.graph.node[1].op_type == "ATen"


@pytest.mark.parametrize(
    ("kept", "results", "kinds", "inputs"),
    [
        ([0, 1, 2], [[-1, -2], [2, 3], [5, 6]], ["Neg", "Add", "Add"], ["x", "y", "unread"]),
        ([2], [[5, 6]], ["Add"], ["y", "unread"]),
        ([1, 0], [[2, 3], [-1, -2]], ["Neg", "Add"], ["x", "unread"]),
    ],
)
def test_results_are_kept_in_the_order_asked_for_with_what_they_depend_on(kept, results, kinds, inputs):
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Add", ["x", "one"], ["b"]),
        helper.make_node("Add", ["y", "two"], ["c"]),
    ]
    initializers = (number("one", 1), number("two", 2))
    model = model_of(nodes, inputs=("x", "y", "unread"), outputs=("a", "b", "c"), initializers=initializers)
    keep_results(model, kept)
    assert [node.op_type for node in model.graph.node] == kinds
    assert [given.name for given in model.graph.input] == inputs
    values = {"x": [1, 2], "y": [3, 4], "unread": [0, 0]}
    assert run(model, **{name: values[name] for name in inputs}) == results


def test_what_a_branch_reads_from_outside_is_kept():
    def branch(name: str, source: str) -> onnx.GraphProto:
        made = helper.make_tensor_value_info(name, TensorProto.FLOAT, [4])
        return helper.make_graph([helper.make_node("Identity", [source], [name])], name, [], [made])

    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["out"], then_branch=branch("one", "a"), else_branch=branch("other", "x")),
        helper.make_node("Exp", ["x"], ["more"]),
    ]
    model = model_of(nodes, outputs=("out", "more"))
    keep_results(model, [0])
    assert [node.op_type for node in model.graph.node] == ["Neg", "Constant", "If"]
    assert run(model, x=[1, 2, 3, 4]) == [[-1, -2, -3, -4]]
