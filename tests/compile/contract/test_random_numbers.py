"""Random numbers within a unit are those of PyTorch, and the generators stand afterwards where PyTorch leaves them."""

from __future__ import annotations

import copy
import random
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ort_zero

WIDTH = 16
GENERATOR = np.random.default_rng(3)
STATE = np.random.RandomState(3)
PYTHON = random.Random(3)
TORCH = torch.Generator()


def _shuffled(shuffle: Callable[[Any], None], numbers: Any) -> Any:
    shuffle(numbers)
    return numbers


def _drawn_again(get: Callable[[], Any], put: Callable[[Any], None], draw: Callable[[], Any]) -> Any:
    state = get()
    first = draw()
    put(state)
    return first


def _forked() -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.rand(WIDTH)


DRAWS: dict[str, Callable[[], Any]] = {
    "np.random.rand": lambda: float(np.random.rand()),
    "np.random.permutation": lambda: torch.tensor(np.random.permutation(WIDTH)),
    "np.random.randn": lambda: torch.from_numpy(np.random.randn(WIDTH)).float(),
    "np.random.shuffle": lambda: _shuffled(np.random.shuffle, np.arange(WIDTH)),
    "np.random.set_state": lambda: _drawn_again(np.random.get_state, np.random.set_state, np.random.rand),
    "np.random.Generator": lambda: GENERATOR.normal(size=WIDTH),
    "np.random.RandomState": lambda: STATE.rand(WIDTH),
    "random.random": lambda: random.random(),  # the call, as a program has it
    "random.shuffle": lambda: _shuffled(random.shuffle, list(range(WIDTH))),
    "random.setstate": lambda: _drawn_again(random.getstate, random.setstate, random.random),
    "random.Random": lambda: PYTHON.random(),
    "torch.rand": lambda: torch.rand(WIDTH),
    "dropout": lambda: F.dropout(torch.ones(WIDTH), 0.5),
    "torch.set_rng_state": lambda: _drawn_again(torch.get_rng_state, torch.set_rng_state, lambda: torch.rand(WIDTH)),
    "torch.random.fork_rng": _forked,
    "torch.Generator": lambda: torch.rand(WIDTH, generator=TORCH),
    "all": lambda: torch.rand(WIDTH) + np.random.rand() + random.random() + torch.rand(WIDTH) + np.random.rand(),
}
UNSEEDED: dict[str, Callable[[], Any]] = {
    "secrets.randbelow": lambda: secrets.randbelow(10**9),
    "random.SystemRandom": lambda: random.SystemRandom().random(),
    "np.random.default_rng without a seed": lambda: np.random.default_rng().random(),
}
"""Draws that differ in each call, whatever was seeded."""


class Noisy(nn.Module):
    """A unit whose result hangs on one of the draws."""

    def __init__(self, name: str):
        super().__init__()
        self.draw = (DRAWS | UNSEEDED)[name]
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        noise = torch.as_tensor(np.asarray(self.draw())).float() * 0.1
        return x + torch.sin(self.linear(x) + noise)


def seed_all() -> None:
    """Put every generator into a fixed state."""
    np.random.seed(1)
    random.seed(1)
    PYTHON.seed(1)
    torch.manual_seed(1)
    TORCH.manual_seed(1)
    STATE.seed(1)
    GENERATOR.bit_generator.state = np.random.default_rng(1).bit_generator.state


def next_numbers() -> list[float]:
    """Return the next number of every generator."""
    python = [random.random(), PYTHON.random()]
    return (
        python
        + [torch.rand(1, generator=each).item() for each in (None, TORCH)]
        + [float(each) for each in (np.random.rand(), STATE.rand(), GENERATOR.random())]
    )


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
