"""Compile the loops that measure float32 values on the CPU. Importing this module imports numba.

A row that is not complete holds sums: MEAN is the mean of the values so far, STD the sum of squared deviations from
MEAN, ABS_MEAN the sum of magnitudes.

Values are read in blocks of :data:`~.rows.BLOCK`, which stay in the L1 cache, and most of a block by a loop that is
generated as vector instructions. A plain numba loop is compiled to scalar code, as the loop sums, compares and counts
at once; separate loops take twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ort_zero.statistics import extra
from ort_zero.statistics import rows as column
from ort_zero.statistics.rows import BLOCK, FIRST, FIRST_AT, SKETCH, SKETCH_AT, TABLE, splitmix64

with extra.required():
    import numba
    import numpy as np
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

Kernel = Callable[[np.ndarray, int, np.ndarray], bool]
"""``kernel(values, offset, row)``: write the statistics of float32 values into a row. `offset` is the flat index of the
first value within its tensor. False: a sum in float32 would not be exact enough, or there are NaN and inf."""

TABLE_32 = TABLE.astype(np.float32).reshape(-1)
"""The signs within a block, float32 [BLOCK]."""
LANES = 16
"""Number of float32 values in a vector."""
_ONE = np.uint64(1)
_mixed = numba.njit(nogil=True)(splitmix64)


# --- the loop of vector instructions ----------------------------------------------------------------------------------


def _accumulate(typing, address, table, columns, rows, centre):
    """Return the sums, extremes and counts over rows of 64 values, and store their sketch.

    Only compiled code calls this function. `address`, `table` and `columns` are the addresses of the first value, of
    its sign, and of the 64 numbers of the sketch, all float32. `centre` is subtracted before values are summed and
    squared. The results are seven float64: sums of deviations, of squares, of magnitudes; minimum; maximum; numbers of
    negatives, of zeros.
    """

    def generate(context, builder, signature, arguments):
        return context.make_tuple(builder, signature.return_type, _generate_loop(builder, *arguments))

    number = types.int64
    return types.UniTuple(types.float64, 7)(number, number, number, number, centre), generate


_accumulated: Any = intrinsic(_accumulate)


def _generate_loop(builder, address, table, columns, rows, centre):
    """Generate the loop as LLVM code, and return its seven results as float64.

    A row of 64 values is four vectors; LLVM splits vectors that are wider than the processor's.
    """
    index, double = ir.IntType(64), ir.DoubleType()
    vector, wide = (ir.VectorType(kind, LANES) for kind in (ir.FloatType(), double))
    integers = ir.VectorType(ir.IntType(32), LANES)
    centre = _in_all_lanes(builder, centre, vector)
    zeros = ir.Constant(vector, [0.0] * LANES)
    one, without_sign = (ir.Constant(integers, [value] * LANES) for value in (1, (1 << 31) - 1))

    def place(base, offset):
        return builder.inttoptr(builder.add(base, offset), vector.as_pointer())

    def load(base, row, part):
        at = builder.add(builder.mul(row, ir.Constant(index, 4 * SKETCH)), ir.Constant(index, 4 * LANES * part))
        return builder.load(place(base, at), align=4)

    def multiply_add(a, b, c):
        # rounded once if the processor has such an instruction
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def extreme(sign, a, b):
        return builder.select(builder.fcmp_ordered(sign, a, b), a, b)

    def counted(sign, value, count):
        return builder.select(builder.fcmp_ordered(sign, value, zeros), builder.add(count, one), count)

    def summed(vectors):
        # pairwise: a chain of additions would round more often, and each would wait for the last
        while len(vectors) > 1:
            vectors = [builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2])]
        return vectors[0]

    def after_row(row, state):
        total, squares, magnitude, low, high, negative, zero, *sketch = state
        values = []
        for part in range(len(sketch)):
            values.append(load(address, row, part))
            sketch[part] = multiply_add(values[-1], load(table, row, part), sketch[part])
        deviations = [builder.fsub(value, centre) for value in values]
        square = zeros
        for deviation in deviations:
            square = multiply_add(deviation, deviation, square)
        for value in values:
            low, high = extreme("<", value, low), extreme(">", value, high)
            negative, zero = counted("<", value, negative), counted("==", value, zero)
        bits = [builder.and_(builder.bitcast(value, integers), without_sign) for value in values]
        magnitudes = summed([builder.bitcast(value, vector) for value in bits])
        sums = [builder.fadd(total, summed(deviations)), builder.fadd(squares, square)]
        return [*sums, builder.fadd(magnitude, magnitudes), low, high, negative, zero, *sketch]

    far = [ir.Constant(vector, [edge] * LANES) for edge in (math.inf, -math.inf)]
    none = ir.Constant(integers, [0] * LANES)
    initial = [zeros] * 3 + far + [none] * 2 + [zeros] * (SKETCH // LANES)
    entry, body, test, done = builder.basic_block, *map(builder.append_basic_block, ("body", "test", "done"))
    builder.branch(test)
    builder.position_at_end(test)
    row = builder.phi(index)
    state = [builder.phi(value.type) for value in initial]
    builder.cbranch(builder.icmp_signed("<", row, rows), body, done)
    builder.position_at_end(body)
    following = [builder.add(row, ir.Constant(index, 1)), *after_row(row, state)]
    builder.branch(test)
    for phi, first, later in zip([row, *state], [ir.Constant(index, 0), *initial], following):
        phi.add_incoming(first, entry)
        phi.add_incoming(later, body)
    builder.position_at_end(done)
    for part, value in enumerate(state[7:]):
        builder.store(value, place(columns, ir.Constant(index, 4 * LANES * part)), align=4)
    sums = [_reduced(builder, "fadd", builder.fpext(value, wide)) for value in state[:3]]
    extremes = [_reduced(builder, name, value) for name, value in zip(("fmin", "fmax"), state[3:5])]
    counts = [builder.sitofp(_reduced(builder, "add", value), double) for value in state[5:7]]
    return [*sums, *(builder.fpext(value, double) for value in extremes), *counts]


def _in_all_lanes(builder, value, vector):
    nothing = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(single, nothing, mask)


def _reduced(builder, name, vector):
    """Return the sum, minimum or maximum over a vector."""
    module, element = builder.module, vector.type.element
    letters = f"f{64 if element == ir.DoubleType() else 32}" if name[0] == "f" else str(element)
    full = f"llvm.vector.reduce.{name}.v{vector.type.count}{letters}"
    arguments = [ir.Constant(element, 0.0), vector] if name == "fadd" else [vector]
    function = module.globals.get(full)
    if function is None:
        function = ir.Function(module, ir.FunctionType(element, [value.type for value in arguments]), full)
    return builder.call(function, arguments, fastmath=("reassoc",) if name == "fadd" else ())


# --- blocks -----------------------------------------------------------------------------------------------------------


@numba.njit(nogil=True)
def _begin(row):
    """Clear a row: the statistics of zero values."""
    row[:] = 0.0
    row[column.MIN] = np.inf
    row[column.MAX] = -np.inf
    row[FIRST_AT : FIRST_AT + FIRST] = np.nan


@numba.njit(nogil=True)
def _end(row):
    """Turn the sums in a row into statistics."""
    count = row[column.ELEMENTS]
    row[column.POSITIVE] = count - row[column.NEGATIVE] - row[column.ZERO]
    if count == 0:
        row[column.MIN : column.STD + 1] = np.nan
        return
    row[column.L2] = math.sqrt(row[column.STD] + count * row[column.MEAN] * row[column.MEAN])
    row[column.STD] = math.sqrt(row[column.STD] / count)
    row[column.ABS_MEAN] /= count


@numba.njit(nogil=True)
def _scan(x, start, centre, columns):
    """Return sums over values of one block, and write their sketch into ``columns``.

    Position ``start`` of the block holds ``x[0]``. The results are the sums of deviations from the centre, of squared
    deviations and of magnitudes, then minimum, maximum, the number of negative values and the number of zeros.
    """
    head = min(x.size, -start % SKETCH)
    rows = (x.size - head) // SKETCH
    total, squares, magnitude, low, high, negative, zero = _accumulated(
        x.ctypes.data + head * x.itemsize,
        TABLE_32.ctypes.data + (start + head) % BLOCK * TABLE_32.itemsize,
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
        columns[(start + i) % SKETCH] += value * TABLE_32[start + i]
    return total, squares, magnitude, low, high, negative, zero


@numba.njit(nogil=True)
def _add(count, centre, sums, sketch, word, row):
    """Add the sums over a block of ``count`` finite values to a row (Chan, Golub, LeVeque 1979)."""
    total, squares, magnitude, low, high, negative, zero = sums
    before = row[column.ELEMENTS]
    delta = centre + total / count - row[column.MEAN]
    part = count / (before + count)
    row[column.MEAN] += delta * part
    row[column.STD] += max(squares - total * total / count, 0.0) + delta * delta * before * part
    # if all values have one sign, the magnitudes follow from the deviations, whose sum has a smaller rounding error
    row[column.ABS_MEAN] += abs(centre * count + total) if low >= 0 or high <= 0 else magnitude
    row[column.MIN] = min(row[column.MIN], low)
    row[column.MAX] = max(row[column.MAX], high)
    row[column.NEGATIVE] += negative
    row[column.ZERO] += zero
    for j in range(SKETCH):
        sign = 1.0 - 2.0 * np.float64((word >> np.uint64(j)) & _ONE)
        row[SKETCH_AT + j] += sign * sketch[j]
    row[column.ELEMENTS] += count


@numba.njit(nogil=True)
def _add_block(x, start, word, columns, row):
    """Add a block to a row; return False where float32 is not exact enough."""
    some = min(x.size, SKETCH)
    centre = np.float32(0)
    for k in range(some):
        centre += x[k]
    centre = centre / np.float32(some)
    for attempt in range(2):
        sums = _scan(x, start, centre, columns)
        total, squares, magnitude, low, high, negative, zero = sums
        # within these limits no float32 sum overflows and no relevant square underflows; False with NaN and inf
        fits = squares <= 1e37 and (squares >= 1e-32 * x.size or low == high)
        if not fits:
            return False
        if attempt == 1 or total * total <= 0.5 * squares * x.size:
            _add(x.size, np.float64(centre), sums, columns, word, row)
            return True
        # scan again about the mean: with this centre most digits of the variance would cancel
        centre = np.float32(centre + total / x.size)
    return False


def _measure(x, offset, row):
    """Write the statistics of float32 values into a row, block by block of the sketch; see :data:`Kernel`."""
    _begin(row)
    for k in range(min(FIRST, x.size)):
        row[FIRST_AT + k] = x[k]
    columns = np.empty(SKETCH, np.float32)
    at = 0
    while at < x.size:
        start = (offset + at) % BLOCK
        stop = min(at + BLOCK - start, x.size)
        word = _mixed(np.uint64((offset + at) // BLOCK))
        if not _add_block(x[at:stop], start, word, columns, row):
            return False
        at = stop
    _end(row)
    return True


def compiled() -> Kernel:
    """Return the compiled kernel.

    Numba stores the machine code for other processes if numba's cache folder is writable. The code contains constants
    of :mod:`~ort_zero.statistics.rows`, but numba compiles again only when this file changes.
    """
    values = types.Array(types.float32, 1, "C", readonly=False, aligned=True)
    signature = types.boolean(values, types.int64, types.Array(types.float64, 1, "C"))
    try:
        return numba.njit([signature], nogil=True, cache=True)(_measure)
    except Exception:
        # no cache folder is writable, the disk is full, or stored code is unreadable: compile without the cache
        return numba.njit([signature], nogil=True)(_measure)
