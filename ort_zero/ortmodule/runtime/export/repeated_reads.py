"""Finds weights that several nodes of one kind read, whose gradients ORT would define twice.

ORT's gradients of some operators (LayerNormalization, BatchNormalization) always compute those of the weights. Where
several of them share one frozen weight, as the copies of a layer do, each would define its gradient under one name. If
the gradient is asked for, ORT adds them up under names of their own.
"""

from __future__ import annotations

import re
from collections import Counter

import onnx

_DUPLICATE = re.compile(r"Duplicate definition of name \((?P<name>.+)_grad\)")


def asked_for_twice(error: BaseException, model: bytes) -> frozenset[str]:
    """Return the values that several nodes read of the kinds whose gradients ORT could not define; none otherwise.

    The kinds are those before ORT fused them: a product, in the parts of an RMSNorm.

    Args:
        error: what ORT's graph builder raised.
        model: the serialized forward graph that it was given.
    """
    found = _DUPLICATE.search(str(error))
    if found is None:
        return frozenset()
    nodes = onnx.load_from_string(model).graph.node
    kinds = {node.op_type for node in nodes if found["name"] in node.input}
    reads = Counter(name for node in nodes if node.op_type in kinds for name in node.input)
    return frozenset(name for name, count in reads.items() if name and count > 1)


def without_gradients(model: onnx.ModelProto, names: frozenset[str]) -> None:
    """Remove the gradients of `names` from the outputs of a gradient graph."""
    unwanted = {f"{name}_grad" for name in names}
    outputs = [output for output in model.graph.output if output.name not in unwanted]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
