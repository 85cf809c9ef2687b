"""What a trace changes of autograd, and what code inside of it that computes gradients finds."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ort_zero.ortmodule.compat import trace_state


def _dropped(tensor: torch.Tensor) -> None:
    return None


def _missed(nothing: None) -> torch.Tensor:
    raise RuntimeError("nothing was saved")


@pytest.fixture(params=["torch tells the innermost hooks", "torch 2.6 and before do not"], autouse=True)
def version(request, monkeypatch):
    """Run each test with what torch has, and without the function that older ones lack."""
    if "2.6" in request.param:
        monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)


def gradient() -> float:
    x = torch.tensor(3.0, requires_grad=True)
    return torch.autograd.grad(x * x, x)[0].item()


def test_code_in_a_trace_computes_gradients_in_blocks_of_plain_autograd_alone():
    with trace_state.saved_through(_dropped, _missed):
        with trace_state.plain_autograd() as taken:
            assert taken and gradient() == 6
            with trace_state.plain_autograd() as again:
                assert not again and gradient() == 6
        with pytest.raises(RuntimeError, match="nothing was saved"):
            gradient()
    assert gradient() == 6


def test_without_a_trace_nothing_is_taken_away():
    with trace_state.plain_autograd() as taken:
        assert not taken
    seen: list = []
    with (
        saved_tensors_hooks(lambda tensor: seen.append(1) or tensor, lambda tensor: tensor),
        trace_state.plain_autograd() as taken,
    ):
        assert not taken and gradient() == 6
    assert seen
