"""Nine models train through captured graphs as in PyTorch, with the same draws of dropouts."""

from __future__ import annotations

import captured_models
import pytest
import torch

import ort_zero

STEPS = 20


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", captured_models.NAMES)
def test_losses_are_those_of_pytorch(name, dropout):
    torch._dynamo.reset()
    eager, wrapped = (captured_models.build(name, dropout) for _ in range(2))
    wrapped = ort_zero.wrap(wrapped, backend="ortmodule", ortmodule={"place": "ort"}, fallback="warn")
    wanted = captured_models.train(eager, name, STEPS, varies=not dropout)
    state = torch.get_rng_state()
    losses = captured_models.train(wrapped, name, STEPS, varies=not dropout)
    assert torch.equal(state, torch.get_rng_state())
    assert losses == pytest.approx(wanted, rel=2e-4)
    status = ort_zero.status()["models"][-1]
    assert not status["failures"]
    for reason in status["in_torch"].values():
        assert any(words in reason for words in captured_models.IN_PYTORCH.get(name, ())), reason
    runs = status["compiled"]["session_runs"]
    assert runs["forward"] >= STEPS
    assert runs["backward"] >= STEPS
    eager.eval(), wrapped.eval()
    with torch.no_grad():
        for each in (captured_models.batch(name, 50), captured_models.batch(name, 51)):
            assert wrapped(**each).loss.item() == pytest.approx(eager(**each).loss.item(), rel=2e-3)
    assert ort_zero.status()["models"][-1]["compiled"]["session_runs"]["inference"] > 0
