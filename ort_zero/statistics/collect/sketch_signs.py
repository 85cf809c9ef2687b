"""Compute the signs of the elements in the sketch of a tensor.

The element with flat index ``i`` (in row-major order) is in block ``b = i // BLOCK`` and column ``j = i % SKETCH``. It
is added to number ``j`` of the sketch times ``T[i % BLOCK]`` times ``B(b, j)``, where

* ``B(b, j)`` is -1 if bit ``j`` of ``splitmix64(b)`` is set, else 1;
* ``T[SKETCH * r + j]`` is -1 if bit ``j`` of ``splitmix64(2**64 - 1 - r)`` is set, else 1.

NaN and inf are added as 0. A complex number is two elements, its real part and its imaginary part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ort_zero.statistics.rows import SKETCH

BLOCK = 4096
"""Number of elements in a block, whose signs come from one table: a block and the table fit into the L1 cache."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)


def splitmix64(number: Any) -> Any:
    """Return the 64 pseudo-random bits of an unsigned 64-bit number, or of each number in an array."""
    mixed = number + _STEP
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _MIX_1
    mixed = (mixed ^ (mixed >> _SHIFT_2)) * _MIX_2
    return mixed ^ (mixed >> _SHIFT_3)


def signs_of(words: np.ndarray) -> np.ndarray:
    """Turn the bits of 64-bit words into signs, float64 [words, SKETCH], lowest bit first: -1 for a set bit, else 1."""
    bits = (words[:, None] >> np.arange(SKETCH, dtype=np.uint64)) & _ONE
    return 1 - 2 * bits.astype(np.float64)


def signs_of_blocks(first: int, count: int) -> np.ndarray:
    """Return ``B(b, j)`` for `count` blocks, beginning with block `first`, float64 [count, SKETCH]."""
    return signs_of(splitmix64(np.arange(first, first + count, dtype=np.uint64)))


TABLE = signs_of(splitmix64(~np.arange(BLOCK // SKETCH, dtype=np.uint64)))
"""The table ``T``, float64 [BLOCK // SKETCH, SKETCH]."""
