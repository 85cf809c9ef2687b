"""Checkpointed blocks in graphs of a few nodes: what belongs to a block, what is copied, what is held."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from ort_zero.ortmodule.compat.ort_kernels import RECOMPUTED
from ort_zero.ortmodule.onnx_edit.topology import input_names, node_key, nodes_reached_from
from ort_zero.ortmodule.recompute.block_copies import with_block_copies
from ort_zero.ortmodule.recompute.checkpointed_blocks import MARK, has_marks, take_blocks_out
from ort_zero.ortmodule.runtime.zero3.collective_plan import Phase, Weight, plan_collectives

FLOAT = TensorProto.FLOAT


def node(kind: str, reads: str, makes: str, /, **attributes) -> onnx.NodeProto:
    domain = "com.microsoft" if kind in ("PythonOp", "PythonOpGrad", "YieldOp", "DropoutGrad") else ""
    made = helper.make_node(kind, reads.split(), makes.split(), f"{kind} {makes}", domain=domain)
    # the names of attributes may be those of arguments of make_node
    made.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    return made


def mark(reads: str, makes: str, block: int = 0, *, result: bool = False) -> onnx.NodeProto:
    about = {"func_name": MARK, "input_int_scalars": [block, int(result)]}
    return node("PythonOp", reads, f"{makes}_ctx {makes}", **about)


def back(forward: str, reads: str, makes: str) -> onnx.NodeProto:
    return node("PythonOpGrad", f"{forward}_ctx {reads}", makes, name=MARK)


def graph_of(nodes: list[onnx.NodeProto], inputs: str, outputs: str) -> onnx.ModelProto:
    def values(names: str) -> list:
        return [helper.make_tensor_value_info(name, FLOAT, [4, 4]) for name in names.split()]

    made = " ".join(name for one in nodes for name in one.output)
    graph = helper.make_graph(nodes, "graph", values(inputs), values(outputs), value_info=values(made))
    return helper.make_model(graph)


def block(
    inside: list[onnx.NodeProto], backward: list[onnx.NodeProto], *, more: str = "", outputs: str = "w_grad x_grad"
) -> onnx.ModelProto:
    """Return the graph ``x -> Exp -> block -> Sin -> loss``: the block makes ``r`` of ``a``, its backward ``da`` of
    ``dr``."""
    nodes = [
        node("Exp", "x", "h"),
        mark("h", "a"),
        *inside,
        mark("r", "o", result=True),
        node("Sin", "o", "s"),
        node("YieldOp", f"s {more}", "ds"),
        node("Mul", "ds o", "do"),
        back("o", "do", "dr"),
        *backward,
        back("a", "da", "dh"),
        node("Mul", "dh h", "x_grad"),
    ]
    return graph_of(nodes, "x w", outputs)


PLAIN = (
    [node("MatMul", "a w", "m"), node("Tanh", "m", "t"), node("Neg", "t", "r")],
    [
        node("Neg", "dr", "dt"),
        node("TanhGrad", "dt t", "dm"),
        node("MatMul", "dm w", "da"),
        node("MatMul", "a dm", "w_grad"),
    ],
)


def edited(model: onnx.ModelProto, **options):
    blocks = take_blocks_out(model)
    assert not has_marks(model)
    copies = with_block_copies(model, blocks, **options)
    return blocks, copies.model, copies.nodes


def held(model: onnx.ModelProto) -> set[str]:
    """Return the values of the forward that are read behind it, by what needs the barrier."""
    nodes = list(model.graph.node)
    barrier = next(i for i, one in enumerate(nodes) if one.op_type == "YieldOp")
    made = {name for one in nodes[:barrier] for name in one.output}
    return made & {name for one in nodes[barrier + 1 :] for name in input_names(one)}


def made_by(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(one for one in model.graph.node if name in one.output)


def test_a_block_is_what_lies_between_its_marks():
    (found,), _, copied = edited(block(*PLAIN))
    assert found.nodes == {"m", "t", "r"}
    assert found.arguments == {"h"} and found.gradients == ("do",)
    assert copied == {0: 2}  # nobody reads the copy of what the block returns


def test_only_the_argument_is_held():
    _, model, _ = edited(block(*PLAIN))
    assert held(model) == {"h", "r"}  # `r` is read by what follows the block
    gradient = next(one for one in model.graph.node if one.op_type == "TanhGrad")
    assert list(gradient.input) == ["dt", f"t{RECOMPUTED}"]
    assert list(made_by(model, f"m{RECOMPUTED}").input)[1:] == ["w"]


def test_copies_need_the_gradient_of_the_result():
    _, model, _ = edited(block(*PLAIN))
    nodes = list(model.graph.node)
    needed = {node_key(one) for one in nodes_reached_from(nodes, [f"m{RECOMPUTED}"])}
    assert {"ds", "do"} <= needed
    gate = made_by(model, made_by(model, f"m{RECOMPUTED}").input[0])
    assert gate.op_type == "Reshape" and gate.input[0] == "h"


def test_zero_3_gathers_for_copies_in_the_backward():
    _, model, _ = edited(block(*PLAIN), weights=["w"])
    weight = Weight(name="w", shape=(4, 4), elem_type=FLOAT)
    plan = plan_collectives(model, {"w": weight}, training=True)
    phase = {key: gather.phase for _, gather in plan.gathers() for keys in gather.readers for key in keys}
    assert phase == {"m": Phase.FORWARD, f"m{RECOMPUTED}": Phase.BACKWARD, "da": Phase.BACKWARD}


def test_what_is_made_of_partitioned_weights_alone_is_read_as_it_is():
    inside, backward = PLAIN
    turned = [node("Transpose", "w", "v"), node("MatMul", "a v", "m"), *inside[1:]]
    _, model, _ = edited(block(turned, backward), weights=["w"])
    assert list(made_by(model, f"m{RECOMPUTED}").input)[1] == "v"


def test_dropout_takes_the_mask_that_was_drawn():
    inside = [node("Tanh", "a", "t"), node("Dropout", "t ratio on", "d mask"), node("Sigmoid", "d", "r")]
    backward = [
        node("Mul", "dr d", "dd"),
        node("DropoutGrad", "dd mask ratio on", "da"),
        node("Mul", "dd dd", "w_grad"),
    ]
    model = block(inside, backward)
    model.graph.input.extend(helper.make_tensor_value_info(name, FLOAT, []) for name in ("ratio", "on"))
    _, model, _ = edited(model)
    copy = made_by(model, f"d{RECOMPUTED}")
    assert (copy.op_type, copy.domain) == ("DropoutGrad", "com.microsoft")
    assert copy.input[0] == f"t{RECOMPUTED}" and list(copy.input)[2:] == ["ratio", "on"]
    assert "mask" in held(model) and "d" not in held(model)
    assert [one.op_type for one in model.graph.node].count("Dropout") == 1


@pytest.mark.parametrize(
    "middle",
    [
        node("PythonOp", "t", "ctx p", func_name="users.Function"),
        node("RandomNormalLike", "t", "p"),
        node("BatchNormInternal", "t", "p"),
        node("ATen", "t", "p", operator="bernoulli"),
        node("ATen", "t", "p", operator="impure"),
    ],
)
def test_what_must_not_run_twice_is_held(middle):
    inside = [node("Tanh", "a", "t"), middle, node("Exp", "p", "e"), node("Neg", "e", "r")]
    backward = [node("Mul", "dr e", "de"), node("Mul", "de t", "da"), node("Mul", "dr dr", "w_grad")]
    _, model, _ = edited(block(inside, backward), is_pure=lambda one: False)
    assert [one.op_type for one in model.graph.node].count(middle.op_type) == 1
    assert "p" in held(model) and not {"t", "e"} & held(model)
    gate = made_by(model, made_by(model, f"e{RECOMPUTED}").input[0])
    assert gate.input[0] == "p"


def test_pure_operators_of_pytorch_are_copied():
    inside = [node("Tanh", "a", "t"), node("ATen", "t", "p", operator="diagonal"), node("Neg", "p", "r")]
    backward = [node("Mul", "dr p", "da"), node("Mul", "dr dr", "w_grad")]
    _, model, _ = edited(block(inside, backward), is_pure=lambda one: True)
    assert [one.op_type for one in model.graph.node].count("ATen") == 2 and "p" not in held(model)


def test_what_others_read_is_held():
    """Else the gradient of a loss on something inside of every block would need all blocks at once."""
    inside, backward = PLAIN
    _, model, _ = edited(block(inside, [*backward, node("Mul", "t t", "y_grad")], more="m", outputs="w_grad y_grad"))
    assert "m" in held(model) and "t" not in held(model)
    assert made_by(model, f"t{RECOMPUTED}").input[0] != f"m{RECOMPUTED}"


def test_shapes_are_taken_in_the_forward():
    inside, backward = PLAIN
    _, model, _ = edited(block(inside, [node("Shape", "t", "shape"), *backward, node("Expand", "dm shape", "y_grad")]))
    operators = [one.op_type for one in model.graph.node if not one.name.endswith(RECOMPUTED)]
    assert operators.index("Shape") < operators.index("YieldOp")
    assert made_by(model, "shape").input[0] == "t" and "t" not in held(model)


def test_what_only_seems_to_be_forward_runs_behind_it():
    inside, backward = PLAIN
    early = node("Mul", "t t", "square")
    model = block([*inside, early], [*backward, node("Mul", "square dm", "y_grad")], outputs="w_grad x_grad y_grad")
    _, model, _ = edited(model)
    order = [node_key(one) for one in model.graph.node]
    assert order.index("square") > order.index("ds")
    assert list(made_by(model, "square").input) == [f"t{RECOMPUTED}"] * 2


def test_nodes_that_pass_a_value_on_are_looked_through():
    """Readers of statistics: whole blocks would else be held for them, or one block be computed from the last."""
    inside, backward = PLAIN
    read = node("PythonOp", "m", "seen_ctx seen", func_name="ort_zero.Reader")
    _, model, _ = edited(block([inside[0], read, node("Tanh", "seen", "t"), inside[2]], backward), passing=["Reader"])
    assert held(model) == {"h", "r"}
    assert list(made_by(model, f"t{RECOMPUTED}").input) == [f"m{RECOMPUTED}"]
    behind = node("PythonOp", "m", "seen_ctx seen", func_name="ort_zero.Reader")
    model = block(
        [*inside, behind], [*backward, node("Mul", "seen dm", "y_grad")], more="seen", outputs="w_grad y_grad"
    )
    _, model, _ = edited(model, passing=["Reader"])
    assert {"m", "seen"} & held(model) and "t" not in held(model)
    assert f"m{RECOMPUTED}" not in {name for one in model.graph.node for name in one.output}


def test_a_mark_on_what_the_block_has_made_itself_changes_nothing():
    inside, backward = PLAIN
    _, plain, _ = edited(block(inside, backward))
    marked = [*inside[:1], mark("m", "n"), node("Tanh", "n", "t"), inside[2]]
    (found,), model, _ = edited(block(marked, backward))
    assert found.nodes == {"m", "t", "r"} and held(model) == held(plain)


def test_a_block_without_a_gradient_stays_as_it_is():
    nodes = [node("Exp", "x", "h"), mark("h", "a"), *PLAIN[0], mark("r", "o", result=True), node("YieldOp", "o", "do"),
             node("Mul", "do t", "w_grad")]  # fmt: skip
    (found,), model, copied = edited(graph_of(nodes, "x w", "w_grad"))
    assert found.gradients == () and not copied
    assert not any(one.name.endswith(RECOMPUTED) for one in model.graph.node)


def test_an_output_of_the_graph_keeps_its_name():
    nodes = [mark("x", "a"), *PLAIN[0], mark("r", "o", result=True), node("YieldOp", "o", "do"), back("o", "do", "dr"),
             *PLAIN[1], back("a", "da", "x_grad")]  # fmt: skip
    _, model, _ = edited(graph_of(nodes, "x w", "w_grad x_grad"))
    last = made_by(model, "x_grad")
    assert (last.op_type, list(last.input)) == ("Identity", ["da"])
    gate = made_by(model, made_by(model, f"m{RECOMPUTED}").input[0])
    assert gate.op_type == "Reshape" and gate.input[0] == "x"  # also where the argument is one of the graph
