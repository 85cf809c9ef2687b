"""Compute the statistics of tensors and of samples, in one pass over their memory and without copies of whole tensors.

The statistics of one tensor are a *row*, see :mod:`ort_zero.statistics.rows`.

**Precision.** Of values on the CPU that float32 holds exactly, sums of up to 512 deviations from a centre near the mean
are float32, and a block's sketch; everything else is float64. So are tensors with NaN or inf, and those whose squares
leave the range of float32. Float64 values beyond 1e150 or below 1e-150 leave the range of float64 when squared:
``std`` and ``l2`` become inf or 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from ort_zero.statistics.rows import BLOCK, FIRST, SKETCH, TABLE, WIDTH, merge, signs_of_blocks

if TYPE_CHECKING:
    from ort_zero.statistics.collect.kernels import Kernel

BUCKET = 1 << 22
"""Maximum number of elements that are converted at a time on another device than the CPU."""
_CHUNK = 1 << 16
"""Number of elements converted or made contiguous at a time on the CPU, which fit into the L2 cache."""
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def measure_into(row: np.ndarray, tensor: torch.Tensor, offset: int = 0) -> None:
    """Write the statistics of a tensor into a row.

    Args:
        row: float64 [:data:`~.rows.WIDTH`], contiguous; all values are overwritten.
        tensor: A tensor of any dtype and strides, on any device. Of a sparse tensor the coalesced values are measured.
        offset: Flat index of the tensor's first element within the whole tensor; 0 unless `tensor` is a shard.

    Raises:
        ValueError: The tensor has no readable values: it is a meta, fake, quantized or nested tensor, of a subclass
            with its own ``__torch_dispatch__``, or its memory was released.
    """
    # the fast path: some hundred tensors in a training step are plain CPU tensors
    if type(tensor) in _PLAIN_TYPES and tensor.dtype is torch.float32 and tensor.is_cpu:
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_neg():
            require_memory(tensor)
            plain = tensor.detach().contiguous() if tensor.numel() <= _CHUNK else tensor
            if plain.is_contiguous() and _kernel()(_array(plain), offset, row):
                return
    with torch.no_grad():
        values = _values(tensor)
        require_memory(values)
        if values.is_complex():  # two numbers
            values, offset = torch.view_as_real(values.resolve_conj()), 2 * offset
        measure_in_pieces(row, values.resolve_neg(), offset)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor of any layout as a dense tensor, or raise with the reason if none are readable."""
    if type(tensor) not in _PLAIN_TYPES:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            name = type(tensor).__qualname__
            raise ValueError(f"a tensor of type {name} cannot be measured: it has its own dispatch")
        tensor = tensor.as_subclass(torch.Tensor)
    for kind, is_kind in (("nested", tensor.is_nested), ("quantized", tensor.is_quantized), ("meta", tensor.is_meta)):
        if is_kind:
            raise ValueError(f"a {kind} tensor cannot be measured: it has no plain values")
    if tensor.layout is torch.sparse_coo:
        return tensor.detach().coalesce().values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.detach().values()
    if tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout} cannot be measured")
    return tensor.detach()


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield parts of at most ``limit`` elements that follow each other in row-major order."""
    size = tensor.numel()
    if size <= limit:
        yield tensor
        return
    inner = size // len(tensor)
    if inner > limit:
        for part in tensor:
            yield from _pieces(part, limit)
        return
    step = limit // inner
    for start in range(0, len(tensor), step):
        yield tensor[start : start + step]


def _converted(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a piece to a dtype and make it contiguous."""
    try:
        return piece.to(dtype).contiguous()
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"a tensor of dtype {piece.dtype} cannot be measured: {error}") from error


def measure_in_pieces(row: np.ndarray, tensor: torch.Tensor, offset: int) -> None:
    """Measure a dense tensor of real numbers on any device, converted piece by piece."""
    in_float32 = tensor.is_cpu and _is_exact_in_float32(tensor)
    rows = []
    for piece in _pieces(tensor, _CHUNK if tensor.is_cpu else BUCKET):
        part = np.empty(WIDTH)
        values = _converted(piece, torch.float32 if in_float32 else torch.float64).view(-1)
        if not in_float32 or not _kernel()(_array(values), offset, part):
            part = _row_by_torch(values.double(), offset).cpu().numpy()
        rows.append(part)
        offset += values.numel()
    row[:] = rows[0] if len(rows) == 1 else merge(np.stack(rows))


def _is_exact_in_float32(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point():
        return tensor.element_size() <= 4
    if tensor.dtype in (torch.int32, torch.int64) and tensor.numel():
        return all(abs(int(edge)) < 1 << 24 for edge in tensor.aminmax())
    return tensor.element_size() <= 2


@functools.cache
def _kernel() -> Kernel:
    """Return the kernel for float32 values on the CPU, compiled on first use: numba takes seconds to be imported."""
    from ort_zero.statistics.collect import kernels

    return kernels.compiled()


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as a flat array."""
    values = tensor.detach().numpy().reshape(-1)
    return values if values.flags.aligned else values.copy()


def _row_by_torch(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the row of float64 values with one dimension, on their device."""
    nan, inf = values.isnan(), values.isinf()
    finite = values[~(nan | inf)]
    unknown = values.new_full((FIRST,), math.nan)
    mean = finite.mean()
    numbers = [*(finite.aminmax() if len(finite) else unknown[:2]), mean, (finite - mean).square().mean().sqrt()]
    numbers += [finite.abs().sum() / max(len(finite), 1), finite.square().sum().sqrt()]
    numbers += [part.sum().double() for part in (finite < 0, finite > 0, finite == 0, nan, inf)]
    count = unknown.new_tensor([len(values)])
    first = torch.cat([values[:FIRST], unknown])[:FIRST]
    return torch.cat([count, torch.stack(numbers), first, _sketch(torch.where(nan | inf, 0.0, values), offset)])


def _sketch(values: torch.Tensor, offset: int) -> torch.Tensor:
    before = offset % BLOCK
    after = -(before + values.numel()) % BLOCK
    blocks = torch.nn.functional.pad(values, (before, after)).view(-1, BLOCK // SKETCH, SKETCH)
    of_blocks = torch.from_numpy(signs_of_blocks(offset // BLOCK, len(blocks))).to(values.device)
    table = torch.from_numpy(TABLE).to(values.device)
    return ((blocks * table).sum(dim=1) * of_blocks).sum(dim=0)


# --- samples ----------------------------------------------------------------------------------------------------------


def sampled(
    tensor: torch.Tensor, limit: int = 4096, offset: int = 0, total: int | None = None
) -> tuple[torch.Tensor, int]:
    """Return evenly spaced elements of a tensor or shard, and the index of the first element in the whole sample.

    An element is in the sample if its flat index is a multiple of a stride, which depends on ``total`` and ``limit``
    alone. Pass the index to :func:`measure_into` as ``offset``. A tensor of at most ``limit`` elements is returned
    unchanged, an unreadable one raises ValueError.

    Args:
        tensor: The whole tensor, or a contiguous shard of the flattened tensor.
        limit: Maximum number of elements in the sample of the whole tensor.
        offset: Flat index of the shard's first element in the whole tensor.
        total: Number of elements of the whole tensor; by default of `tensor`.
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
    return tensor.take(torch.arange(start, size, stride, device=tensor.device)), index


def require_memory(tensor: torch.Tensor) -> None:
    """Raise ValueError if a tensor's values are not in memory: torch would read them at address 0 and crash."""
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
