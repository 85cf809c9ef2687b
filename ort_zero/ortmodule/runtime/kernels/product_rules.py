"""Rules for the matrix products of linear layers: their results, the gradients of their inputs and of their weights."""

from __future__ import annotations

import numpy as np
import onnx

from ort_zero.ortmodule.onnx_edit.graph_values import attributes
from ort_zero.ortmodule.onnx_edit.node_edits import aten_node
from ort_zero.ortmodule.runtime.kernels.edited_graph import EditedGraph, own_node

_TERMS = 1024
"""Products in a sum from which oneDNN multiplies faster than ONNX Runtime: with fewer of them both are alike."""
_COLUMNS = 64
"""Columns of a result from which that pays for the call."""


def long_product(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace a product with a weight whose sums are long; the addition of a bias goes into it."""
    given = attributes(node)
    left, right, *more = (name for name in node.input if name)
    plain = not given.get("transA") and not given.get("transBatchA") and not given.get("transBatchB")
    if not plain or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
        return None
    source, transposed = graph.without_transpose(right)
    transposed ^= bool(given.get("transB"))
    shape = graph.values.shape(source)
    if shape is None or len(shape) != 2 or node.op_type != "Gemm" and len(graph.values.shape(left) or ()) < 2:
        return None
    if not all(isinstance(size, int) for size in shape) or not graph.all_float([left, source, *more]):
        return None
    columns, terms = (int(size) for size in (shape if transposed else reversed(shape)))
    if terms < _TERMS or columns < _COLUMNS or (more and graph.values.shape(more[0]) != [columns]):
        return None
    bias, result = _bias(graph, node.output[0], columns) if not more else (more[0], node.output[0])
    if source != right:
        graph.reads_no_more(right)
    # a linear layer's weight is [columns, terms]
    return own_node("linear" if transposed else "product", [left, source, bias], node, [result])


def _bias(graph: EditedGraph, result: str, columns: int) -> tuple[str, str]:
    """Return the bias that is added to a product, which nothing else reads, "" for none, and the name of the sum."""
    reader = graph.values.sole_reader(result)
    if reader is None or reader.op_type != "Add" or reader.domain or len(set(reader.input)) != 2:
        return "", result
    (bias,) = (name for name in reader.input if name != result)
    # it must be there where the product is computed
    if bias in graph.values.producers or graph.values.shape(bias) != [columns]:
        return "", result
    graph.left_out.add(id(reader))
    return bias, reader.output[0]


def weight_gradient(graph: EditedGraph, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Replace a product of two matrices that sums over their rows."""
    given = attributes(node)
    inputs = [name for name in node.input if name]
    plain = given.get("transA") and not given.get("transB") and given.get("alpha", 1.0) == 1.0
    if not plain or len(inputs) != 2 or not graph.all_float(inputs):
        return None
    rows = graph.values.add_constant([0], np.int64)
    return aten_node("tensordot", [*inputs, rows, rows], list(node.output), node.name)
