"""Compute the CRC-32 of zip files, with isal if it is installed, else with the standard library.

isal checks several gigabytes per second, zlib about one. Python's standard library has no function that joins the
checksums of two neighbouring pieces, so this module has one.
"""

from __future__ import annotations

import functools

try:
    from isal.isal_zlib import crc32, crc32_combine
except ImportError:
    from zlib import crc32

    def crc32_combine(first: int, second: int, length: int, /) -> int:  # type: ignore[misc]
        """Return the CRC-32 of two neighbouring pieces together.

        Args:
            first: CRC-32 of the first piece.
            second: CRC-32 of the second piece.
            length: bytes of the second piece.
        """
        return _append_zeros(first, length) ^ second


_POLYNOMIAL = 0xEDB88320
_BITS = 32

__all__ = ["crc32", "crc32_combine"]


def _append_zeros(crc: int, length: int) -> int:
    """Return the CRC-32 `crc` advanced by `length` bytes of zero, in as many steps as `length` has bits."""
    power = 0
    while length:
        if length & 1:
            crc = _apply(_operator(power), crc)
        length >>= 1
        power += 1
    return crc


def _apply(columns: tuple[int, ...], vector: int) -> int:
    """Return the product of a matrix over GF(2), in the form of its columns, and a vector of bits."""
    result = 0
    for column in columns:
        if vector & 1:
            result ^= column
        vector >>= 1
    return result


@functools.cache
def _operator(power: int) -> tuple[int, ...]:
    """Return the matrix that advances a CRC-32 by ``2 ** power`` bytes of zero."""
    if power == 0:
        one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(_BITS - 1)))
        columns = one_bit
        for _ in range(3):  # eight bits are three doublings
            columns = tuple(_apply(columns, column) for column in columns)
        return columns
    half = _operator(power - 1)
    return tuple(_apply(half, column) for column in half)
