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
        power = 0
        while length:  # a byte of zero multiplies the polynomial of the bytes before by x ** 8
            if length & 1:
                first = _product(_zeros(power), first)
            length >>= 1
            power += 1
        return first ^ second


_POLYNOMIAL = 0xEDB88320
"""The divisor of CRC-32; as in each polynomial here, the highest bit has the lowest power of x."""

__all__ = ["crc32", "crc32_combine"]


def _product(first: int, second: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the divisor of CRC-32."""
    result = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            result ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return result


@functools.cache
def _zeros(power: int) -> int:
    """Return the polynomial that appends ``2 ** power`` bytes of zero."""
    return 1 << 23 if power == 0 else _product(_zeros(power - 1), _zeros(power - 1))
