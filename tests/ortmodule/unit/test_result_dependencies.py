"""What a backward from some results of a graph leads to, read from the graph alone."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper

from ort_zero.ortmodule.runtime.fused_loss.rewrite import ReturnedLogits
from ort_zero.ortmodule.runtime.result_dependencies import ResultDependencies, inputs_of_backward


def graph(nodes, inputs="abcx", outputs=()):
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (*inputs, *outputs)}
    return helper.make_graph(nodes, "g", [values[n] for n in inputs], [values[n] for n in outputs])


def two_heads():
    return graph(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"]),
            helper.make_node("ATen", ["h"], ["stopped"], domain="org.pytorch.aten", operator="detach_copy"),
            helper.make_node("MatMul", ["h", "b"], ["one"]),
            helper.make_node("MatMul", ["stopped", "c"], ["two"]),
        ],
        outputs=["one", "two"],
    )


@pytest.mark.parametrize(
    ("gradients", "left_out"),
    [((1, None), {"c"}), ((None, 1), {"a", "b"}), ((1, 1), set()), ((None, None), set("abc"))],
)
def test_what_a_backward_does_not_lead_to(gradients, left_out):
    assert ResultDependencies(two_heads(), ["a", "b", "c"], None).left_out(gradients) == left_out


def test_results_that_are_computed_of_others():
    """The graph that runs returns the head's weight behind its input, and every later result one place further on."""
    known = ResultDependencies(two_heads(), ["a", "b", "c"], ReturnedLogits(index=0, first=1, count=1))
    assert known.left_out((None, 1, None)) == {"c"}
    assert known.left_out((None, None, 1)) == {"a", "b"}


def test_results_without_a_name_and_nodes_in_any_order():
    nodes = [
        helper.make_node("MatMul", ["h", "b"], ["one"]),
        helper.make_node("LayerNormalization", ["x", "a", ""], ["h", "", ""]),
        helper.make_node("LayerNormalization", ["x", "c", ""], ["two", "", ""]),
    ]
    known = ResultDependencies(graph(nodes, outputs=["one", "two"]), ["a", "b", "c"], None)
    assert known.left_out((1, None)) == {"c"}
    assert known.left_out((None, 1)) == {"a", "b"}


def test_what_a_backward_reads():
    """A weight itself, or through a view of it; not its shape, and not what only the forward reads."""
    nodes = [
        helper.make_node("Reshape", ["a", "shape"], ["flat"]),
        helper.make_node("MatMul", ["x", "flat"], ["h"]),
        helper.make_node("Add", ["h", "b"], ["result"]),
        helper.make_node("YieldOp", ["result"], ["result_grad"], domain="com.microsoft"),
        helper.make_node("Shape", ["b"], ["of_b"]),
        helper.make_node("Expand", ["result_grad", "of_b"], ["b_grad"]),
        helper.make_node("MatMul", ["result_grad", "flat"], ["x_grad"]),
        helper.make_node("Mul", ["c", "c"], ["nobody"]),
    ]
    assert inputs_of_backward(graph(nodes, outputs=["b_grad", "x_grad"]), ()) == {"a"}
