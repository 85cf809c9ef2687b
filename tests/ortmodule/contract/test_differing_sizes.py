"""Which sizes shape inference may take for equal."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper
from onnxruntime.tools.symbolic_shape_infer import sympy

from ort_zero.ortmodule.compat.broadcast_operators import BROADCAST
from ort_zero.ortmodule.compat.differing_sizes import DifferingSizes
from ort_zero.ortmodule.compat.shape_inference import infer_shapes


@pytest.fixture
def inference():
    found = DifferingSizes(2**31 - 1, True, True, 0)
    found.input_symbols = frozenset(("n", "m"))
    n, m, new = (sympy.Symbol(name, integer=True, positive=True) for name in ("n", "m", "new"))
    formulas = [sympy.Min(512, n), sympy.Min(4, n) - 3, n // 2, (n + 1) // 2, n - 1, n + 0 * m, n + m, 12 // (n - 1)]
    found.symbolic_dims_ = {"n": n, "m": m, "new": new, **{str(formula): formula for formula in formulas}}
    return found


@pytest.mark.parametrize(
    ("a", "b", "differ"),
    [
        ("n", "m", False),  # guarded
        ("n", 5, False),
        ("n", 1, False),
        (None, 1, False),
        (1, None, False),
        (None, None, True),
        ("n", None, True),
        ("n", "new", True),
        ("new", "new", False),
        ("n", "Min(512, n)", False),
        ("n", "Min(4, n) - 3", True),
        ("n", "n - 1", True),  # 2 and 1
        ("floor(n/2)", "floor(n/2 + 1/2)", True),  # of 3: 1 and 2
        ("n", "m + n", True),  # 1 and more
        ("n - 1", "floor(12/(n - 1))", True),  # no size where n is 1
        (7, "n - 1", True),
        (7, "unheard of", True),
    ],
)
def test_sizes_of_which_one_may_be_1_where_the_other_is_not_may_differ(inference, a, b, differ):
    assert inference.may_differ(a, b) is inference.may_differ(b, a) is differ


def test_nodes_that_compute_the_same_have_results_of_the_same_size():
    def value(name, kind, *sizes):
        return helper.make_tensor_value_info(name, kind, sizes)

    nodes = [
        *(helper.make_node("NonZero", ["x"], [f"places_{i}"]) for i in range(2)),
        helper.make_node("NonZero", ["y"], ["places_2"]),
        helper.make_node("Add", ["places_0", "places_1"], ["alike"]),
        helper.make_node("Add", ["alike", "places_2"], ["result"]),
        helper.make_node("MaxPool", ["z"], ["pooled"], kernel_shape=[2]),
        helper.make_node("MaxPool", ["z"], ["pooled_again", "where"], kernel_shape=[2]),
    ]
    given = [value("x", TensorProto.FLOAT, "n", 3), value("y", TensorProto.FLOAT, "n", 3)]
    given.append(value("z", TensorProto.FLOAT, 1, 3, "m"))
    graph = helper.make_graph(nodes, "graph", given, [value("result", TensorProto.INT64, None, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    inferred, _ = infer_shapes(model, lambda *about: None, {"n": 4, "m": 6})
    read = {node.output[0]: list(node.input) for node in inferred.graph.node}
    operators = [a.s.decode() for node in inferred.graph.node for a in node.attribute if a.name == "operator"]
    assert read["alike"] == ["places_0", "places_1"] and operators == [BROADCAST] * 2


def test_values_behind_sizes_that_stay_unlike_have_types_too():
    def value(name, *sizes):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)

    numbers = [helper.make_tensor(f"number_{n}", TensorProto.INT64, [1], [n]) for n in (0, 1)]
    nodes = [
        helper.make_node("Shape", ["ids"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "number_1"], ["length"]),
        helper.make_node("Transpose", ["ids"], ["turned"]),
        helper.make_node("MatMul", ["turned", "ids"], ["scores"]),
        helper.make_node("Slice", ["mask", "number_0", "length", "number_1"], ["cut"]),
        helper.make_node("ReduceMax", ["cut"], ["row"], axes=[0]),
        helper.make_node("Add", ["scores", "row"], ["masked"]),
        # upstream's inference finds the same again, and takes it for nothing new
        helper.make_node("Slice", ["mask", "number_0", "length", "number_1"], ["cut_again"]),
        helper.make_node("ReduceMin", ["cut_again"], ["row_again"], axes=[0]),
        helper.make_node("Add", ["scores", "row_again"], ["again"]),
        helper.make_node("Mul", ["masked", "again"], ["product"]),
        helper.make_node("Relu", ["product"], ["relu"]),
        helper.make_node("ATen", ["relu"], ["result"], domain="org.pytorch.aten", operator="unheard_of"),
    ]
    given = [value("mask", "m0", "m1"), value("ids", "i0", "i1")]
    graph = helper.make_graph(nodes, "graph", given, [value("result", None, None)], initializer=numbers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("org.pytorch.aten", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    inferred, _ = infer_shapes(model, lambda *about: None, {"m0": 2, "m1": 8, "i0": 2, "i1": 8})
    kinds = {v.name: v.type.tensor_type for v in (*inferred.graph.value_info, *inferred.graph.output)}
    unknown = [name for name in ("masked", "again", "relu", "result") if not kinds[name].elem_type]
    assert not unknown and [len(kinds[name].shape.dim) for name in ("masked", "again", "relu")] == [2, 2, 2]
