"""Random numbers within a unit are those of PyTorch, and the generators stand afterwards where PyTorch leaves them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from random_draws import DRAWS, UNSEEDED, WIDTH, Noisy, next_numbers, seed_all
from torch import nn

import ort_zero


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def steps(model: nn.Module) -> tuple[list[torch.Tensor], list[float]]:
    """Return the results of three training calls, and the numbers that come next."""
    seed_all()
    x, results = torch.randn(4, WIDTH), []
    for _ in range(3):
        result = model(x)
        result.square().sum().backward()
        results.append(result.detach())
    return results, next_numbers()


@pytest.mark.parametrize("name", DRAWS)
def test_draws_within_a_unit_are_those_of_pytorch(name):
    torch.manual_seed(0)
    model = nn.Sequential(Noisy(name), Noisy(name))
    wrapped = ort_zero.wrap(copy.deepcopy(model), compile={"place": "ort"}, log_level="ERROR")
    (theirs, after), (ours, then) = steps(model), steps(wrapped)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    assert then == after
    status = ort_zero.status()["models"][-1]
    assert status["compiled"]["segments"] and status["compiled"]["failed"] == status["failures"] == {}


@pytest.mark.parametrize("name", UNSEEDED)
def test_draws_that_nobody_seeds_differ_in_each_call(name):
    torch.manual_seed(0)
    model = ort_zero.wrap(nn.Sequential(Noisy(name), Noisy(name)), log_level="ERROR")
    (first, second, third), after = steps(model)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    seed_all()
    torch.randn(4, WIDTH)
    assert after == next_numbers()


def test_settings_of_the_users_own_compilations_stay():
    """Torch's habits: NumPy's functions draw from torch's generator."""
    model = ort_zero.wrap(nn.Sequential(Noisy("np.random.randn"), Noisy("random.Random")), log_level="ERROR")
    model(torch.ones(1, WIDTH))
    assert torch._dynamo.config.use_numpy_random_stream is False
    before = torch.get_rng_state()
    torch.compile(lambda x: x + torch.from_numpy(np.random.randn(3)), backend="eager", fullgraph=True)(torch.zeros(3))
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["np.random.permutation", "np.random.Generator", "random.shuffle", "dropout",
                                  "torch.rand", "torch.Generator", "all"])  # fmt: skip
def test_torch_compile_draws_what_pytorch_draws_where_torch_itself_does(name):
    torch.manual_seed(0)
    model = nn.Sequential(Noisy(name), Noisy(name))
    (theirs, after), (ours, then) = steps(model), steps(torch.compile(model, backend="ort_zero"))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    assert then == after
