"""Functions that a program replaces between two calls, or parts of them: defaults, code, PyTorch's, cached results."""

from __future__ import annotations

import functools

import pytest
import torch
from side_by_side import Net, changing, run_side_by_side, train
from torch import nn
from torch.nn import functional as F

SCALE = {"value": 1.0}


def scaled(x, factor=1.0):
    return x * factor


def scaled_by_keyword(x, *, factor=1.0):
    return x * factor


def model(forward, **attributes):
    return type("Model", (Net,), {"forward": forward, **attributes})()


def own_function():
    """Return a function that nobody else has."""

    def function(x, factor=1.0, *, more=1.0):
        return x * factor * more

    return function


def in_attribute():
    one = model(lambda self, x: self.scaled(self.c(self.a(x))))
    one.scaled = own_function()
    return one, one.scaled


def in_closure():
    function = own_function()
    return model(lambda self, x: function(self.c(self.a(x)))), function


def as_method():
    def forward(self, x, factor=1.0, *, more=1.0):
        return self.c(self.a(x)) * factor * more

    return model(forward), forward


PLACES = {"attribute": in_attribute, "closure": in_closure, "method": as_method}


def twice(x, factor=1.0, *, more=1.0):
    return x * factor * more * 2


def another_forward(self, x, factor=1.0, *, more=1.0):
    return self.c(self.a(x)) * factor * more * 2


CHANGES = {
    "default": lambda function, step: setattr(function, "__defaults__", (1.0 + step,)),
    "keyword default": lambda function, step: setattr(function, "__kwdefaults__", {"more": 1.0 + step}),
    "item of the keyword defaults": lambda function, step: function.__kwdefaults__.update(more=1.0 + step),
    "code": lambda function, step: step == 2 and setattr(
        function, "__code__", (another_forward if function.__name__ == "forward" else twice).__code__
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", PLACES)
def test_what_a_function_consists_of(place, change):
    functions = {}

    def build():
        one, function = PLACES[place]()
        functions[id(one)] = function
        return one

    run_side_by_side(build, changing(lambda module, step: CHANGES[change](functions[id(module)], step)))


def test_a_function_that_stays_as_it_is_has_one_graph():
    status = run_side_by_side(lambda: in_attribute()[0])
    assert status["graphs"]["training"]["exports"] == 1


TANH, MUL = torch.Tensor.tanh, torch.Tensor.__mul__


def patched(owner, name, new):
    """Return a step of a training that begins with a replaced attribute from the third one on."""
    before = vars(owner).get(name)

    def step(call, module, number):
        if number >= 2:
            setattr(owner, name, new)
        try:
            return train(call, module, number)
        finally:
            if before is not None:
                setattr(owner, name, before)
            elif number >= 2:
                delattr(owner, name)

    return step


@pytest.mark.parametrize(
    ("owner", "name", "new", "forward"),
    [
        (F, "relu", F.gelu, lambda self, x: self.c(F.relu(self.a(x)))),
        (F, "relu", F.gelu, lambda self, x: self.c(nn.functional.relu(self.a(x)))),
        (F, "relu", lambda x, inplace=False: F.gelu(x), lambda self, x: self.c(self.act(self.a(x)))),
        (torch, "tanh", torch.sigmoid, lambda self, x: self.c(torch.tanh(self.a(x)))),
        (torch.Tensor, "tanh", torch.Tensor.sigmoid, lambda self, x: self.c(self.a(x).tanh())),
        (torch.Tensor, "tanh", lambda x: TANH(x) * 3, lambda self, x: self.c(self.a(x).tanh())),
        (torch.Tensor, "__mul__", lambda x, y: MUL(x, y) + 1, lambda self, x: self.c(self.a(x) * 2)),
    ],
    ids=[
        "function",
        "long name",
        "of a layer",
        "builtin",
        "method of tensors",
        "around a method",
        "around an operator",
    ],
)
def test_functions_of_torch(owner, name, new, forward):
    status = run_side_by_side(lambda: model(forward, act=nn.ReLU()), patched(owner, name, new))
    assert status["graphs"]["training"]["exports"] == 2


@functools.lru_cache
def of_limited_size(factor):
    return SCALE["value"] * factor


@functools.cache
def without_limit(factor):
    return SCALE["value"] * factor


class Cached(Net):
    @functools.lru_cache  # noqa: B019
    def factor(self, number):
        return SCALE["value"] * number

    def forward(self, x):
        return self.c(self.a(x)) * self.factor(2)


@pytest.mark.parametrize("kind", ["of limited size", "without limit", "method"])
def test_cached_results_that_are_cleared(kind):
    function = {"of limited size": of_limited_size, "without limit": without_limit, "method": Cached.factor}[kind]

    def forward(self, x):
        return self.c(self.a(x)) * function(2)

    def change(module, step):
        SCALE["value"] = 1.0 + step // 2
        if step % 2 == 0:
            function.cache_clear()

    status = run_side_by_side(Cached if kind == "method" else lambda: model(forward), changing(change))
    assert status["graphs"]["training"]["exports"] >= 2


def test_a_text_of_tensors_of_the_program(monkeypatch, capsys):
    """As packages for debugging have: torch tells of a method that it defines in Python what stands in its place."""
    own, written = torch.Tensor.__repr__, []

    def text(tensor, **options):
        written.append(tensor)
        return f"a tensor: {own(tensor, **options)}"

    monkeypatch.setattr(torch.Tensor, "__repr__", text)

    def forward(self, x):
        print(x)
        return self.c(self.a(x))

    run_side_by_side(lambda: model(forward))
    assert "a tensor: a tensor" not in capsys.readouterr().out and written
