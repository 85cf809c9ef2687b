"""TF32 is read where the script has chosen it: by torch's new switch, or by an old one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ort_zero.compat.torch_compile import computes_in_tf32

PRODUCTS = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def precision_as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_the_old_switches_are_read():
    assert not computes_in_tf32()
    for precision, expected in (("high", True), ("highest", False)):
        torch.set_float32_matmul_precision(precision)
        assert computes_in_tf32() is expected
    PRODUCTS.allow_tf32 = True
    assert computes_in_tf32()


@pytest.mark.skipif(not hasattr(PRODUCTS, "fp32_precision"), reason="torch has the new switch from 2.9 on")
def test_the_new_switch_is_read():
    for precision, expected in (("tf32", True), ("ieee", False)):
        PRODUCTS.fp32_precision = precision
        assert computes_in_tf32() is expected
