"""Gives results of a graph memory of their own where PyTorch does and ONNX Runtime does not.

ORT leaves copies out: of ``h, h.clone()`` both may be one buffer, and ``x.clone()`` that of the argument. A change in
place of one would show in the other. What is meant to share memory is a view (:mod:`.export.result_views`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import onnx
import torch

from ort_zero.ortmodule.compat.ort_kernels import BARRIER
from ort_zero.ortmodule.runtime.fused_loss.rewrite import ReturnedLogits

_MAY_SHARE = frozenset(
    "Identity Reshape Squeeze Unsqueeze Flatten Cast Add Sub Mul Div Dropout Expand Transpose Slice Sum".split()
)
"""Operators that ORT leaves out, or whose result takes the memory of the first argument, where they change nothing."""


def weights_returned(
    model: onnx.ModelProto, weights: Collection[str], results: int, logits: ReturnedLogits | None
) -> dict[int, str]:
    """Return which results may lie in the memory of a weight: name of the weight by the index of the result.

    Args:
        model: the graph that runs.
        weights: names of its inputs that are weights.
        results: number of its first outputs that the forward returns.
        logits: which of its outputs nobody sees, since the logits are computed of them; None for none.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    yields = next((node for node in model.graph.node if node.op_type == BARRIER), None)
    names = list(yields.input) if yields is not None else [output.name for output in model.graph.output]
    if logits is not None:
        del names[logits.first : logits.first + logits.count]
    found = {}
    for i, name in enumerate(names[:results]):
        while name in producers and producers[name].op_type in _MAY_SHARE and producers[name].input:
            name = producers[name].input[0]
        if name in weights:
            found[i] = name
    return found


def separate(
    outputs: list[torch.Tensor],
    count: int,
    arguments: Iterable[torch.Tensor],
    weights: Mapping[int, torch.Tensor],
    views: Collection[int],
) -> None:
    """Copy those of the first `count` outputs that share memory with an earlier one, an argument or a weight.

    Args:
        outputs: of a run.
        count: number of outputs that leave the forward call.
        arguments: tensors of the call.
        weights: the weights that an output may share memory with, by the index of the output.
        views: indices of outputs that are replaced by views.
    """
    taken = {tensor.data_ptr() for tensor in arguments}
    for i in range(min(count, len(outputs))):
        output = outputs[i]
        if type(output) is not torch.Tensor:
            continue  # logits that are computed when they are read
        address = output.data_ptr()
        if address and i not in views and (address in taken or (i in weights and weights[i].data_ptr() == address)):
            outputs[i] = output.clone()
        taken.add(address)
