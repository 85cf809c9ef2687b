"""Computes the statistics of tensors, in one pass over their memory and without copies of whole tensors.

The numbers of one tensor are a *row*, see :mod:`.rows`.

**Sketch.** The element with flat index ``i`` (in row-major order) is in block ``b = i // BLOCK`` and column
``j = i % SKETCH``. It is added to number ``j`` of the sketch times ``T[i % BLOCK]`` times ``B(b, j)``, where

* ``B(b, j)`` is -1 if bit ``j`` of ``splitmix64(b)`` is set, else 1;
* ``T[SKETCH * r + j]`` is -1 if bit ``j`` of ``splitmix64(2**64 - 1 - r)`` is set, else 1.

NaN and inf are added as 0. A complex number is two elements, its real part and its imaginary part.

**Precision.** Sums of at most :data:`BLOCK` values are formed in the tensor's own precision (float32 for shorter ones)
about a centre near their mean; all else is float64. Blocks that are beyond the range of float32's squares are summed in
float64. Float64 values beyond 1e150 or below 1e-150 leave the range of their own squares: ``std`` and ``l2`` become inf
or 0.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ort_zero.statistics import extra
from ort_zero.statistics.records import FIRST, SKETCH, Statistics
from ort_zero.statistics.rows import (
    ABS_MEAN,
    ELEMENTS,
    FIRST_AT,
    INF,
    L2,
    MAX,
    MEAN,
    MIN,
    NAN,
    NEGATIVE,
    POSITIVE,
    SKETCH_AT,
    STD,
    WIDTH,
    ZERO,
    merge,
    statistics_of,
)

BUCKET = 1 << 22
"""Elements of a tensor that may be copied at a time, unless the caller says otherwise."""
BLOCK = 4096
"""Elements whose signs in the sketch are a table's; few enough that they and the table stay in the L1 cache."""

_CHUNK = 1 << 16
"""Elements converted or made contiguous at a time: they stay in the L2 cache until they are measured."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)


def measure(tensor: torch.Tensor, bucket_size: int = BUCKET, *, on_cpu: bool = False, offset: int = 0) -> Statistics:
    """Return the statistics of a tensor; the arguments are those of :func:`measure_into`."""
    return statistics_of(measure_raw(tensor, bucket_size, on_cpu=on_cpu, offset=offset))


def measure_raw(
    tensor: torch.Tensor, bucket_size: int = BUCKET, *, on_cpu: bool = False, offset: int = 0
) -> np.ndarray:
    """Return the statistics of a tensor as a new row; the arguments are those of :func:`measure_into`."""
    row = np.empty(WIDTH)
    measure_into(row, tensor, bucket_size, on_cpu=on_cpu, offset=offset)
    return row


def measure_into(
    row: np.ndarray, tensor: torch.Tensor, bucket_size: int = BUCKET, *, on_cpu: bool = False, offset: int = 0
) -> None:
    """Write the statistics of a tensor into a row.

    Args:
        row: One-dimensional, contiguous, float64, of length :data:`~.rows.WIDTH`; what it held is overwritten.
        tensor: Of any dtype and strides, on any device. Of a sparse tensor the values are measured, coalesced.
        bucket_size: At most so many elements are copied at a time, where something must be copied at all.
        on_cpu: Copy a tensor of another device to the CPU in buckets, and measure it there.
        offset: Flat index of the tensor's first element within the tensor it is a part of.

    Raises:
        ValueError: The tensor has no values that could be read: it is of the device meta, fake, quantized, nested, of
            another subclass with its own dispatch, or its memory was released.
    """
    if len(row) != WIDTH:
        raise ValueError(f"a row has length {WIDTH}, not {len(row)}")
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be at least 1, not {bucket_size}")
    # most tensors end here, some hundred in a training step
    if type(tensor) in _PLAIN_TYPES and tensor.is_cpu and tensor.layout is torch.strided:
        kernel = _kernels.get(tensor.dtype)
        if kernel is not None and not tensor.is_neg() and not tensor.is_nested:
            _require_memory(tensor)
            size = tensor.numel()
            whole = tensor.is_contiguous()
            if not whole and size <= _CHUNK and size <= bucket_size:
                tensor, whole = tensor.detach().contiguous(), True
            if whole:
                kernel(tensor.data_ptr(), size, offset, row, _TABLE_32, True, True)
                return
    with torch.no_grad():
        values = _values(tensor)
        _require_memory(values)
        if values.is_complex():
            offset *= 2
        # MPS has no float64
        if values.is_cpu or on_cpu or values.device.type == "mps":
            _by_kernel(row, values, bucket_size, offset)
        else:
            _by_torch(row, values, bucket_size, offset)


def sampled(
    tensor: torch.Tensor, limit: int = 4096, offset: int = 0, total: int | None = None
) -> tuple[torch.Tensor, int]:
    """Return at most ``limit`` evenly spaced elements of a tensor, and the index of the first of them in the sample.

    The elements are those whose flat index is a multiple of a stride that depends on ``total`` and ``limit`` alone, so
    the samples of shards make up the sample of the whole. Give the index to :func:`measure_into` as its ``offset``. A
    tensor that is not larger than ``limit`` is returned itself.

    Args:
        tensor: The whole tensor, or a shard that is contiguous in it.
        limit: Elements in the sample of the whole.
        offset: Flat index of the tensor's first element in the whole.
        total: Elements of the whole; by default the tensor is the whole.

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
    _require_memory(tensor)
    places, extent = _places(tensor.shape, tensor.stride(), start, stride)
    return tensor.as_strided((extent,), (1,)).index_select(0, places.to(tensor.device)), index


def splitmix64(number: Any) -> Any:
    """Return the pseudo-random 64 bits that belong to an unsigned 64-bit number, or to each one of an array."""
    mixed = number + _STEP
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT_3)


def _signs(words: np.ndarray) -> np.ndarray:
    """Return a row of -1 and 1 for each 64-bit word, -1 where its bit is set, beginning with the lowest."""
    bits = (words[:, None] >> np.arange(SKETCH, dtype=np.uint64)) & _ONE
    return 1 - 2 * bits.astype(np.float64)


_TABLE = _signs(splitmix64(~np.arange(BLOCK // SKETCH, dtype=np.uint64)))
_TABLE_32 = _TABLE.astype(np.float32).reshape(-1)


@functools.lru_cache(maxsize=4096)
def _stride(total: int, limit: int) -> int:
    """Return 1 if everything fits, else the least odd prime that leaves at most ``limit`` elements of ``total``.

    A prime, for a stride that shares a factor with the sizes of the tensor would meet few of its columns.
    """
    if total <= limit:
        return 1
    stride = max(-(-total // limit), 3) | 1
    while any(stride % divisor == 0 for divisor in range(3, math.isqrt(stride) + 1, 2)):
        stride += 2
    return stride


@functools.lru_cache(maxsize=128)
def _places(shape: tuple[int, ...], strides: tuple[int, ...], start: int, stride: int) -> tuple[torch.Tensor, int]:
    """Return where every ``stride``-th element is, counted from the first one's memory, and how far they reach."""
    positions = np.arange(start, math.prod(shape), stride)
    indices = np.unravel_index(positions, shape)
    places = sum(along * step for along, step in zip(indices, strides))
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
    return torch.from_numpy(places), extent


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor with the values of one of any layout, or say why there are none to be read."""
    if type(tensor) not in _PLAIN_TYPES:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            name = type(tensor).__qualname__
            raise ValueError(f"a tensor of type {name} cannot be measured: it has its own dispatch")
        tensor = tensor.as_subclass(torch.Tensor)
    for kind, found in (("nested", tensor.is_nested), ("quantized", tensor.is_quantized), ("meta", tensor.is_meta)):
        if found:
            raise ValueError(f"a {kind} tensor cannot be measured: it has no plain values")
    if tensor.layout is torch.sparse_coo:
        return tensor.detach().coalesce().values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return tensor.detach().values()
    if tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout} cannot be measured")
    return tensor.detach()


def _require_memory(tensor: torch.Tensor) -> None:
    """Raise if the values cannot be read: torch itself would do so at the address 0, and end the process."""
    try:
        size = tensor.untyped_storage().nbytes()
    except RuntimeError as error:
        raise ValueError(f"a tensor without memory of its own cannot be measured: {error}") from error
    if not size and tensor.numel():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} cannot be measured: its memory was released")


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
    """Return the numbers of a piece as they read: parts of complex numbers apart, pending signs applied."""
    if piece.is_complex():
        piece = torch.view_as_real(piece.resolve_conj())
    return piece.resolve_neg()


def _kind(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of another one are measured in, which holds them exactly but for large integers."""
    if dtype in (torch.float32, torch.float64, torch.bfloat16):
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.float64


def _converted(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous piece of the dtype."""
    try:
        return piece.to(dtype).contiguous()
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(f"a tensor of dtype {piece.dtype} cannot be measured: {error}") from error


def _by_kernel(row: np.ndarray, tensor: torch.Tensor, bucket_size: int, offset: int) -> None:
    """Measure a tensor on the CPU, copying it there in buckets if it is elsewhere."""
    begins = True
    for bucket in [tensor] if tensor.is_cpu else _pieces(tensor, bucket_size):
        for piece in _prepared(bucket.cpu(), min(bucket_size, _CHUNK)):
            size = piece.numel()
            kernel = _kernel(piece.dtype)
            kernel(piece.data_ptr(), size, offset, row, _TABLE_32, begins, False)
            begins = False
            offset += size
    kernel(0, 0, offset, row, _TABLE_32, False, True)


def _prepared(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Yield a tensor of the CPU in parts that a kernel can read, of at most ``limit`` elements where it is copied."""
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


def _by_torch(row: np.ndarray, tensor: torch.Tensor, bucket_size: int, offset: int) -> None:
    """Measure a tensor on its device, by operators of torch in float64; one copy to the host at the end."""
    rows = []
    signs = _table_on(tensor.device)
    for piece in _pieces(tensor, max(bucket_size // 2, 1) if tensor.is_complex() else bucket_size):
        values = _converted(_real(piece), torch.float64).view(-1)
        rows.append(_row_by_torch(values, signs, offset))
        offset += values.numel()
    row[:] = merge(torch.stack(rows).cpu().numpy())


@functools.lru_cache(maxsize=8)
def _table_on(device: torch.device) -> torch.Tensor:
    """Return the table of signs on a device."""
    return torch.from_numpy(_TABLE).to(device)


def _row_by_torch(values: torch.Tensor, signs: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the row of values that are one-dimensional and float64, on their device."""
    nan, inf = values.isnan(), values.isinf()
    finite = ~(nan | inf)
    count = finite.sum()
    some = count.clamp(min=1)
    kept = torch.where(finite, values, 0.0)
    unknown = torch.full((), math.nan, dtype=torch.float64, device=values.device)
    mean = torch.where(count > 0, kept.sum() / some, unknown)
    deviation = torch.where(finite, kept - mean, 0.0)
    std = torch.where(count > 0, (deviation.square().sum() / some).sqrt(), unknown)
    if values.numel():
        low = torch.where(finite, values, math.inf).min()
        high = torch.where(finite, values, -math.inf).max()
    else:
        low = high = unknown
    numbers = [torch.full_like(unknown, values.numel())]
    numbers += [torch.where(count > 0, low, unknown), torch.where(count > 0, high, unknown), mean, std]
    numbers += [kept.abs().sum() / some, kept.square().sum().sqrt()]
    numbers += [(kept < 0).sum(), (kept > 0).sum(), (finite & (kept == 0)).sum(), nan.sum(), inf.sum()]
    first = torch.cat([values[:FIRST], unknown.expand(max(FIRST - values.numel(), 0))])
    return torch.cat([torch.stack([n.double() for n in numbers]), first, _sketch_by_torch(kept, signs, offset)])


def _sketch_by_torch(values: torch.Tensor, signs: torch.Tensor, offset: int) -> torch.Tensor:
    """Return the sketch of finite values, on their device."""
    before = offset % BLOCK
    after = -(before + values.numel()) % BLOCK
    blocks = torch.nn.functional.pad(values, (before, after)).view(-1, BLOCK // SKETCH, SKETCH)
    first = offset // BLOCK
    words = splitmix64(np.arange(first, first + len(blocks), dtype=np.uint64))
    of_blocks = torch.from_numpy(_signs(words)).to(values.device)
    return ((blocks * signs).sum(dim=1) * of_blocks).sum(dim=0)


Kernel = Callable[[int, int, int, np.ndarray, np.ndarray, bool, bool], None]
"""``kernel(address, count, offset, row, table, begins, ends)``: add values in memory to a row."""
_kernels: dict[torch.dtype, Kernel] = {}
_lock = threading.Lock()


def _kernel(dtype: torch.dtype) -> Kernel:
    """Return the kernel that reads values of a dtype, compiled on first use."""
    kernel = _kernels.get(dtype)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(dtype)
            if kernel is None:
                kernel = _kernels[dtype] = _compiled(dtype)
    return kernel


# What follows is compiled. While a row is filled, its MEAN is that of the values so far, STD holds the sum of the
# squares of their deviations from it, and ABS_MEAN the sum of magnitudes.
_accumulate: Any = None
_pointer: Any = None
_carray: Any = None
_mixed: Any = None


def _begin(row):
    """Make a row that of no values."""
    row[:] = 0.0
    row[MIN] = np.inf
    row[MAX] = -np.inf
    row[FIRST_AT : FIRST_AT + FIRST] = np.nan


def _end(row):
    """Turn the sums of a row into its statistics."""
    count = row[ELEMENTS] - row[NAN] - row[INF]
    row[POSITIVE] = count - row[NEGATIVE] - row[ZERO]
    if count == 0:
        row[MIN : STD + 1] = np.nan
        return
    row[L2] = math.sqrt(row[STD] + count * row[MEAN] * row[MEAN])
    row[STD] = math.sqrt(row[STD] / count)
    row[ABS_MEAN] /= count


def _centre(x):
    """Return about the mean of the values, from the first ones."""
    count = min(x.size, SKETCH)
    total = x.dtype.type(0)
    for k in range(count):
        total += x[k]
    return total / x.dtype.type(count)


def _scan(x, start, centre, table, columns):
    """Return sums over values of one block, of which x[0] is at ``start``, and write their sketch into ``columns``.

    The sums are of deviations from the centre, of their squares and of magnitudes; then come minimum, maximum, the
    number of negative values and that of zeros.
    """
    head = min(x.size, -start % SKETCH)
    rows = (x.size - head) // SKETCH
    total, squares, magnitude, low, high, negative, zero = _accumulate(
        x.ctypes.data + head * x.itemsize,
        table.ctypes.data + (start + head) % BLOCK * table.itemsize,
        columns.ctypes.data,
        rows,
        centre,
    )
    for k in range(x.size - rows * SKETCH):
        i = k if k < head else k + rows * SKETCH
        value = x[i]
        deviation = np.float64(value) - np.float64(centre)
        total += deviation
        squares += deviation * deviation
        magnitude += abs(np.float64(value))
        low = min(low, np.float64(value))
        high = max(high, np.float64(value))
        negative += value < 0
        zero += value == 0
        columns[(start + i) % SKETCH] += value * table[start + i]
    return total, squares, magnitude, low, high, negative, zero


def _add(count, centre, found, columns, word, row):
    """Add the sums over a block of ``count`` finite values to a row (Chan, Golub, LeVeque 1979)."""
    total, squares, magnitude, low, high, negative, zero = found
    before = row[ELEMENTS] - row[NAN] - row[INF]
    delta = centre + total / count - row[MEAN]
    part = count / (before + count)
    row[MEAN] += delta * part
    row[STD] += max(squares - total * total / count, 0.0) + delta * delta * before * part
    # without a change of sign it follows from sums about the centre, which round less
    row[ABS_MEAN] += abs(centre * count + total) if low >= 0 or high <= 0 else magnitude
    row[MIN] = min(row[MIN], low)
    row[MAX] = max(row[MAX], high)
    row[NEGATIVE] += negative
    row[ZERO] += zero
    for j in range(SKETCH):
        sign = 1.0 - 2.0 * np.float64((word >> np.uint64(j)) & _ONE)
        row[SKETCH_AT + j] += sign * columns[j]
    row[ELEMENTS] += count


def _careful(x, start, word, table, row):
    """Add a block to a row in float64, NaN and inf counted and left out."""
    values = np.zeros(x.size)
    kept = np.empty(x.size)
    count = 0
    for k in range(x.size):
        value = np.float64(x[k])
        if math.isfinite(value):
            values[k] = value
            kept[count] = value
            count += 1
        else:
            row[NAN if math.isnan(value) else INF] += 1
            row[ELEMENTS] += 1
    if count == 0:
        return
    centre = 0.0
    for k in range(count):
        centre += kept[k] / count
    columns, unused = np.empty(SKETCH), np.empty(SKETCH)
    found = _scan(values, start, centre, table, columns)
    if count < x.size:
        found = _scan(kept[:count], 0, centre, table, unused)
    _add(count, centre, found, columns, word, row)


def _block(x, start, word, table, columns, row):
    """Add a block to a row, in the precision of ``x`` if that will do."""
    centre = _centre(x)
    found = _scan(x, start, centre, table, columns)
    total, squares, magnitude, low, high = found[:5]
    # the limits are those of float32: no sum overflows, and no square that counts underflows; false with NaN and inf
    fits = squares <= 1e37 and (squares >= 1e-32 * x.size or low == high)
    if not fits:
        _careful(x, start, word, table, row)
        return
    if total * total > 0.5 * squares * x.size:
        # most of the squares would cancel
        centre = x.dtype.type(centre + total / x.size)
        found = _scan(x, start, centre, table, columns)
    _add(x.size, np.float64(centre), found, columns, word, row)


def _run(x, offset, table, row):
    """Add values to a row, by the blocks of the sketch."""
    seen = int(row[ELEMENTS])
    for k in range(min(FIRST - seen, x.size)):
        row[FIRST_AT + seen + k] = x[k]
    columns = np.empty(SKETCH, x.dtype)
    at = 0
    while at < x.size:
        start = (offset + at) % BLOCK
        stop = min(at + BLOCK - start, x.size)
        word = _mixed(np.uint64((offset + at) // BLOCK))
        _block(x[at:stop], start, word, table, columns, row)
        at = stop


def _of_float32(address, count, offset, row, table, begins, ends):
    """Add float32 values to a row."""
    if begins:
        _begin(row)
    _run(_carray(_pointer(address), (count,), np.float32), offset, table, row)
    if ends:
        _end(row)


def _of_float64(address, count, offset, row, table, begins, ends):
    """Add float64 values to a row."""
    if begins:
        _begin(row)
    _run(_carray(_pointer(address), (count,), np.float64), offset, table, row)
    if ends:
        _end(row)


def _of_bfloat16(address, count, offset, row, table, begins, ends):
    """Add bfloat16 values to a row: they are the upper halves of float32 values."""
    if begins:
        _begin(row)
    halves = _carray(_pointer(address), (count,), np.uint16)
    bits = np.empty(BLOCK, np.uint32)
    values = bits.view(np.float32)
    at = 0
    while at < count:
        size = min(count - at, BLOCK - (offset + at) % BLOCK)
        # of a slice, for an index that is a sum might be negative, and the loop is not vectorised
        part = halves[at : at + size]
        for k in range(size):
            bits[k] = np.uint32(part[k]) << np.uint32(16)
        _run(values[:size], offset + at, table, row)
        at += size
    if ends:
        _end(row)


_SOURCES = {torch.float32: _of_float32, torch.float64: _of_float64, torch.bfloat16: _of_bfloat16}
_HELPERS = ("_begin", "_end", "_scan", "_add", "_careful", "_block", "_run")


def _compiled(dtype: torch.dtype) -> Kernel:
    """Return the compiled kernel; the machine code is kept for other processes if there is a place that can be written.

    Numba is imported here, for it takes long. It finds the functions that a kernel calls among the module's globals,
    and cannot keep the code of closures: so those names are bound to the compiled functions now.
    """
    with extra.required():
        import numba
        from numba import types

    scope = globals()
    if _mixed is None:
        bound = {name: numba.njit(nogil=True)(scope[name]) for name in _HELPERS}
        bound["_centre"] = numba.njit(nogil=True, fastmath={"reassoc"})(_centre)
        bound["_mixed"] = numba.njit(nogil=True)(splitmix64)
        bound["_accumulate"], bound["_pointer"] = _intrinsics()
        bound["_carray"] = numba.carray
        scope.update(bound)
    row, table = types.Array(types.float64, 1, "C"), types.Array(types.float32, 1, "C")
    signature = types.void(types.int64, types.int64, types.int64, row, table, types.boolean, types.boolean)
    try:
        return numba.njit([signature], nogil=True, cache=True)(_SOURCES[dtype])
    except Exception:
        # the code cannot be kept or read back: no directory that can be written, a disk that is full
        return numba.njit([signature], nogil=True)(_SOURCES[dtype])


def _intrinsics() -> tuple[Any, Any]:
    """Return the functions that are written in LLVM's language: the loop of :func:`_scan`, and int to pointer."""
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def accumulate(typing, address, table, columns, rows, centre):
        def generate(context, builder, signature, arguments):
            found = _Loop(builder, signature.args[4] == types.float64, *arguments).generate()
            return context.make_tuple(builder, signature.return_type, found)

        number = types.int64
        return types.UniTuple(types.float64, 7)(number, number, number, number, centre), generate

    @intrinsic
    def pointer(typing, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

        return types.voidptr(types.int64), generate

    return accumulate, pointer


class _Loop:
    """Writes the loop over rows of 64 values as vector instructions.

    Numba's own compilation leaves such a loop scalar, for it sums up, compares and counts at once: ten times slower.
    Vectors wider than the processor's are split by LLVM.
    """

    SUMS, EXTREMES, COUNTS = slice(0, 3), slice(3, 5), slice(5, 7)

    def __init__(self, builder, double, address, table, columns, rows, centre):
        from llvmlite import ir

        self.ir, self.builder, self.double = ir, builder, double
        self.address, self.table, self.columns, self.rows = address, table, columns, rows
        self.lanes = 8 if double else 16
        self.bytes = 64 // self.lanes
        self.index = ir.IntType(64)
        self.float64 = ir.DoubleType()
        self.scalar = self.float64 if double else ir.FloatType()
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.wide = ir.VectorType(self.float64, self.lanes)
        self.integers = ir.VectorType(ir.IntType(8 * self.bytes), self.lanes)
        self.centre = self.splat(centre)
        self.zeros = ir.Constant(self.vector, [0.0] * self.lanes)

    def number(self, value):
        """Return an index that is constant."""
        return self.ir.Constant(self.index, value)

    def whole(self, value):
        """Return a vector of one constant integer."""
        return self.ir.Constant(self.integers, [value] * self.lanes)

    def splat(self, value):
        """Return a vector with one value in all lanes."""
        ir = self.ir
        nothing = ir.Constant(self.vector, ir.Undefined)
        single = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(single, nothing, mask)

    def place(self, address, kind):
        """Return a pointer to an address."""
        return self.builder.inttoptr(address, kind.as_pointer())

    def values(self, place):
        """Return the values at so many bytes from the first."""
        return self.builder.load(self.place(self.builder.add(self.address, place), self.vector), align=self.bytes)

    def signs(self, place):
        """Return the table's signs, which are float32, at so many bytes from the first one's."""
        kind = self.ir.VectorType(self.ir.FloatType(), self.lanes)
        signs = self.builder.load(self.place(self.builder.add(self.table, place), kind), align=4)
        return self.widened(signs) if self.double else signs

    def multiply_add(self, a, b, c):
        """Return a * b + c, rounded once where the processor can."""
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

    def magnitude(self, value):
        """Return the values without their signs."""
        bits = self.builder.bitcast(value, self.integers)
        return self.builder.bitcast(self.builder.and_(bits, self.whole((1 << (8 * self.bytes - 1)) - 1)), self.vector)

    def extreme(self, sign, a, b):
        """Return the lesser (``"<"``) or the greater values (``">"``) of two vectors; of NaN, anything."""
        return self.builder.select(self.builder.fcmp_ordered(sign, a, b), a, b)

    def counted(self, condition, count):
        """Return the counts, raised by one where the condition holds."""
        return self.builder.select(condition, self.builder.add(count, self.whole(1)), count)

    def summed(self, vectors):
        """Return the sum of vectors, by pairs: a chain of additions would round more often, and wait for each."""
        while len(vectors) > 1:
            vectors = [self.builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2])]
        return vectors[0]

    def taken(self, values, state):
        """Return the sums, extremes and counts with the vectors of a row added."""
        total, squares, magnitude, low, high, negative, zero = state
        deviations = [self.builder.fsub(value, self.centre) for value in values]
        square = self.zeros
        for deviation in deviations:
            square = self.multiply_add(deviation, deviation, square)
        for value in values:
            low, high = self.extreme("<", value, low), self.extreme(">", value, high)
            negative = self.counted(self.builder.fcmp_ordered("<", value, self.zeros), negative)
            zero = self.counted(self.builder.fcmp_ordered("==", value, self.zeros), zero)
        return [
            self.builder.fadd(total, self.summed(deviations)),
            self.builder.fadd(squares, square),
            self.builder.fadd(magnitude, self.summed([self.magnitude(value) for value in values])),
            low,
            high,
            negative,
            zero,
        ]

    def generate(self):
        """Write the loop and return its seven results as float64; the sketch is stored."""
        ir, builder = self.ir, self.builder
        parts = 64 // self.lanes
        far = [ir.Constant(self.vector, [edge] * self.lanes) for edge in (math.inf, -math.inf)]
        initial = [self.zeros] * 3 + far + [self.whole(0)] * 2 + [self.zeros] * parts
        entry, body, test, done = builder.basic_block, *map(builder.append_basic_block, ("body", "test", "done"))
        builder.branch(test)

        builder.position_at_end(test)
        row = builder.phi(self.index)
        state = [builder.phi(value.type) for value in initial]
        builder.cbranch(builder.icmp_signed("<", row, self.rows), body, done)

        builder.position_at_end(body)
        values, sketch = [], []
        for part, before in enumerate(state[7:]):
            place = builder.add(builder.mul(row, self.number(64 * self.bytes)), self.number(64 * part))
            signs = self.signs(builder.add(builder.mul(row, self.number(4 * 64)), self.number(4 * self.lanes * part)))
            values.append(self.values(place))
            sketch.append(self.multiply_add(values[-1], signs, before))
        taken = self.taken(values, state[:7]) + sketch
        following = builder.add(row, self.number(1))
        builder.branch(test)
        for phi, first, later in zip([row, *state], [self.number(0), *initial], [following, *taken]):
            phi.add_incoming(first, entry)
            phi.add_incoming(later, body)

        builder.position_at_end(done)
        for part, value in enumerate(state[7:]):
            builder.store(
                value, self.place(builder.add(self.columns, self.number(64 * part)), self.vector), align=self.bytes
            )
        return (
            [self.reduced("fadd", self.widened(value)) for value in state[self.SUMS]]
            + [self.widened(self.reduced(name, value)) for name, value in zip(("fmin", "fmax"), state[self.EXTREMES])]
            + [builder.sitofp(self.reduced("add", value), self.float64) for value in state[self.COUNTS]]
        )

    def widened(self, value):
        """Return a number or vector as float64."""
        wide = self.wide if isinstance(value.type, self.ir.VectorType) else self.float64
        return self.builder.fpext(value, wide)

    def reduced(self, name, vector):
        """Return the sum, minimum or maximum over a vector."""
        ir, module, element = self.ir, self.builder.module, vector.type.element
        letters = f"f{64 if element == self.float64 else 32}" if name[0] == "f" else str(element)
        full = f"llvm.vector.reduce.{name}.v{self.lanes}{letters}"
        given = [ir.Constant(element, 0.0), vector] if name == "fadd" else [vector]
        function = module.globals.get(full)
        if function is None:
            function = ir.Function(module, ir.FunctionType(element, [value.type for value in given]), full)
        return self.builder.call(function, given, fastmath=("reassoc",) if name == "fadd" else ())
