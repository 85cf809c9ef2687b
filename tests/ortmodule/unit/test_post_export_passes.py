"""The repair of Dropout nodes on hand-made models."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ort_zero.ortmodule.runtime.export.post_export_passes import complete_dropout, remove_casts_to_the_same_type

FLAG = "ort_zero_dropout_on"


def model_of(*nodes: onnx.NodeProto, initializers=(), output: str = "out") -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in ("x", output)]
    graph = helper.make_graph(list(nodes), "graph", ports[:1], ports[1:], list(initializers))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("other", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def rate(value: float = 0.5, name: str = "rate") -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(value, dtype=np.float32), name)


def dropouts(model: onnx.ModelProto) -> list[tuple[list[str], list[str]]]:
    return [(list(n.input), list(n.output)) for n in model.graph.node if n.op_type == "Dropout"]


def test_a_dropout_without_flag_and_mask_gets_both_and_drops():
    model = model_of(helper.make_node("Dropout", ["x", "rate"], ["out"], seed=3), initializers=[rate()])
    x = np.ones(64, np.float32)
    assert np.array_equal(ReferenceEvaluator(model).run(None, {"x": x})[0], x)  # inference: nothing is dropped
    assert complete_dropout(model) == 1
    onnx.checker.check_model(model)
    assert dropouts(model) == [(["x", "rate", FLAG], ["out", "out__mask"])]
    flag = model.graph.node[0]
    assert (flag.op_type, list(flag.output)) == ("Constant", [FLAG])
    assert numpy_helper.to_array(flag.attribute[0].t).tolist() is True
    (result,) = ReferenceEvaluator(model).run(None, {"x": x})
    assert set(result.tolist()) == {0.0, 2.0}


def test_a_missing_rate_stays_the_default():
    model = model_of(helper.make_node("Dropout", ["x"], ["out"]))
    assert complete_dropout(model) == 1
    assert dropouts(model) == [(["x", "", FLAG], ["out", "out__mask"])]
    onnx.checker.check_model(model)


@pytest.mark.parametrize("outputs", [["out"], ["out", ""]])
def test_a_missing_mask_is_added_and_the_flag_left_as_it_was(outputs):
    off = numpy_helper.from_array(np.array(False), "off")
    model = model_of(helper.make_node("Dropout", ["x", "rate", "off"], outputs), initializers=[rate(), off])
    assert complete_dropout(model) == 1
    assert dropouts(model) == [(["x", "rate", "off"], ["out", "out__mask"])]
    assert [n.op_type for n in model.graph.node] == ["Dropout"]  # no flag that nobody reads


def test_an_empty_flag_counts_as_missing():
    model = model_of(helper.make_node("Dropout", ["x", "rate", ""], ["out", "mask"]), initializers=[rate()])
    assert complete_dropout(model) == 1
    assert dropouts(model) == [(["x", "rate", FLAG], ["out", "mask"])]


def test_several_share_one_flag_which_comes_first():
    model = model_of(
        helper.make_node("Relu", ["x"], ["h"]),
        helper.make_node("Dropout", ["h", "rate"], ["a"]),
        helper.make_node("Dropout", ["a", "rate"], ["b"]),
        helper.make_node("Relu", ["b"], ["out"]),
        initializers=[rate()],
    )
    assert complete_dropout(model) == 2
    assert [n.op_type for n in model.graph.node] == ["Constant", "Relu", "Dropout", "Dropout", "Relu"]
    assert dropouts(model) == [(["h", "rate", FLAG], ["a", "a__mask"]), (["a", "rate", FLAG], ["b", "b__mask"])]
    onnx.checker.check_model(model)


def test_a_complete_model_is_not_changed_and_a_second_repair_does_nothing():
    model = model_of(helper.make_node("Dropout", ["x", "rate"], ["out"]), initializers=[rate()])
    complete_dropout(model)
    before = model.SerializeToString(deterministic=True)
    assert complete_dropout(model) == 0
    assert model.SerializeToString(deterministic=True) == before


def test_nodes_of_other_domains_and_operators_are_left_alone():
    foreign = helper.make_node("Dropout", ["x"], ["h"], domain="other")
    model = model_of(foreign, helper.make_node("Relu", ["h"], ["out"]))
    before = model.SerializeToString(deterministic=True)
    assert complete_dropout(model) == 0
    assert model.SerializeToString(deterministic=True) == before


def test_casts_to_the_type_that_a_value_has_are_taken_out():
    def cast(given: str, result: str, to: int) -> onnx.NodeProto:
        return helper.make_node("Cast", [given], [result], to=to)

    model = model_of(
        cast("x", "same", TensorProto.FLOAT),
        helper.make_node("Mul", ["same", "same"], ["square"]),
        cast("square", "unknown", TensorProto.FLOAT),
        cast("unknown", "wide", TensorProto.DOUBLE),
        cast("wide", "out", TensorProto.FLOAT),
    )
    model.graph.value_info.append(helper.make_tensor_value_info("wide", TensorProto.DOUBLE, [64]))
    assert remove_casts_to_the_same_type(model) == 1
    assert [(n.op_type, list(n.input)) for n in model.graph.node] == [
        ("Mul", ["x", "x"]), ("Cast", ["square"]), ("Cast", ["unknown"]), ("Cast", ["wide"])
    ]  # fmt: skip
    onnx.checker.check_model(model)
    assert remove_casts_to_the_same_type(model) == 0
    last = model_of(cast("x", "out", TensorProto.FLOAT))
    assert remove_casts_to_the_same_type(last) == 0  # a result keeps its name
