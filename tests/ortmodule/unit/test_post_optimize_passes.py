"""What ORT fused for CUDA alone, and results without names."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ort_zero.ortmodule.onnx_edit.node_edits import remove_unread_initializers
from ort_zero.ortmodule.runtime.export.post_optimize_passes import name_all_results, unfuse_for_cpu

MICROSOFT = "com.microsoft"


def info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])


def model(nodes, inputs, outputs, kind=TensorProto.FLOAT) -> onnx.ModelProto:
    def infos(names):
        return [helper.make_tensor_value_info(name, kind, [2]) for name in names]

    graph = helper.make_graph(nodes, "graph", infos(inputs), infos(outputs))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)])


def run(built: onnx.ModelProto, **feeds):
    onnx.checker.check_model(built)
    return ReferenceEvaluator(built).run(None, {name: np.array(v, np.float32) for name, v in feeds.items()})


def test_initializers_that_nothing_reads(capfd):
    """ONNX Runtime warns of each of them; one that a branch reads, and one that is a result, stay."""
    then = helper.make_graph([helper.make_node("Add", ["a", "of_branch"], ["sum"])], "then", [], [info("sum")])
    other = helper.make_graph([helper.make_node("Identity", ["a"], ["same"])], "other", [], [info("same")])
    nodes = [
        helper.make_node("ReduceMax", ["a"], ["max"], keepdims=0),
        helper.make_node("Cast", ["max"], ["any"], to=TensorProto.BOOL),
        helper.make_node("If", ["any"], ["y"], then_branch=then, else_branch=other),
    ]
    built = model(nodes, "a", ["y", "returned"])
    built.ir_version = 9
    for name in ("unread", "of_branch", "returned", "unread_too"):
        built.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), name))

    def warnings() -> str:
        session = onnxruntime.InferenceSession(built.SerializeToString(), providers=["CPUExecutionProvider"])
        assert [list(one) for one in session.run(None, {"a": np.ones(2, np.float32)})] == [[2, 2], [1, 1]]
        return capfd.readouterr().err

    assert "unread" in warnings()
    assert remove_unread_initializers(built.graph) == 2
    assert warnings() == ""


def test_a_scaled_sum_of_three():
    scales = {"scale_0": 0.5, "scale_1": 2.0, "scale_2": 1.0}
    built = model([helper.make_node("ScaledSum", ["a", "b", "c"], ["y"], domain=MICROSOFT, **scales)], "abc", "y")
    assert unfuse_for_cpu(built) == 1
    assert not any(node.domain for node in built.graph.node)
    (y,) = run(built, a=[2, 4], b=[1, 1], c=[10, 20])
    np.testing.assert_allclose(y, [13, 24])


def test_a_batch_scale_and_a_result_that_nothing_needs():
    scales = {"scale_0": 0.5, "scale_1": 2.0, "scale_2": 3.0}
    built = model([helper.make_node("BatchScale", ["a"], ["x", "", "z"], domain=MICROSOFT, **scales)], "a", "xz")
    assert unfuse_for_cpu(built) == 1
    x, z = run(built, a=[2, 4])
    np.testing.assert_allclose(x, [1, 2])
    np.testing.assert_allclose(z, [6, 12])


def is_all_finite(flags, x, y=(1, 1)) -> bool:
    nodes = [helper.make_node("IsAllFinite", ["a", "b"], ["y"], domain=MICROSOFT, **flags)]
    built = model(nodes, "ab", "")
    built.graph.output.append(helper.make_tensor_value_info("y", TensorProto.BOOL, []))
    assert unfuse_for_cpu(built) == 1
    return bool(run(built, a=x, b=y)[0])


def test_whether_all_are_finite():
    inf, nan = float("inf"), float("nan")
    assert is_all_finite({}, [1, 2])
    assert not is_all_finite({}, [1, nan])
    assert not is_all_finite({}, [1, 2], [-inf, 1])
    assert is_all_finite({"isinf_only": 1}, [nan, 2])
    assert not is_all_finite({"isinf_only": 1}, [nan, inf])
    assert is_all_finite({"isnan_only": 1}, [inf, 2])
    assert not is_all_finite({"isnan_only": 1}, [1, 2], [nan, 1])


def test_results_of_aten_nodes_that_nothing_reads_have_names():
    nodes = [
        helper.make_node("ATen", ["a"], ["", "y", ""], domain="org.pytorch.aten"),
        helper.make_node("Add", ["a", "y"], [""]),
    ]
    built = model(nodes, "a", "y")
    assert name_all_results(built) == 2
    first, _, last = built.graph.node[0].output
    types = {info.name: info.type.tensor_type.elem_type for info in built.graph.value_info}
    assert types == {first: TensorProto.FLOAT, last: TensorProto.FLOAT} and len(types) == 2
    assert built.graph.node[1].output[0] == ""


def test_several_have_names_of_their_own():
    scales = {"scale_0": 0.5, "scale_1": 2.0}
    nodes = [
        helper.make_node("ScaledSum", ["a", "b"], ["s"], domain=MICROSOFT, **scales),
        helper.make_node("ScaledSum", ["s", "b"], ["y"], domain=MICROSOFT, **scales),
    ]
    built = model(nodes, "ab", "y")
    assert unfuse_for_cpu(built) == 2
    names = [node.name for node in built.graph.node]
    assert len(set(names)) == len(names)
    np.testing.assert_allclose(run(built, a=[2, 4], b=[1, 1])[0], [3.5, 4])


def test_other_nodes_stay():
    built = model([helper.make_node("Add", ["a", "b"], ["y"], name="add")], "ab", "y")
    before = built.SerializeToString()
    assert unfuse_for_cpu(built) == 0
    assert built.SerializeToString() == before
