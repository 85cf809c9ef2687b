"""Undoes what an export does to weights: a forward that changes them runs more often than the user calls it.

Momentum encoders and codebooks change parameters in their forward, in place, through ``.data``, or by putting other
data into them. Only what is about to be written is copied, when it is: an export takes no memory for the weights.
A weight for which a fake one stands cannot be written: the module that would runs in PyTorch.
"""

from __future__ import annotations

import torch

from ort_zero.compat.deepspeed_parameters import is_partitioned
from ort_zero.ortmodule.compat.torch_modules import parameter_table
from ort_zero.ortmodule.compat.traced_calls import user_line
from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.compat.written_weights import BeforeWrites
from ort_zero.ortmodule.runtime.export.scaled_weights import note_changed


class UnchangedWeights:
    """The weights of a module as they are at the moment.

    Args:
        module: the module that is about to be exported. Partitioned weights are left out: fake ones stand for them,
            one element expanded to the shape of a weight.
    """

    def __init__(self, module: torch.nn.Module):
        self._weights = [(p, p.data) for p in module.parameters() if not is_partitioned(p)]
        self._extents = [_extent(data) for _, data in self._weights]
        self._copies: dict[int, torch.Tensor] = {}
        """Copy of each weight that was written, by its index."""
        self._fake = [
            (*_extent(parameter), owner, name)
            for owner in module.modules()
            for name, parameter in dict.items(parameter_table(owner))
            if parameter is not None and is_partitioned(parameter) and 0 in parameter.stride()
        ]

    def noticed(self) -> BeforeWrites:
        """Return a context in which weights are copied before they are written.

        Code in it gets a ValueReadError where it cannot write into a weight because a fake one stands for it.
        """
        return BeforeWrites(self._note, self._note_failed)

    def restore(self) -> None:
        """Put the weights back to the memory and the values that they had."""
        with torch.no_grad():
            for i, (parameter, data) in enumerate(self._weights):
                if i in self._copies:
                    data.copy_(self._copies[i])
                if parameter.data_ptr() != data.data_ptr() or parameter.shape != data.shape:
                    parameter.data = data

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or tensor.layout != torch.strided or not tensor.numel():
            return
        begin, end = _extent(tensor)
        for i, (first, last) in enumerate(self._extents):
            if begin < last and first < end and i not in self._copies:
                self._copies[i] = self._weights[i][1].clone()

    def _note_failed(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        begin, end = _extent(tensor)
        for first, last, owner, name in self._fake:
            if begin < last and first < end:
                note_changed(owner, name)
                raise ValueReadError(owner, f"changes its parameter {name} in place", user_line()) from None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor lie."""
    if not tensor.numel():
        return 0, 0
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.itemsize
