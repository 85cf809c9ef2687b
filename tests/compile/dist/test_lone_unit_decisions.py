"""What one rank decides alone about its graphs or their place leaves the gradients of all ranks as in PyTorch."""

from __future__ import annotations

import pytest
from lone_decisions import DECISIONS, SETTINGS, ZERO3, assert_trained_as_in_pytorch, is_possible


@pytest.mark.parametrize(
    ("decision", "setting"),
    [
        (decision, setting)
        for setting in [*SETTINGS, *ZERO3]
        for decision in DECISIONS
        if is_possible(decision, setting)
    ],
)
def test_gradients_are_those_of_pytorch(decision, setting):
    assert_trained_as_in_pytorch("compile", decision, setting)
