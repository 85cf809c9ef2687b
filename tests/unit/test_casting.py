"""Casts with numpy have the very bits of torch's, and NaN and inf are found in raw bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ort_zero.checkpoint.files import casting
from ort_zero.checkpoint.files.dtypes import torch_dtype

FLOATS = ("F16", "BF16", "F32", "F64")
NAMES = {code: torch_dtype(code) for code in (*FLOATS, "F8_E4M3", "F8_E5M2")}


def raw(values: torch.Tensor) -> bytearray:
    return bytearray(values.contiguous().view(torch.uint8).numpy().tobytes())


def samples(code: str) -> torch.Tensor:
    """Return every bit pattern of a 16-bit dtype; of a wider one those near roundings to 16 bits, and many others."""
    if code in ("F16", "BF16"):
        return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(NAMES[code])
    generator = np.random.default_rng(0)
    wide = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    halves = torch.cat([wide.view(torch.float16).double(), wide.view(torch.bfloat16).double()])
    if code == "F64":
        bits = torch.from_numpy(generator.integers(-(1 << 63), (1 << 63) - 1, 1 << 16, dtype=np.int64))
        near = torch.from_numpy(np.nextafter(halves.numpy(), np.inf)), torch.from_numpy(np.nextafter(halves.numpy(), 0))
        middle = (halves[1:] + halves[:-1]) / 2
        ties = [middle, middle * (1 + 2**-40), middle * (1 - 2**-40)]
        return torch.cat([halves, *near, *ties, bits.view(torch.float64)])
    bits = torch.from_numpy(generator.integers(-(1 << 31), (1 << 31) - 1, 1 << 18, dtype=np.int64).astype(np.int32))
    upper = wide.to(torch.int32) << 16
    ties = torch.cat([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000)])
    return torch.cat([ties, bits]).view(torch.float32)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_a_cast_has_the_bits_of_torch(source, target):
    values = samples(source)
    wanted = values.to(NAMES[target])
    found = bytearray(wanted.numel() * wanted.element_size())
    casting.cast(raw(values), source, target, found)
    result = torch.frombuffer(found, dtype=NAMES[target])
    nan = wanted.isnan()
    assert result.isnan().equal(nan) and nan.equal(values.isnan())
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    assert result.view(integer)[~nan].equal(wanted.view(integer)[~nan])


@pytest.mark.parametrize("code", NAMES)
def test_nan_and_inf_are_found_wherever_they_are(code):
    dtype = NAMES[code]
    biggest = torch.finfo(dtype)
    fine = torch.tensor([0.0, -0.0, biggest.max, biggest.min, biggest.tiny, -1.0], dtype=torch.float64).to(dtype)
    assert casting.all_finite(raw(fine), code) and casting.all_finite(bytearray(), code)
    for value in map(torch.tensor, (torch.nan, torch.inf, -torch.inf)[: 1 if code == "F8_E4M3" else 3]):
        for at in range(len(fine)):
            values = fine.clone()
            values[at] = value.to(dtype)
            assert not casting.all_finite(raw(values), code)
    width = fine.element_size()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    if width <= 2:  # each value alone
        for bits in range(1 << (8 * width)):
            one = torch.tensor([bits - (1 << (8 * width)) if width > 1 and bits >> 15 else bits]).to(integers)
            assert casting.all_finite(raw(one), code) == bool(one.view(dtype).float().isfinite().all()), bits


def test_dtypes_without_nan_are_finite():
    assert casting.all_finite(b"\xff" * 8, "I64") and casting.all_finite(b"\xff" * 8, "U8")


def test_rows_of_a_transposed_tensor():
    values = np.arange(12, dtype=np.uint16)
    assert (casting.rows_of(values.tobytes(), 2, (3, 4), (1, 3)) == values.reshape(4, 3).T).all()
    with pytest.raises((ValueError, TypeError)):
        casting.rows_of(values.tobytes(), 2, (3, 5), (1, 3))
