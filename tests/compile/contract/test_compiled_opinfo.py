"""The operators of torch's OpInfo table, compiled for ONNX Runtime: PyTorch's results and gradients.

`make test` runs a tenth of the operators, another one for each commit; the slow tests run all of them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import operator_sweep
import pytest
import torch
from operator_sweep import OPERATORS, sweep

SIZE = 20
"""Number of operators in one test."""


def _tenth() -> int:
    """Return the number of this commit's tenth; 0 outside of a checkout."""
    call = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return int(call.stdout[:8] or "0", 16) % 10


def _groups(dtype: torch.dtype, offset: int = 0, step: int = 1) -> list:
    """Return the names of operators in groups, each with an id that tells dtype and first operator."""
    names = [name for name, op in OPERATORS.items() if dtype in op.supported_dtypes("cpu")][offset::step]
    return [
        pytest.param(dtype, names[begin : begin + SIZE], id=f"{str(dtype)[6:]}-from-{names[begin]}")
        for begin in range(0, len(names), SIZE)
    ]


def _assert_right(outcomes: list[operator_sweep.Outcome]) -> None:
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    assert not faults, "\n".join(faults)
    assert sum(outcome.right for outcome in outcomes)
    assert any(outcome.in_ort for outcome in outcomes)


@pytest.mark.parametrize(("dtype", "names"), _groups(torch.float32, _tenth(), 10))
def test_a_tenth_of_the_operators_is_right(dtype, names):
    _assert_right([sweep(name, dtype, limit=16) for name in names])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "names"), _groups(torch.float32))
def test_every_operator_is_right(dtype, names):
    _assert_right([sweep(name, dtype) for name in names])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "names"), [*_groups(torch.float64), *_groups(torch.bfloat16), *_groups(torch.int64)])
def test_operators_are_right_in_other_dtypes(dtype, names):
    _assert_right([sweep(name, dtype, limit=24) for name in names])
