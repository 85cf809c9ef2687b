"""Generate the kernels' loop over a block of values as vector instructions.

A plain numba loop is compiled to scalar code, as the loop sums, compares and counts at once; separate loops for sums,
extremes, counts and sketch take 4.5 times as long. Collecting statistics would then cost more than a tenth of a step.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _accumulate(typing, address, table, columns, rows, centre):
    """Return the sums, extremes and counts over rows of 64 values, and store their sketch.

    Only compiled code calls this function. Numba does not detect changes here: edit :mod:`.kernels` in the same commit.
    `address`, `table` and `columns` are the addresses of the first value (float32 or float64 like `centre`), of its
    float32 sign, and of the 64 numbers of the sketch, of the values' type. `centre` is subtracted before values are
    summed and squared. The results are seven float64: sums of deviations, of squares, of magnitudes; minimum; maximum;
    numbers of negatives, of zeros.
    """

    def generate(context, builder, signature, arguments):
        results = _generate_loop(builder, signature.args[4] == types.float64, *arguments)
        return context.make_tuple(builder, signature.return_type, results)

    number = types.int64
    return types.UniTuple(types.float64, 7)(number, number, number, number, centre), generate


accumulate: Any = intrinsic(_accumulate)
"""The intrinsic for compiled code, with the arguments of :func:`_accumulate` except `typing`."""


def _generate_loop(builder, double, address, table, columns, rows, centre):
    """Generate the loop as LLVM code, and return its seven results as float64.

    A row of 64 values is a few vectors; LLVM splits vectors that are wider than the processor's.
    """
    size = 8 if double else 4
    lanes = 64 // size
    index, wide = ir.IntType(64), ir.VectorType(ir.DoubleType(), lanes)
    vector = ir.VectorType(ir.DoubleType() if double else ir.FloatType(), lanes)
    integers = ir.VectorType(ir.IntType(8 * size), lanes)
    centre = _in_all_lanes(builder, centre, vector)
    zeros = ir.Constant(vector, [0.0] * lanes)
    one, without_sign = (ir.Constant(integers, [value] * lanes) for value in (1, (1 << (8 * size - 1)) - 1))

    def place(base, offset, kind):
        return builder.inttoptr(builder.add(base, offset), kind.as_pointer())

    def load(base, row, row_bytes, offset, kind, align):
        at = builder.add(builder.mul(row, ir.Constant(index, row_bytes)), ir.Constant(index, offset))
        return builder.load(place(base, at, kind), align=align)

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
            signs = load(table, row, 4 * 64, 4 * lanes * part, ir.VectorType(ir.FloatType(), lanes), 4)
            values.append(load(address, row, size * 64, 64 * part, vector, size))
            sketch[part] = multiply_add(values[-1], builder.fpext(signs, wide) if double else signs, sketch[part])
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

    far = [ir.Constant(vector, [edge] * lanes) for edge in (math.inf, -math.inf)]
    none = ir.Constant(integers, [0] * lanes)
    initial = [zeros] * 3 + far + [none] * 2 + [zeros] * size
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
        builder.store(value, place(columns, ir.Constant(index, 64 * part), vector), align=size)
    sums = [_reduced(builder, "fadd", builder.fpext(value, wide) if not double else value) for value in state[:3]]
    extremes = [_reduced(builder, name, value) for name, value in zip(("fmin", "fmax"), state[3:5])]
    counts = [builder.sitofp(_reduced(builder, "add", value), ir.DoubleType()) for value in state[5:7]]
    return [*sums, *(value if double else builder.fpext(value, ir.DoubleType()) for value in extremes), *counts]


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
