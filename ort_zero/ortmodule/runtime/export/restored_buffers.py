"""Keeps the buffers that PyTorch's parts of a graph change in place, for a run that may have to be repeated.

Batch normalisation, and submodules that stay in PyTorch, write their buffers while the graph runs. When a guard behind
the run fails, another graph runs for the same call, and would change them a second time.
"""

from __future__ import annotations

import torch

from ort_zero.ortmodule.compat.torch_modules import buffer_table
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules


class BufferStates:
    """Copies of the buffers that may change in place while a graph runs, as they are at the moment.

    Args:
        excluded: the submodules of the model that run in PyTorch.
    """

    def __init__(self, excluded: ExcludedModules):
        self._kept = [
            (table, name, tensor, tensor.clone())
            for table in map(buffer_table, excluded.changing_buffers())
            for name, tensor in list(table.items())
            if tensor is not None
        ]

    def restore(self) -> None:
        """Put the buffers back to their values of then, and the very tensors back that were there."""
        with torch.no_grad():
            for table, name, tensor, value in self._kept:
                tensor.copy_(value)  # its version does not tell: ONNX Runtime's nodes write into its memory
                table[name] = tensor
