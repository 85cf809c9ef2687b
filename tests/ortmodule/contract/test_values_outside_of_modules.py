"""Values that a forward finds outside of its modules and arguments count: in hooks, closures, objects, the process."""

from __future__ import annotations

import collections
import contextvars
import functools
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import Net, batch, changing, run_side_by_side, train
from torch import nn
from torch.nn import functional as F

SCALE = {"factor": 1.0}
MODE = contextvars.ContextVar("MODE", default="plain")
LOCAL = threading.local()
activation = torch.relu


def first(x):
    return torch.relu(x)


def second(x):
    return torch.sin(x)


chosen = first


def with_factor(values: dict) -> Callable:
    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args) * values["factor"]

        return wrapper

    return decorate


FACTOR = {"factor": 1.0}


@with_factor(FACTOR)
def decorated(x):
    return torch.tanh(x)


def scaled(x):
    return x * scaled.factor


scaled.factor = 1.0


class Schedule:
    """An object of the script's, of which the model knows nothing but a method."""

    def __init__(self) -> None:
        self.factor = 1.0

    def scale(self, x: Any) -> Any:
        return x * self.factor

    def hook(self, module: Any, args: Any, result: Any) -> Any:
        return result * self.factor

    def __call__(self, module: Any, args: Any, result: Any) -> Any:
        return result * self.factor


class State:
    """The one object of its class."""

    instance = None
    training_head = False

    def __new__(cls) -> State:
        if cls.instance is None:
            cls.instance = super().__new__(cls)
            cls.instance.factor = 1.0
        return cls.instance

    @classmethod
    def trains_head(cls) -> bool:
        return cls.training_head


@functools.lru_cache(None)
def settings() -> types.SimpleNamespace:
    return types.SimpleNamespace(factor=1.0)


def computing(forward: Callable[[Net, torch.Tensor], torch.Tensor]) -> Callable[[], Net]:
    """Return what makes a model with this forward, of a class of its own."""

    def build() -> Net:
        return type("Model", (Net,), {"forward": forward})()

    return build


def with_hook(make: Callable[[dict, Schedule], Callable], *, before: bool = False) -> Callable[[], Net]:
    """Return what makes a model with a hook that reads a dict or an object; the script reaches them by the model."""

    def build() -> Net:
        model, values, schedule = Net(), {"factor": 1.0}, Schedule()
        model.reached = [values, schedule]
        hook = make(values, schedule)
        model.b.register_forward_pre_hook(hook) if before else model.b.register_forward_hook(hook)
        return model

    return build


def with_attribute(make: Callable[[dict, Schedule], Callable]) -> Callable[[], Net]:
    """Return what makes a model with a function in an attribute that reads a dict or an object."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            values, schedule = {"factor": 1.0}, Schedule()
            self.reached = [values, schedule]
            self.function = make(values, schedule)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.function(self.a(x)))

    return Model


def with_wrapped_forward() -> Net:
    model, values = Net(), {"factor": 1.0}
    model.reached = [values, Schedule()]
    forward = model.b.forward
    model.b.forward = lambda x: forward(x) * values["factor"]
    return model


def set_factor(model: Any, step: int) -> None:
    values, schedule = model.reached
    values["factor"] = schedule.factor = 1.0 + (step >= 2)


def set_global(name: str, values: tuple) -> Callable[[Any, int], None]:
    return lambda model, step: globals().__setitem__(name, values[step >= 2])


def set_variable(model: Any, step: int) -> None:
    os.environ.pop("ORT_ZERO_TEST_FACTOR", None)
    if step >= 2:
        os.environ["ORT_ZERO_TEST_FACTOR"] = "3"


def replace_forward(of: Callable[[Any], type]) -> Callable[[Any, int], None]:
    def change(model: Any, step: int) -> None:
        if step == 2:
            of(model).forward = lambda self, x: F.linear(x, self.weight)

    return change


def linear_of_its_own() -> Net:
    model = Net()
    model.b = type("Linear", (nn.Linear,), {})(6, 6)
    return model


PROGRAMS = {
    "hook: closure": (with_hook(lambda v, s: lambda module, args, result: result * v["factor"]), set_factor),
    "hook: before": (
        with_hook(lambda v, s: lambda module, args: (args[0] * v["factor"],), before=True),
        set_factor,
    ),
    "hook: method": (with_hook(lambda v, s: s.hook), set_factor),
    "hook: object": (with_hook(lambda v, s: s), set_factor),
    "hook: partial": (
        with_hook(lambda v, s: functools.partial(lambda module, args, result, v: result * v["factor"], v=v)),
        set_factor,
    ),
    "hook: function in a closure": (
        with_hook(lambda v, s: (lambda inner: lambda module, args, result: inner(result))(lambda x: x * v["factor"])),
        set_factor,
    ),
    "attribute: closure": (with_attribute(lambda v, s: lambda x: torch.relu(x) * v["factor"]), set_factor),
    "attribute: method": (with_attribute(lambda v, s: s.scale), set_factor),
    "attribute: wrapped forward": (with_wrapped_forward, set_factor),
    "global: decorated": (
        computing(lambda self, x: self.c(decorated(self.a(x)))),
        lambda model, step: FACTOR.update(factor=1.0 + (step >= 2)),
    ),
    "global: function": (computing(lambda self, x: self.c(chosen(self.a(x)))), set_global("chosen", (first, second))),
    "global: attribute of a function": (
        computing(lambda self, x: self.c(scaled(self.a(x)))),
        lambda model, step: setattr(scaled, "factor", 1.0 + (step >= 2)),
    ),
    "object: the only one of its class": (
        computing(lambda self, x: self.c(self.a(x)) * State().factor),
        lambda model, step: setattr(State(), "factor", 1.0 + (step >= 2)),
    ),
    "object: remembered": (
        computing(lambda self, x: self.c(self.a(x)) * settings().factor),
        lambda model, step: setattr(settings(), "factor", 1.0 + (step >= 2)),
    ),
    "class: by a class method": (
        computing(lambda self, x: self.c(self.a(x) if State.trains_head() else self.b(x))),
        lambda model, step: setattr(State, "training_head", step >= 2),
    ),
    "class: forward replaced": (linear_of_its_own, replace_forward(lambda model: type(model.b))),
    "context variable": (
        computing(lambda self, x: self.c(self.a(x) if MODE.get() == "plain" else self.b(x))),
        lambda model, step: MODE.set("plain" if step < 2 else "other"),
    ),
    "value of the thread": (
        computing(lambda self, x: self.c(self.a(x)) * getattr(LOCAL, "factor", 1.0)),
        lambda model, step: setattr(LOCAL, "factor", 1.0 + (step >= 2)),
    ),
    "setting: deterministic algorithms": (
        computing(lambda self, x: self.c(self.b(x) if torch.are_deterministic_algorithms_enabled() else self.a(x))),
        lambda model, step: torch.use_deterministic_algorithms(step >= 2),
    ),
    "setting: flag of a backend": (
        computing(lambda self, x: self.c(self.b(x) if torch.backends.cuda.math_sdp_enabled() else self.a(x))),
        lambda model, step: torch.backends.cuda.enable_math_sdp(step < 2),
    ),
    "environment: number": (
        computing(lambda self, x: self.c(self.a(x)) * float(os.environ.get("ORT_ZERO_TEST_FACTOR", "1"))),
        set_variable,
    ),
    "environment: switch": (
        computing(lambda self, x: self.c(self.a(x) if "ORT_ZERO_TEST_FACTOR" in os.environ else self.b(x))),
        set_variable,
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_that_change_count(program, monkeypatch):
    monkeypatch.setattr(LOCAL, "factor", 1.0, raising=False)
    monkeypatch.setitem(globals(), "chosen", first)
    build, change = PROGRAMS[program]
    try:
        status = run_side_by_side(build, changing(change))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_math_sdp(True)
    assert not status["in_torch"]
    assert status["graphs"]["training"]["runs"]["forward"] == 4


class Activations(collections.OrderedDict):
    """Holds classes with their arguments, and returns modules, as a table of transformers does."""

    def __getitem__(self, key):
        kind, arguments = super().__getitem__(key)
        return kind(**arguments)


ACTIVATIONS = Activations(tanh=(nn.Tanh, {}), leaky=(nn.LeakyReLU, {"negative_slope": 0.3}))


class Chooses(Net):
    """Takes its activation from a table at each call."""

    def __init__(self):
        super().__init__()
        self.table, self.kind = ACTIVATIONS, "leaky"

    def forward(self, x):
        return self.c(self.table[self.kind](self.b(ACTIVATIONS["tanh"](self.a(x)))))


def test_a_table_that_builds_what_it_is_asked_for_holds_afterwards_what_it_held():
    before = dict(collections.OrderedDict.items(ACTIVATIONS))

    def change(module, step):
        module.kind = "leaky" if step < 2 else "tanh"

    status = run_side_by_side(Chooses, changing(change))
    assert dict(collections.OrderedDict.items(ACTIVATIONS)) == before
    assert not status["in_torch"] and status["graphs"]["training"]["exports"] <= 2


def test_what_hooks_collect_is_that_of_each_step():
    def build():
        model = Net()
        model.features = []
        found = model.features
        object.__setattr__(model, "count", {"calls": 0})
        count = model.count

        def collect(module, args, result):
            count["calls"] += 1
            found.append(result)

        for layer in (model.a, model.b):
            layer.register_forward_hook(collect)
        return model

    def step(call, model, number):
        result = call(batch(number))
        features = list(model.features)
        model.features.clear()
        loss = result.square().mean() + sum(feature.abs().mean() for feature in features)
        loss.backward()
        return [loss, *features, torch.tensor(model.count["calls"])]

    run_side_by_side(build, step)


def running_mean(values: dict, x: torch.Tensor) -> None:
    mean = x.detach().mean(0)
    values["mean"] = mean if values["mean"] is None else 0.9 * values["mean"] + 0.1 * mean


def mean_in_a_hook() -> Net:
    model = Net()
    values = model.values = {"mean": None}
    model.b.register_forward_hook(lambda module, args, result: running_mean(values, result))
    return model


class MeanInADict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.values = {"mean": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        running_mean(self.values, hidden)
        return self.c(hidden)


@pytest.mark.parametrize("build", [mean_in_a_hook, MeanInADict])
def test_what_is_none_at_first_and_a_tensor_then_is_carried_on(build):
    def step(call, model, number):
        return [*train(call, model, number), model.values["mean"]]

    run_side_by_side(build, step)


class Captures(nn.Module):
    """Puts a hook on its layer in the first call, as transformers does for hidden states."""

    def __init__(self):
        super().__init__()
        self.layer, self.hooked, self.seen = nn.Linear(6, 6), False, []

    def forward(self, x):
        if not self.hooked:
            self.layer.register_forward_hook(lambda module, args, result: self.seen.append(result))
            self.hooked = True
        self.seen.clear()
        self.layer(x)
        return sum(self.seen)


class CapturesOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.captures, self.head = Captures(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.captures(x))


@pytest.mark.parametrize("options", [{}, {"exclude": ["captures"]}], ids=["graph", "PyTorch"])
def test_hooks_that_a_forward_registers_are_there_once(options):
    def step(call, model, number):
        found = train(call, model, number)
        if number:
            assert len(model.captures.layer._forward_hooks) == 1
        return found

    run_side_by_side(CapturesOne, step, **options)
