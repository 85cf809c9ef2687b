"""Compute the statistics of tensors, in one pass over their memory and without copies of whole tensors.

The statistics of one tensor are a *row*, see :mod:`ort_zero.statistics.rows`; :mod:`.sketch_signs` defines the sketch.

**Precision.** Sums of at most :data:`~.sketch_signs.BLOCK` deviations from a centre near the mean have the tensor's
precision, at least float32; everything else is float64. Blocks whose squares leave the range of float32 are summed in
float64. Float64 values beyond 1e150 or below 1e-150 leave the range of float64 when squared: ``std`` and ``l2`` become
inf or 0.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from ort_zero.statistics.collect.sampling import require_memory
from ort_zero.statistics.collect.sketch_signs import BLOCK, TABLE, signs_of_blocks
from ort_zero.statistics.rows import FIRST, SKETCH, WIDTH, merge

if TYPE_CHECKING:
    from ort_zero.statistics.collect.kernels import Kernel

BUCKET = 1 << 22
"""Default of the maximum number of elements of a tensor that are copied at a time."""
_CHUNK = 1 << 16
"""Number of elements converted or made contiguous at a time, which fit into the L2 cache."""
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_kernels: dict[torch.dtype, Kernel] = {}
_table: np.ndarray = np.zeros(0, np.float32)
"""The table of signs for the kernels; empty until the first kernel is compiled."""
_lock = threading.Lock()


def measure_into(
    row: np.ndarray, tensor: torch.Tensor, bucket_size: int = BUCKET, *, on_cpu: bool = False, offset: int = 0
) -> None:
    """Write the statistics of a tensor into a row.

    Args:
        row: float64 [:data:`~.rows.WIDTH`], contiguous; all values are overwritten.
        tensor: A tensor of any dtype and strides, on any device. Of a sparse tensor the coalesced values are measured.
        bucket_size: Maximum number of elements that are copied at a time.
        on_cpu: Copy a tensor on another device to the CPU in buckets, and measure it there.
        offset: Flat index of the tensor's first element within the whole tensor; 0 unless `tensor` is a shard.

    Raises:
        ValueError: The tensor has no readable values: it is a meta, fake, quantized or nested tensor, of a subclass
            with its own ``__torch_dispatch__``, or its memory was released.
    """
    if len(row) != WIDTH:
        raise ValueError(f"a row has length {WIDTH}, not {len(row)}")
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1, not {bucket_size}")
    # the fast path: some hundred tensors in a training step are plain CPU tensors
    if type(tensor) in _PLAIN_TYPES and tensor.is_cpu and tensor.layout is torch.strided:
        kernel = _kernels.get(tensor.dtype)
        if kernel is not None and not tensor.is_neg() and not tensor.is_nested:
            require_memory(tensor)
            size = tensor.numel()
            whole = tensor.is_contiguous()
            if not whole and size <= _CHUNK and size <= bucket_size:
                tensor, whole = tensor.detach().contiguous(), True
            if whole:
                kernel(_array(tensor), offset, row, _table, True, True)
                return
    with torch.no_grad():
        values = _values(tensor)
        require_memory(values)
        if values.is_complex():
            offset *= 2
        # MPS has no float64
        if values.is_cpu or on_cpu or values.device.type == "mps":
            _by_kernel(row, values, bucket_size, offset)
        else:
            measure_on_device(row, values, bucket_size, offset)


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


def _real(piece: torch.Tensor) -> torch.Tensor:
    """Return a piece as real numbers: complex numbers split into two, pending conjugations and signs applied."""
    if piece.is_complex():
        piece = torch.view_as_real(piece.resolve_conj())
    return piece.resolve_neg()


def _kind(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are measured; the conversion is exact except for large integers."""
    if dtype in (torch.float32, torch.float64, torch.bfloat16):
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.float64


def _converted(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a piece to a dtype and make it contiguous."""
    try:
        return piece.to(dtype).contiguous()
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"a tensor of dtype {piece.dtype} cannot be measured: {error}") from error


def _by_kernel(row: np.ndarray, tensor: torch.Tensor, bucket_size: int, offset: int) -> None:
    """Measure a tensor on the CPU; a tensor on another device is copied in buckets."""
    begins = True
    for bucket in [tensor] if tensor.is_cpu else _pieces(tensor, bucket_size):
        for piece in _prepared(bucket.cpu(), min(bucket_size, _CHUNK)):
            kernel, values = _kernel(piece.dtype), _array(piece)
            kernel(values, offset, row, _table, begins, False)
            begins = False
            offset += values.size
    kernel(values[:0], offset, row, _table, False, True)


def _kernel(dtype: torch.dtype) -> Kernel:
    """Return the kernel that reads values of a dtype, compiled on first use: numba takes seconds to be imported."""
    global _table
    kernel = _kernels.get(dtype)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(dtype)
            if kernel is None:
                from ort_zero.statistics.collect import kernels

                _table = kernels.TABLE_32
                kernel = _kernels[dtype] = kernels.compiled(str(dtype).removeprefix("torch."))
    return kernel


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as a flat array, bfloat16 as int16."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    values = tensor.numpy().reshape(-1)
    return values if values.flags.aligned else values.copy()


def _prepared(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield a CPU tensor in parts that a kernel can read; copied parts have at most ``limit`` elements."""
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.is_complex():
        if not lazy:
            tensor = torch.view_as_real(tensor)
        limit = max(limit // 2, 1)
    kind = _kind(tensor.dtype)
    if not lazy and kind is tensor.dtype and tensor.is_contiguous():
        yield tensor
        return
    for piece in _pieces(tensor, limit):
        piece = _real(piece)
        yield _converted(piece, _kind(piece.dtype))


def measure_on_device(row: np.ndarray, tensor: torch.Tensor, bucket_size: int, offset: int) -> None:
    """Measure a tensor on its device with operators of torch in float64, and copy the row to the host at the end.

    For the arguments see :func:`measure_into`; `tensor` is dense.
    """
    rows = []
    for piece in _pieces(tensor, max(bucket_size // 2, 1) if tensor.is_complex() else bucket_size):
        values = _converted(_real(piece), torch.float64).view(-1)
        rows.append(_row_by_torch(values, offset))
        offset += values.numel()
    row[:] = merge(torch.stack(rows).cpu().numpy())


def _row_by_torch(values: torch.Tensor, offset: int) -> torch.Tensor:
    """Compute the statistics of values on their device: a row, float64 [:data:`~ort_zero.statistics.rows.WIDTH`].

    Args:
        values: One-dimensional and float64.
        offset: Flat index of the first value within the whole tensor.
    """
    nan, inf = values.isnan(), values.isinf()
    finite = ~(nan | inf)
    count = finite.sum()
    some = count.clamp(min=1)
    finite_values = torch.where(finite, values, 0.0)
    unknown = torch.full((), math.nan, dtype=torch.float64, device=values.device)
    mean = torch.where(count > 0, finite_values.sum() / some, unknown)
    deviation = torch.where(finite, finite_values - mean, 0.0)
    std = torch.where(count > 0, (deviation.square().sum() / some).sqrt(), unknown)
    if values.numel():
        low = torch.where(finite, values, math.inf).min()
        high = torch.where(finite, values, -math.inf).max()
    else:
        low = high = unknown
    numbers = [torch.full_like(unknown, values.numel())]
    numbers += [torch.where(count > 0, low, unknown), torch.where(count > 0, high, unknown), mean, std]
    numbers += [finite_values.abs().sum() / some, finite_values.square().sum().sqrt()]
    numbers += [(finite_values < 0).sum(), (finite_values > 0).sum(), (finite & (finite_values == 0)).sum()]
    numbers += [nan.sum(), inf.sum()]
    first = torch.cat([values[:FIRST], unknown.expand(max(FIRST - values.numel(), 0))])
    return torch.cat([torch.stack([n.double() for n in numbers]), first, _sketch(finite_values, offset)])


def _sketch(values: torch.Tensor, offset: int) -> torch.Tensor:
    before = offset % BLOCK
    after = -(before + values.numel()) % BLOCK
    blocks = torch.nn.functional.pad(values, (before, after)).view(-1, BLOCK // SKETCH, SKETCH)
    of_blocks = torch.from_numpy(signs_of_blocks(offset // BLOCK, len(blocks))).to(values.device)
    return ((blocks * _table_on(values.device)).sum(dim=1) * of_blocks).sum(dim=0)


@functools.lru_cache(maxsize=8)
def _table_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(TABLE).to(device)
