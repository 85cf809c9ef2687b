"""Parse numbers of bytes as users write them (``"5GB"``, ``"2GiB"``), and format them for messages."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_PERCENTAGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_PREFIXES = {1000: ("", "k", "M", "G", "T"), 1024: ("", "Ki", "Mi", "Gi", "Ti")}
_UNITS = {f"{prefix}B": base**power for base, names in _PREFIXES.items() for power, prefix in enumerate(names)}
"""Number of bytes of each unit: 1 for "B", 1000 for "kB", 1024 for "KiB", up to "TB" and "TiB"."""
_BY_LOWER_CASE = {"": 1, **{unit.lower(): size for unit, size in _UNITS.items()}}
_LETTERS = {letter: 1024**power for power, letter in enumerate("kmgt", start=1)}
_DECIMALS = {1000: (0, 1, 1, 2), 1024: (0, 0, 0, 2)}
"""Digits after the decimal point of a size, by base and power of its unit."""


def parse_size(text: int | str, *, bare_letters: bool = False) -> int:
    """Return a number of bytes: ``"5GB"`` (powers of 1000), ``"2GiB"`` (powers of 1024), or a plain integer.

    Args:
        text: the user's text; case and spaces around number and unit are ignored.
        bare_letters: also accept ``"6G"``, which means GiB.

    Raises:
        ValueError: `text` is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(str(text))
    units = _BY_LOWER_CASE | _LETTERS if bare_letters else _BY_LOWER_CASE
    unit = units.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size; write it as 5GB, 500MB, 2GiB or a number of bytes")
    return size


def parse_share_or_size(text: int | str) -> float | int:
    """Return a memory budget: ``"65%"`` as the share 0.65, a float, and ``"6GiB"`` or ``"6G"`` as bytes, an int.

    Raises:
        ValueError: `text` is neither a percentage nor a size.
    """
    match = _PERCENTAGE.fullmatch(str(text))
    return float(match[1]) / 100 if match else parse_size(text, bare_letters=True)


def size_in(size: float, unit: str, decimals: int = 1) -> str:
    """Return `size` bytes in one unit, such as ``"1536.0 MiB"`` for "MiB"."""
    return f"{size / _UNITS[unit]:.{decimals}f} {unit}"


def duration(size: int, seconds: float) -> str:
    """Return how long bytes took, and their rate: ``"in 2.0 s (1.25 GB/s)"``."""
    return f"in {seconds:.1f} s ({size_in(size / max(seconds, 1e-9), 'GB', 2)}/s)"


def decimal_size(size: float) -> str:
    """Return `size` bytes in a suitable unit: ``"999 B"``, ``"1.5 MB"``, ``"2.25 GB"`` and above."""
    return _suited(size, 1000)


def binary_size(size: float) -> str:
    """Return `size` bytes in a suitable unit: ``"1023 B"``, ``"1 MiB"``, ``"2.25 GiB"`` and above."""
    return _suited(size, 1024)


def _suited(size: float, base: int) -> str:
    power = 0
    while power < 3 and abs(size) >= base ** (power + 1):
        power += 1
    return size_in(size, f"{_PREFIXES[base][power]}B", _DECIMALS[base][power])
