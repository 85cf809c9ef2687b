"""What one rank decides alone about its graphs leaves the gradients of all ranks as in PyTorch."""

from __future__ import annotations

import pytest
from lone_decisions import DECISIONS, SETTINGS, assert_trained_as_in_pytorch


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_gradients_are_those_of_pytorch(decision, setting):
    assert_trained_as_in_pytorch("ortmodule", decision, setting)
