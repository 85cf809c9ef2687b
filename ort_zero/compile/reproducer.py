"""Write a segment that failed or differs as a folder that runs alone, ready for a bug report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch.fx import GraphModule

from ort_zero.compile.assembly import SegmentModel
from ort_zero.utils.atomic_write import write_bytes, write_text

_SCRIPT = '''"""{reason}

torch {torch}, onnxruntime {onnxruntime}. Run: python reproduce.py
"""
import onnxruntime
import torch
from torch import device, inf, nan  # names in PyTorch's form below

inputs = torch.load("inputs.pt")
feeds = torch.load("feeds.pt")
orders = {orders}  # of the dimensions of results in memory

{code}

wanted = forward(None, *inputs)
session = onnxruntime.InferenceSession("segment.onnx", providers=["CPUExecutionProvider"])
results = session.run(None, {{name: tensor.numpy() for name, tensor in feeds.items()}})
for number, (ours, theirs, order) in enumerate(zip(results, wanted, orders)):
    ours = torch.from_numpy(ours).permute(order).to(theirs.dtype)
    error = (ours.double() - theirs.double()).abs().max()
    print(f"result {{number}} {{tuple(theirs.shape)}}: onnxruntime and PyTorch differ by {{error:.3e}}, "
          f"largest element {{theirs.double().abs().max():.3e}}")
'''


def write_reproducer(
    folder: Path,
    reason: str,
    model: SegmentModel,
    reference: GraphModule,
    inputs: Sequence[Any],
    feeds: Sequence[torch.Tensor],
    sizes: Sequence[torch.Tensor],
) -> Path:
    """Write model, inputs and script of a segment; return the folder.

    Args:
        folder: the folder to write; what an earlier run wrote there is replaced.
        feeds: the tensors of the model, in memory order.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "segment.onnx", model.proto().SerializeToString())
    plain = [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in inputs]
    named = {edge.name: tensor.detach().cpu() for edge, tensor in zip(model.inputs, feeds)}
    named |= zip(model.sizes, sizes)
    torch.save(plain, folder / "inputs.pt")
    torch.save(named, folder / "feeds.pt")
    script = _SCRIPT.format(
        reason=reason.replace('"""', "'''"),
        torch=torch.__version__,
        onnxruntime=onnxruntime.__version__,
        orders=[
            [edge.order.index(n) for n in range(len(edge.order))] if edge.order else list(range(len(edge.shape)))
            for edge in model.outputs
        ],
        code=reference.code.strip(),
    )
    write_text(folder / "reproduce.py", script)
    return folder
