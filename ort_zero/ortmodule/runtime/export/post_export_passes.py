"""Repairs what torch's exporter wrote, before ORT builds gradients from it.

The graph builder runs these passes on each exported model.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ort_zero.ortmodule.compat.torch_onnx import stops_gradient


def complete_dropout(model: onnx.ModelProto) -> int:
    """Give every Dropout node its training flag and its mask, in place; return how many lacked one of them.

    The exporter writes the dropout of ``scaled_dot_product_attention`` with neither (torch 2.13,
    ``symbolic_opset14.scaled_dot_product_attention``): ORT would treat it as inference, where it does nothing, and its
    gradient builder stops at the missing mask. The functional form drops whenever its probability is not 0, so the
    flag is True.
    """
    repaired, needs_flag = 0, False
    flag = "ort_zero_dropout_on"
    for node in model.graph.node:
        if node.op_type != "Dropout" or node.domain:
            continue
        inputs, outputs = list(node.input), list(node.output)
        inputs += [""] * (3 - len(inputs))
        outputs += [""] * (2 - len(outputs))
        if inputs[2] and outputs[1]:
            continue
        needs_flag = needs_flag or not inputs[2]
        inputs[2] = inputs[2] or flag
        outputs[1] = outputs[1] or f"{outputs[0]}__mask"
        node.ClearField("input")
        node.ClearField("output")
        node.input.extend(inputs)
        node.output.extend(outputs)
        repaired += 1
    if needs_flag:
        constant = helper.make_node(
            "Constant", [], [flag], flag, value=numpy_helper.from_array(np.array(True), f"{flag}_value")
        )
        model.graph.node.insert(0, constant)
    return repaired


def remove_dropout(model: onnx.ModelProto) -> int:
    """Let every Dropout node pass on what it is given, in place; return how many there were."""
    return _pass_on(node for node in model.graph.node if node.op_type == "Dropout" and not node.domain)


def remove_gradient_stops(model: onnx.ModelProto) -> int:
    """Let every node that stops a gradient pass on what it is given, in place; return how many there were."""
    return _pass_on(filter(stops_gradient, model.graph.node))


def _pass_on(nodes: Iterable[onnx.NodeProto]) -> int:
    """Make each node an Identity of its first input, in place; return how many there were."""
    changed = list(nodes)
    for node in changed:
        first, result = node.input[0], node.output[0]
        for name in ("domain", "input", "output", "attribute"):
            node.ClearField(name)
        node.op_type = "Identity"
        node.input.append(first)
        node.output.append(result)
    return len(changed)


def remove_casts_to_the_same_type(model: onnx.ModelProto) -> int:
    """Take out the casts to the type that a value has already, in place; return how many there were.

    ``y.float()`` of what is float32 is one. ORT's own pass that takes them out fails where one node reads the result
    twice ("Argument mismatch when removing edge").

    Args:
        model: with the types of its values inferred.
    """
    graph = model.graph
    types = {t.name: t.data_type for t in graph.initializer}
    for value in (*graph.input, *graph.value_info):
        types[value.name] = value.type.tensor_type.elem_type
    results = {value.name for value in graph.output}
    sources: dict[str, str] = {}
    kept = []
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name in sources:
                node.input[i] = sources[name]
        if node.op_type == "Cast" and not node.domain and node.output[0] not in results:
            to = next(a.i for a in node.attribute if a.name == "to")
            if types.get(node.input[0]) == to:
                sources[node.output[0]] = node.input[0]
                continue
        kept.append(node)
    if sources:
        del graph.node[:]
        graph.node.extend(kept)
    return len(sources)


def divide_sums(model: onnx.ModelProto) -> int:
    """Replace each mean over the first axis, or over all, by a sum and a division; return how many there were.

    ORT's mean over nothing, as of ``loss[mask]`` with an empty mask, is 0 and has no gradient; PyTorch's is NaN.

    Args:
        model: with the types of its values inferred.
    """
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    floats = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
    nodes, replaced = [], 0
    for node in model.graph.node:
        source, axes = node.input[0] if node.input else "", _axes_of(node)
        if node.op_type != "ReduceMean" or types.get(source) not in floats or (axes is not None and 0 not in axes):
            nodes.append(node)
            continue
        replaced += 1
        name = f"{node.name or node.output[0]}/ort_zero"
        keep = next((a.i for a in node.attribute if a.name == "keepdims"), 1)
        total, inputs, counted = f"{name}/sum", [source], f"{name}/count"
        if axes is None:
            nodes.append(helper.make_node("Size", [source], [counted], f"{name}/Size"))
        else:
            axes_value = numpy_helper.from_array(np.array(axes, np.int64))
            nodes += [
                helper.make_node("Constant", [], [f"{name}/axes"], f"{name}/Constant", value=axes_value),
                helper.make_node("Shape", [source], [f"{name}/shape"], f"{name}/Shape"),
                helper.make_node("Gather", [f"{name}/shape", f"{name}/axes"], [f"{name}/sizes"], f"{name}/Gather"),
                helper.make_node("ReduceProd", [f"{name}/sizes"], [counted], f"{name}/ReduceProd", keepdims=0),
            ]
            inputs.append(f"{name}/axes")
        nodes += [
            helper.make_node("ReduceSum", inputs, [total], f"{name}/ReduceSum", keepdims=keep),
            helper.make_node("Cast", [counted], [f"{counted}/cast"], f"{name}/Cast", to=types[source]),
            helper.make_node("Div", [total, f"{counted}/cast"], list(node.output), f"{name}/Div"),
        ]
    if replaced:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return replaced


def bound_clips(model: onnx.ModelProto) -> int:
    """Give every Clip of real numbers both limits, in place; return how many lacked one.

    Without one ORT takes the largest finite number, so that ``x.clamp(min=0)`` made a finite number of infinity.

    Args:
        model: with the types of its values inferred.
    """
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    dtypes = {onnx.TensorProto.FLOAT: np.float32, onnx.TensorProto.DOUBLE: np.float64}
    limits: dict[str, onnx.NodeProto] = {}
    changed = 0
    for node in model.graph.node:
        dtype = dtypes.get(types.get(node.input[0], 0)) if node.op_type == "Clip" and not node.domain else None
        given = [*node.input, "", ""][:3]
        if dtype is None or all(given):
            continue
        for i, limit in ((1, -np.inf), (2, np.inf)):
            if not given[i]:
                given[i] = f"ort_zero_{'lowest' if i == 1 else 'highest'}_{np.dtype(dtype).name}"
                value = numpy_helper.from_array(np.array(limit, dtype))
                limits[given[i]] = helper.make_node("Constant", [], [given[i]], given[i], value=value)
        del node.input[:]
        node.input.extend(given)
        changed += 1
    for constant in limits.values():
        model.graph.node.insert(0, constant)
    return changed


def keep_ranges_as_indices(model: onnx.ModelProto) -> int:
    """Keep ORT from making slices of look-ups by ranges; return how many ranges there were.

    ORT (1.19.2, ``GatherToSliceFusion``) does so for all. To a slice the end -1 is the last place, so that
    ``x[torch.arange(n - 1, -1, -1)]`` and ``x[torch.arange(-n, 0)]`` were empty; and places that do not exist are left
    out of it, where a look-up fails.

    Args:
        model: with the types of its values inferred.
    """
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    dtypes: dict[int, type[np.signedinteger]] = {onnx.TensorProto.INT64: np.int64, onnx.TensorProto.INT32: np.int32}
    constants = _constants(model)
    looked_up = {node.input[1] for node in model.graph.node if node.op_type == "Gather"}
    lowest: dict[str, onnx.NodeProto] = {}
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        dtype = dtypes.get(types.get(node.output[0], 0)) if node.op_type == "Range" and not node.domain else None
        is_ascending = dtype and constants.get(node.input[0], -1) >= 0 and constants.get(node.input[2], -1) > 0
        if dtype is None or (is_ascending and node.output[0] not in looked_up):
            continue
        limit = f"ort_zero_lowest_{np.dtype(dtype).name}"
        value = numpy_helper.from_array(np.array(np.iinfo(dtype).min, dtype))
        lowest[limit] = helper.make_node("Constant", [], [limit], limit, value=value)
        indices, node.output[0] = node.output[0], f"{node.output[0]}_range"
        nodes.append(helper.make_node("Max", [node.output[0], limit], [indices], indices))
    changed = len(nodes) - len(model.graph.node)
    if changed:
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in (*lowest.values(), *nodes)]
        del model.graph.node[:]
        model.graph.node.extend(kept)
    return changed


def _constants(model: onnx.ModelProto) -> dict[str, int]:
    """Return the whole numbers among the constants of a graph by name."""
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            found[node.output[0]] = node.attribute[0].t
    arrays = {name: numpy_helper.to_array(tensor) for name, tensor in found.items() if not tensor.dims}
    return {name: int(array) for name, array in arrays.items() if array.dtype.kind == "i"}


def _axes_of(node: onnx.NodeProto) -> list[int] | None:
    """Return the axes that a ReduceMean names in its attribute, None for all of them."""
    return next((list(a.ints) for a in node.attribute if a.name == "axes"), None) if len(node.input) < 2 else [-1]


def anchor_constant_results(model: onnx.ModelProto) -> int:
    """Let PyTorch copy each result that no value of an input leads to, in place; return how many there are.

    ``x.new_ones(3)`` is one, and so is ``x.shape[-1]``: ORT's optimizer computes constants, and sizes that it knows,
    once and for all, and its gradient builder takes no result that is a constant.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    inputs = {given.name for given in model.graph.input}
    anchored = 0
    for result in model.graph.output:
        node = producers.get(result.name)
        if node is None or not _is_constant(result.name, producers, inputs):
            continue
        source = f"{result.name}_constant"
        for other in model.graph.node:
            for names in (other.input, other.output):
                for i, name in enumerate(names):
                    if name == result.name:
                        names[i] = source
        # ORT does not compute what an operator of a domain that it does not know returns
        model.graph.node.append(
            helper.make_node(
                "ATen", [source, ""], [result.name], source, domain="org.pytorch.aten", operator="aten::clone"
            )
        )
        anchored += 1
    return anchored


def separate_repeated_inputs(model: onnx.ModelProto) -> int:
    """Let a node that reads an input of the graph twice read it once directly, in place; return the number of nodes.

    ``x * x`` is such a node. Where no other node reads the input, ORT's gradient builder gives both gradients one name
    and refuses the graph ("Duplicate definition of name (x_grad)"); with two readers it sums them. A cross entropy
    reads no input directly: there the builder crashes.
    """
    inputs = {given.name for given in model.graph.input}
    nodes, separated = [], 0
    for node in model.graph.node:
        indirect = [i for i, name in enumerate(node.input) if name in inputs and name in node.input[:i]]
        if "CrossEntropyLoss" in node.op_type and node.input[0] in inputs:
            indirect.append(0)
        for i in indirect:
            other = f"{node.name or node.output[0]}/ort_zero_input_{i}"
            nodes.append(helper.make_node("Identity", [node.input[i]], [other], other))
            node.input[i] = other
        separated += bool(indirect)
        nodes.append(node)
    if separated:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return separated


def _is_constant(name: str, producers: dict[str, onnx.NodeProto], inputs: set[str]) -> bool:
    seen, left = {name}, [name]
    while left:
        name = left.pop()
        if name in inputs:
            return False
        node = producers.get(name)
        if node is not None and node.domain:
            return False  # Python code, or an operator that ORT does not compute ahead
        if node is not None and node.op_type in ("Shape", "Size"):
            continue
        for given in node.input if node is not None else ():
            if given not in seen:
                seen.add(given)
                left.append(given)
    return True
