"""Take evenly spaced samples of tensors; the samples of shards make up the sample of the whole tensor."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch


def sampled(
    tensor: torch.Tensor, limit: int = 4096, offset: int = 0, total: int | None = None
) -> tuple[torch.Tensor, int]:
    """Return evenly spaced elements of a tensor or shard, and the index of the first element in the whole sample.

    An element is in the sample if its flat index is a multiple of a stride, which depends on ``total`` and ``limit``
    alone. Pass the index to :func:`~.tensor_statistics.measure_into` as ``offset``. A tensor of at most ``limit``
    elements is returned unchanged.

    Args:
        tensor: The whole tensor, or a contiguous shard of the flattened tensor.
        limit: Maximum number of elements in the sample of the whole tensor.
        offset: Flat index of the shard's first element in the whole tensor.
        total: Number of elements of the whole tensor; by default of `tensor`.

    Raises:
        ValueError: The tensor is not strided, or its memory was released.
    """
    size = tensor.numel()
    stride = _stride(size if total is None else total, limit)
    if stride == 1:
        return tensor, offset
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"a tensor of layout {tensor.layout} cannot be sampled")
    tensor = tensor.detach()
    start = -offset % stride
    index = (offset + start) // stride
    if tensor.is_contiguous():
        return tensor.view(-1)[start::stride], index
    require_memory(tensor)
    elements, extent = _sampled_elements(tensor.shape, tensor.stride(), start, stride)
    return tensor.as_strided((extent,), (1,)).index_select(0, elements.to(tensor.device)), index


def require_memory(tensor: torch.Tensor) -> None:
    """Raise if a tensor's values are not in memory: torch would read them at address 0 and crash the process.

    Raises:
        ValueError: The tensor has no storage, or its memory was released.
    """
    try:
        size = tensor.untyped_storage().nbytes()
    except RuntimeError as error:
        raise ValueError(f"a tensor without memory of its own cannot be measured: {error}") from error
    if not size and tensor.numel():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} cannot be measured: its memory was released")


@functools.lru_cache(maxsize=4096)
def _stride(total: int, limit: int) -> int:
    """Return 1 if ``total <= limit``, else the least odd prime stride with at most ``limit`` elements in the sample.

    A stride that shares a factor with the sizes of the tensor would sample few of its columns.
    """
    if total <= limit:
        return 1
    stride = max(-(-total // limit), 3) | 1
    while any(stride % divisor == 0 for divisor in range(3, math.isqrt(stride) + 1, 2)):
        stride += 2
    return stride


@functools.lru_cache(maxsize=128)
def _sampled_elements(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, stride: int
) -> tuple[torch.Tensor, int]:
    """Return the memory offsets of every ``stride``-th element, and the extent of the tensor, both in elements."""
    positions = np.arange(start, math.prod(shape), stride)
    indices = np.unravel_index(positions, shape)
    elements = sum(along * step for along, step in zip(indices, strides))
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
    return torch.from_numpy(elements), extent
