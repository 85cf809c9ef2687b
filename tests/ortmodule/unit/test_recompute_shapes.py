"""Shapes that a graph does not declare, and places that only we compute again, on nodes written down by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from ort_zero.ortmodule.compat.ort_kernels import RECOMPUTED
from ort_zero.ortmodule.recompute import peak_check
from ort_zero.ortmodule.recompute.graph_model import GraphModel
from ort_zero.ortmodule.recompute.missing_shapes import shape_of_result, type_of_result
from ort_zero.ortmodule.recompute.own_clusters import own_table, with_own_copies

SHAPES = {"a": (4, 1, 8), "b": (3, 1), "c": ()}


@pytest.mark.parametrize(("operator", "inputs", "attributes", "expected"), [
    ("Where", ["a", "b", "c"], {}, (4, 3, 8)),
    ("Greater", ["a", "c"], {}, (4, 1, 8)),
    ("Transpose", ["a"], {"perm": [2, 0, 1]}, (8, 4, 1)),
    ("Transpose", ["b"], {}, (1, 3)),
    ("Unsqueeze", ["b", "axes"], {}, (1, 3, 1, 1)),
    ("Squeeze", ["a", "one"], {}, (4, 8)),
    ("Cast", ["a"], {"to": TensorProto.INT64}, (4, 1, 8)),
    ("ReduceSum", ["a", "axes"], {}, (1, 1, 1)),
    ("ReduceSum", ["a", "one"], {"keepdims": 0}, (4, 8)),
    ("ReduceMean", ["b"], {"axes": [-1]}, (3, 1)),
    ("ReduceSum", ["b", "unknown"], {}, None),
    ("ReduceSum", ["b"], {}, None),
    ("Where", ["a", "unknown", "c"], {}, None),
    ("Add", ["a", "bad"], {}, None),
    ("Gather", ["a", "b"], {}, None),
])  # fmt: skip
def test_shapes_follow_from_those_of_the_inputs(operator, inputs, attributes, expected):
    node = helper.make_node(operator, inputs, ["made"], **attributes)
    constants = {"axes": np.array([0, -1]), "one": np.array([1])}
    assert shape_of_result(node, {**SHAPES, "bad": (5, 5, 5)}.get, constants) == expected


def test_types_follow_too():
    kinds = {"flag": TensorProto.BOOL, "x": TensorProto.FLOAT}.__getitem__
    for operator, inputs, expected in (("Where", ["flag", "x", "x"], TensorProto.FLOAT), ("Transpose", ["flag"], 9),
                                       ("Greater", ["x", "x"], 9)):  # fmt: skip
        assert type_of_result(helper.make_node(operator, inputs, ["made"]), kinds) == expected


def layers() -> onnx.ModelProto:
    """Return two layers of a product, a mask that both add, and a Softmax whose gradient reads it."""
    nodes, last = [helper.make_node("Where", ["flags", "x", "x"], ["mask"], "mask_node")], "x"
    for i in range(2):
        nodes += [
            helper.make_node("MatMul", [last, "w"], [f"p{i}"], f"p{i}_node"),
            helper.make_node("Add", [f"p{i}", "mask"], [f"s{i}"], f"s{i}_node"),
            helper.make_node("Softmax", [f"s{i}"], [f"y{i}"], f"y{i}_node"),
        ]
        last = f"y{i}"
    nodes.append(helper.make_node("ReduceSum", [last], ["loss"], "loss_node"))
    nodes.append(helper.make_node("YieldOp", ["loss"], ["g"], "yield", domain="com.microsoft"))
    gradient = "g"
    for i in (1, 0):
        made = [f"d{i}"]
        nodes.append(
            helper.make_node("SoftmaxGrad_13", [gradient, f"y{i}"], made, f"d{i}_node", domain="com.microsoft")
        )
        gradient = made[0]

    def info(name: str, kind: int = TensorProto.FLOAT):
        return helper.make_tensor_value_info(name, kind, [64, 64])

    values = [info(name) for node in nodes for name in node.output if name not in ("loss", "d0", "mask")]
    given = [info("x"), info("w"), info("flags", TensorProto.BOOL)]
    return helper.make_model(helper.make_graph(nodes, "g", given, [info("d0")], value_info=values))


def test_a_softmax_is_computed_again_from_what_its_layers_share():
    model = layers()
    assert {row: count for row, (_, count) in own_table(model).items()} == {"MatMul+Add+Softmax+:1:-1": 2}
    changed = with_own_copies(model, ["MatMul+Add+Softmax+:1"])
    copies = {node.output[0]: list(node.input) for node in changed.graph.node if node.name.endswith(RECOMPUTED)}
    assert copies[f"s0{RECOMPUTED}"] == [f"p0{RECOMPUTED}", "mask"]
    # the second product reads the first layer's result, which is computed again itself
    assert copies[f"p1{RECOMPUTED}"] == [f"y0{RECOMPUTED}", "w"] and len(copies) == 6
    late = [node for node in changed.graph.node if node.op_type == "SoftmaxGrad_13"]
    assert [node.input[1] for node in late] == [f"y1{RECOMPUTED}", f"y0{RECOMPUTED}"]
    assert not [node for node in with_own_copies(model, []).graph.node if node.name.endswith(RECOMPUTED)]


def test_a_mask_without_a_declared_shape_has_its_size():
    graph = GraphModel.from_onnx(layers(), {})
    assert graph.sizes[graph.values.index("mask")] == 4 * 64 * 64
    assert "mask" not in graph.unknown


def test_free_memory_goes_back_between_forward_and_backward_where_there_is_a_budget(monkeypatch):
    given = []
    monkeypatch.setattr(peak_check, "give_back", lambda: given.append(1))
    for budget, times in ((1 << 30, 2), (None, 0)):
        given.clear()
        check = peak_check.PeakCheck(SimpleNamespace(budget=budget), "Model", torch.device("cpu"))
        for _ in range(2):  # of every step
            check.after("forward")
            check.after("backward")
        assert len(given) == times
