"""Generators of random numbers: where the code of a module finds them, whether they move, and that they move back."""

from __future__ import annotations

import functools
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from ort_zero.ortmodule.runtime.export.random_draws import RandomDraws
from ort_zero.ortmodule.runtime.export.random_states import (
    GeneratorStates,
    GlobalStates,
    generators_of,
    name_of,
    preserved,
)

OF_THE_FILE = random.Random(1)


class Settings:
    def __init__(self):
        self.augment = {"noise": [np.random.default_rng(2)]}


def drawing():
    own = np.random.RandomState(4)
    return lambda: own.rand()


class Model(nn.Module):
    of_the_class = random.Random(9)

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2)])
        self.inner[0].python = random.Random(2)
        self.numpy = np.random.default_rng(3)
        self.legacy = np.random.RandomState(3)
        self.torch = torch.Generator().manual_seed(3)
        self.system = random.SystemRandom()
        self.settings = Settings()
        self.bound = np.random.default_rng(5).normal
        self.partial = functools.partial(random.Random(6).gauss, 0.0)
        self.draw = drawing()

    def forward(self):
        return OF_THE_FILE.random()


DRAWS = {
    "random": lambda m: random.random(),
    "numpy": lambda m: np.random.rand(),
    "a child's": lambda m: m.inner[0].python.random(),
    "NumPy's": lambda m: m.numpy.random(),
    "NumPy's older one": lambda m: m.legacy.rand(),
    "in a container of an object": lambda m: m.settings.augment["noise"][0].random(),
    "a bound method": lambda m: m.bound(),
    "a partial": lambda m: m.partial(1.0),
    "a closure": lambda m: m.draw(),
    "a global of the file": lambda m: m(),
    "an attribute of the class": lambda m: m.of_the_class.random(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_seen_and_undone(draw):
    model = Model()
    states = GeneratorStates(generators_of(model))
    assert states.moved() is None
    with preserved(model):
        first = draw(model)
    assert states.moved() is None, "it was put back"
    assert draw(model) == first
    assert states.moved() is not None and states.moved() is None


def test_generators_of_pytorch_are_put_back_too_and_are_no_draws_of_python():
    model = Model()
    states = GeneratorStates(generators_of(model))

    def drawn():
        return torch.rand(2).tolist(), torch.rand(2, generator=model.torch).tolist()

    with pytest.raises(ValueError, match="in the middle"), preserved(model):
        first = drawn()
        raise ValueError("in the middle")
    assert drawn() == first and states.moved() is None


def test_the_systems_generator_has_no_state():
    assert not any(isinstance(generator, random.SystemRandom) for generator in generators_of(Model()))


def test_generators_have_names_for_messages():
    assert name_of(random.random.__self__) == "Python's random module"
    assert name_of(np.random.get_bit_generator()) == "numpy.random"
    assert name_of(random.Random(1)) == "a random.Random of its own"
    assert name_of(np.random.default_rng().bit_generator) == "a numpy.random.PCG64 of its own"


def test_global_states_can_be_restored_more_than_once():
    states = GlobalStates()

    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()

    first = drawn()
    for _ in range(2):
        states.restore()
        assert drawn() == first


def test_lines_of_the_users_code_are_told(monkeypatch):
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    model = Model()
    draws = RandomDraws(model)

    def helper():
        return random.uniform(0, 1)  # the line

    def forward(self):
        value = 1 + 1
        value += helper()
        return value

    model.forward = types.MethodType(forward, model)
    assert draws.since_last() is None
    with draws.lines_followed():
        model()
    line = helper.__code__.co_firstlineno + 1
    assert draws.since_last() == ("draws random numbers from Python's random module", f"{__file__}:{line} in helper")
    model()
    assert draws.since_last() == ("draws random numbers from Python's random module", "")


def test_draws_outside_of_a_trace_belong_to_submodules_in_pytorch():
    draws = RandomDraws(Model())
    random.random()
    assert draws.since_last() is None
    np.random.rand()
    assert draws.any() and not draws.any()
