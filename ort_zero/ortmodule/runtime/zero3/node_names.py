"""Names of the collectives in a graph, on which those who insert, verify and run them agree."""

from __future__ import annotations

import onnx

TRIGGER = "ort_zero_trigger"
"""Graph input of one float that requires grad: it starts the token chain and makes autograd run the backward."""

GATHER_FUNCTION = "ort_zero::gather"
"""Name under which ORT finds the autograd Function of the gather nodes."""
REDUCE_FUNCTION = "ort_zero::reduce"
"""Name under which ORT finds the autograd Function of the reduce nodes."""

_PREFIX = "ort_zero_"


def token_name(index: int) -> str:
    """Return the name of the token that event `index` produces."""
    return f"ort_zero_token_{index}"


def gathered_name(weight: str, index: int) -> str:
    """Return the name of the full weight that gather `index` produces."""
    return f"{weight}__gathered_{index}"


def node_name(kind: str, index: int) -> str:
    """Return the name of the node of event `index`; `kind` is ``"gather"`` or ``"reduce"``."""
    return f"{_PREFIX}{kind}_{index}"


def is_collective(node: onnx.NodeProto) -> bool:
    """Return whether `node` is the node of an event."""
    return node.op_type == "PythonOp" and node.name.startswith(_PREFIX)


def event_index(node: onnx.NodeProto) -> int:
    """Return the index of the event whose node `node` is; see :func:`is_collective`."""
    return int(node.name.rpartition("_")[2])
