"""Iterators that a forward advances give at each step what they give in PyTorch, and stand where they would stand."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from side_by_side import Net, changing, run_side_by_side
from torch import nn


def growing():
    factor = 1.0
    while True:
        yield factor
        factor *= 1.5


class Schedule:
    """An iterator of the user's own."""

    def __init__(self):
        self.step = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.step += 1
        return min(1.0, self.step / 3)


MAKE = {
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "count": lambda: itertools.count(1.0, 0.5),
    "list": lambda: iter([1.0, 2.0, 3.0, 4.0]),
    "generator": growing,
    "chain of a generator": lambda: itertools.chain([1.0], growing()),
    "map": lambda: map(float, range(1, 9)),
    "of the user": Schedule,
}
factors = None


class Scales(nn.Module):
    """A submodule that multiplies by the next factor."""

    def __init__(self, iterator):
        super().__init__()
        self.factors = iterator

    def forward(self, x):
        return x * next(self.factors)


def in_submodule(make):
    model = type("Model", (Net,), {"forward": lambda self, x: self.c(self.part(self.a(x)))})()
    model.part = Scales(make())
    return model


def in_attribute(make):
    model = type("Model", (Net,), {"forward": lambda self, x: self.c(self.a(x)) * next(self.factors)})()
    model.factors = make()
    return model


def in_object(make):
    class Settings:
        factors = None

    model = type("Model", (Net,), {"forward": lambda self, x: self.c(self.a(x)) * next(self.settings.factors)})()
    model.settings = Settings()
    model.settings.factors = make()
    return model


def in_closure(make):
    factors = make()
    return type("Model", (Net,), {"forward": lambda self, x: self.c(self.a(x)) * next(factors)})()


def in_hook(make):
    model, factors = Net(), make()
    model.b.register_forward_hook(lambda module, args, result: result * next(factors))
    return model


def multiplied(factors, x):
    return x * next(factors)


def in_class(make):
    return type(
        "Model", (Net,), {"factors": make(), "forward": lambda self, x: self.c(self.a(x)) * next(self.factors)}
    )()


def in_partial(make):
    model = type("Model", (Net,), {"forward": lambda self, x: self.scale(x=self.c(self.a(x)))})()
    model.scale = functools.partial(multiplied, make())
    return model


def in_keyword_of_partial(make):
    model = type("Model", (Net,), {"forward": lambda self, x: self.scale(x=self.c(self.a(x)))})()
    model.scale = functools.partial(multiplied, factors=make())
    return model


def in_default(make):
    def forward(self, x, factors=make()):  # noqa: B008
        return self.c(self.a(x)) * next(factors)

    return type("Model", (Net,), {"forward": forward})()


def in_keyword_default(make):
    def scaled(x, *, factors=make()):  # noqa: B008
        return x * next(factors)

    return type("Model", (Net,), {"forward": lambda self, x: scaled(self.c(self.a(x)))})()


def in_tuple(make):
    model = type("Model", (Net,), {"forward": lambda self, x: self.c(self.a(x)) * next(self.settings[1][0])})()
    model.settings = ("scales", (make(),))
    return model


PLACES = {
    "class": in_class,
    "partial": in_partial,
    "keyword of a partial": in_keyword_of_partial,
    "default": in_default,
    "keyword default": in_keyword_default,
    "tuple": in_tuple,
    "submodule": in_submodule,
    "attribute": in_attribute,
    "object": in_object,
    "closure": in_closure,
    "hook": in_hook,
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_submodule_that_advances_an_iterator_stays_in_pytorch(kind):
    status = run_side_by_side(lambda: in_submodule(MAKE[kind]))
    if kind != "of the user":
        assert "advances an iterator" in str(status["in_torch"])
        assert status["graphs"]["training"]["runs"]["forward"] == 4


@pytest.mark.parametrize("kind", ["cycle", "generator", "of the user"])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "submodule"])
def test_iterators_count_wherever_they_are(place, kind):
    run_side_by_side(lambda: PLACES[place](MAKE[kind]))


class Counting(nn.Module):
    """A submodule that counts its calls in several ways."""

    def __init__(self):
        super().__init__()
        self.factors, self.calls, self.seen = itertools.count(1), 0, []
        self.decay = torch.ones(())

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.decay.mul_(0.9)
        return x * next(self.factors) * len(self.seen) * self.decay / self.calls


def test_a_run_that_did_not_hold_counts_and_advances_nothing():
    def forward(self, x):
        x = self.part(self.a(x))
        return self.c(x * 2 if x.sum() > 0 else x)

    def build():
        model = type("Model", (Net,), {"forward": forward})()
        model.part = Counting()
        return model

    seen = []
    status = run_side_by_side(build, changing(lambda model, step: seen.append(model.part.calls)), exclude=["part"])
    assert any("the value has changed" in str(done["reasons"]) for done in status["transitions"])
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3]


COUNTERS: dict = {}
counter = None


class Counter:
    """An object of the script's that counts the calls of a forward."""

    def __init__(self):
        self.calls = 0


def test_what_a_forward_counts_in_a_global_object_counts_from_the_first_step():
    def forward(self, x):
        counter.calls += 1
        return self.c(self.a(x)) * min(1.0, counter.calls / 3)

    def change(model, step):
        global counter
        counter = COUNTERS.setdefault(id(model), Counter())

    run_side_by_side(lambda: type("Model", (Net,), {"forward": forward})(), changing(change))


def test_a_global_iterator_counts():
    def build():
        global factors
        factors = {}
        return type("Model", (Net,), {"forward": lambda self, x: self.c(self.a(x)) * next(factors[id(self)])})()

    def change(model, step):
        factors.setdefault(id(model), growing())

    run_side_by_side(build, changing(change))


def test_iterators_stand_after_the_training_where_they_would_stand():
    made = []

    def build():
        model = in_submodule(MAKE["cycle"])
        model.names = iter(["first", "second"])
        made.append(model)
        return model

    run_side_by_side(build, steps=2)
    assert [next(model.part.factors) for model in made] == [3.0, 3.0]
    assert [next(model.names) for model in made] == ["first", "first"]
    assert all(isinstance(model.part.factors, itertools.cycle) for model in made)
    assert [next(copy.deepcopy(model).part.factors) for model in made] == [1.0, 1.0]
    assert [next(model.part.factors) for model in made] == [1.0, 1.0]


class Loops(Net):
    """Loops over an iterator that it makes itself, and over a list."""

    def __init__(self):
        super().__init__()
        self.layers = [0.5, 2.0]

    def forward(self, x):
        x = self.a(x)
        for factor, more in zip(self.layers, itertools.count(), strict=False):
            x = torch.tanh(x * factor + more)
        return self.c(x)


def test_iterators_of_the_forward_itself_are_part_of_the_graph():
    status = run_side_by_side(Loops)
    assert not status["in_torch"] and status["graphs"]["training"]["exports"] == 1
