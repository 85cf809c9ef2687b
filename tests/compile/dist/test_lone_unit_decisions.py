"""What one rank decides alone about its graphs or their place leaves the gradients of all ranks as in PyTorch."""

from __future__ import annotations

import pytest
from lone_decisions import DECISIONS, SETTINGS, ZERO3, assert_trained_as_in_pytorch, is_possible

COMMON = ("zero2-overlap", "zero2-accumulation", "ddp", "zero3")
OTHERS = tuple(setting for setting in (*SETTINGS, *ZERO3) if setting not in COMMON)


def cases(settings: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each decision under each setting."""
    return [(decision, setting) for setting in settings for decision in DECISIONS if is_possible(decision, setting)]


@pytest.mark.parametrize(("decision", "setting"), cases(COMMON))
def test_gradients_are_those_of_pytorch(decision, setting):
    assert_trained_as_in_pytorch("compile", decision, setting, COMMON)


@pytest.mark.slow
@pytest.mark.parametrize(("decision", "setting"), cases(OTHERS))
def test_gradients_are_those_of_pytorch_under_other_settings(decision, setting):
    assert_trained_as_in_pytorch("compile", decision, setting, OTHERS)
