"""Watch how large the results of PyTorch's operators become."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of a floating-point result, of all dtypes or of `dtype` alone."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.elements, self._dtype = 0, dtype

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_real = type(result) is torch.Tensor and result.is_floating_point() and result.device.type == "cpu"
        if is_real and self._dtype in (None, result.dtype):
            self.elements = max(self.elements, result.numel())
        return result
