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
    wide = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    if code in ("F16", "BF16"):
        return wide.view(NAMES[code])
    bits = torch.from_numpy(np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 1 << 17, dtype=np.int64))
    if code == "F32":
        ends = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000)
        upper = wide.to(torch.int32) << 16
        return torch.cat([*(upper | end for end in ends), bits.view(torch.int32)]).view(NAMES[code])
    halves = torch.cat([wide.view(torch.float16).double(), wide.view(torch.bfloat16).double()])
    near = [torch.from_numpy(np.nextafter(halves.numpy(), to)) for to in (np.inf, 0)]
    middle = (halves[1:] + halves[:-1]) / 2
    return torch.cat([halves, *near, *(middle * (1 + way * 2**-40) for way in (0, 1, -1)), bits.view(torch.float64)])


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
    about = torch.finfo(dtype)
    fine = torch.tensor([0.0, -0.0, about.max, about.min, about.tiny, -1.0], dtype=torch.float64).to(dtype)
    assert casting.all_finite(raw(fine), code) and casting.all_finite(bytearray(), code)
    for value in (torch.nan, torch.inf, -torch.inf)[: 1 if code == "F8_E4M3" else 3]:
        for at in range(len(fine)):
            values = fine.clone()
            values[at] = torch.tensor(value).to(dtype)
            assert not casting.all_finite(raw(values), code)
    if fine.element_size() <= 2:  # each value alone
        bits = torch.arange(1 << (8 * fine.element_size())).to((torch.uint8, torch.int16)[fine.element_size() - 1])
        values = bits.view(dtype)
        for one, finite in zip(values.split(1), values.float().isfinite().tolist()):
            assert casting.all_finite(raw(one), code) == finite
    assert casting.all_finite(b"\xff" * 8, "I64") and casting.all_finite(b"\xff" * 8, "U8"), "dtypes without NaN"
