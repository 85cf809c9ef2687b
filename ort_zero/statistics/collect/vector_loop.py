"""Generate the kernels' loop over a block of values as vector instructions.

A plain numba loop takes about twice the time; collecting statistics would then cost more than a tenth of a step.
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

    Args:
        typing: numba's typing context.
        address: int64, address of the first value; values are float32 or float64 like `centre`.
        table: int64, address of the float32 sign of the first value.
        columns: int64, address of the 64 numbers of the sketch, of the values' type.
        rows: int64, number of rows of 64 values.
        centre: number to subtract from values before they are summed and squared.

    Returns:
        Seven float64: sums of deviations, of squares, of magnitudes; minimum; maximum; numbers of negatives, of zeros.
    """

    def generate(context, builder, signature, arguments):
        results = _VectorLoop(builder, signature.args[4] == types.float64, *arguments).generate()
        return context.make_tuple(builder, signature.return_type, results)

    number = types.int64
    return types.UniTuple(types.float64, 7)(number, number, number, number, centre), generate


accumulate: Any = intrinsic(_accumulate)
"""The intrinsic for compiled code, with the arguments of :func:`_accumulate` except `typing`."""


class _VectorLoop:
    """The LLVM code of the loop over rows of 64 values, as vector instructions.

    Numba compiles this loop to scalar code, ten times slower, as the loop sums, compares and counts at once. LLVM
    splits vectors that are wider than the processor's.
    """

    SUMS, EXTREMES, COUNTS = slice(0, 3), slice(3, 5), slice(5, 7)

    def __init__(self, builder, double, address, table, columns, rows, centre):
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
        """Return a constant index."""
        return self.ir.Constant(self.index, value)

    def whole(self, value):
        """Return a vector with one constant integer in all lanes."""
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
        """Load a vector of values, `place` bytes behind the first value."""
        return self.builder.load(self.place(self.builder.add(self.address, place), self.vector), align=self.bytes)

    def signs(self, place):
        """Load a vector of float32 signs, `place` bytes behind the first sign of the table."""
        kind = self.ir.VectorType(self.ir.FloatType(), self.lanes)
        signs = self.builder.load(self.place(self.builder.add(self.table, place), kind), align=4)
        return self.widened(signs) if self.double else signs

    def multiply_add(self, a, b, c):
        """Return a * b + c, rounded once if the processor has such an instruction."""
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

    def magnitude(self, value):
        """Return the absolute values of a vector."""
        bits = self.builder.bitcast(value, self.integers)
        return self.builder.bitcast(self.builder.and_(bits, self.whole((1 << (8 * self.bytes - 1)) - 1)), self.vector)

    def extreme(self, sign, a, b):
        """Return the lesser (``"<"``) or greater (``">"``) values of two vectors; undefined where a value is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(sign, a, b), a, b)

    def counted(self, condition, count):
        """Return a vector of counts, plus one in each lane where the condition is true."""
        return self.builder.select(condition, self.builder.add(count, self.whole(1)), count)

    def summed(self, vectors):
        """Sum vectors pairwise: a chain of additions would round more often, and each would wait for the last."""
        while len(vectors) > 1:
            vectors = [self.builder.fadd(a, b) for a, b in zip(vectors[::2], vectors[1::2])]
        return vectors[0]

    def taken(self, values, state):
        """Return the sums, extremes and counts after adding the vectors of a row."""
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
        """Generate the loop, which stores the sketch, and return its seven results as float64."""
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
        arguments = [ir.Constant(element, 0.0), vector] if name == "fadd" else [vector]
        function = module.globals.get(full)
        if function is None:
            function = ir.Function(module, ir.FunctionType(element, [value.type for value in arguments]), full)
        return self.builder.call(function, arguments, fastmath=("reassoc",) if name == "fadd" else ())
