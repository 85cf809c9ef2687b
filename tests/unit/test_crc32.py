"""CRC-32 without isal: the same numbers as with it."""

from __future__ import annotations

import importlib
import random
import sys
import zlib

import pytest

from ort_zero.utils import crc32 as checksums


@pytest.fixture
def without_isal(monkeypatch):
    """Give the module as it is where isal is not installed."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal", None)
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        yield importlib.reload(checksums)
    importlib.reload(checksums)


def test_without_isal_pieces_combine_to_the_checksum_of_the_whole(without_isal):
    assert without_isal.crc32 is zlib.crc32
    data = random.Random(0).randbytes(70_000)
    for cut in (0, 1, 2, 255, 4096, 65_537, len(data)):
        first, second = data[:cut], data[cut:]
        joined = without_isal.crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
        assert joined == zlib.crc32(data), cut


def test_without_isal_pieces_longer_than_four_gigabytes_combine(without_isal):
    # joining is associative: a long run of zeros in one step, and in many
    length, joined = 5 * 2**30 + 7, zlib.crc32(b"start")
    for part in (2**32, 2**30, 7):
        zeros = without_isal.crc32_combine(0, 0, part)
        assert zeros == 0
        joined = without_isal.crc32_combine(joined, 0, part)
    assert joined == without_isal.crc32_combine(zlib.crc32(b"start"), 0, length)
