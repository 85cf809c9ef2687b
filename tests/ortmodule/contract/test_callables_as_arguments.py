"""Functions and objects among the arguments act as they do in PyTorch: what they collect, count and switch."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x, note):
        hidden = self.layer(x)
        note(hidden)
        return hidden.square().mean()


class Counter:
    def __init__(self):
        self.calls, self.last, self.seen = 0, None, []

    def __call__(self, hidden):
        self.calls += 1
        self.last = hidden.detach()
        self.seen.append(hidden.mean())

    def method(self, hidden):
        self(hidden)


def in_a_list():
    seen = []

    def note(hidden):
        seen.append(hidden.sum())

    return note, seen


def in_variables():
    calls, total = 0, {"sum": 0.0}

    def add(hidden):
        total["sum"] = hidden.detach().abs().sum()

    def note(hidden):
        nonlocal calls
        calls += 1
        add(hidden)

    return note, lambda: (calls, total)


def in_an_object():
    counter = Counter()
    return counter, counter


def by_a_method():
    counter = Counter()
    return counter.method, counter


def by_a_lists_method():
    seen = []
    return seen.append, seen


def contents(value):
    if callable(value) and not isinstance(value, Counter):
        value = value()
    if isinstance(value, Counter):
        value = vars(value)
    if isinstance(value, dict):
        return {key: contents(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [contents(part) for part in value]
    return value


@pytest.mark.parametrize("make", [in_a_list, in_variables, in_an_object, by_a_method, by_a_lists_method])
def test_what_a_callback_keeps(make):
    module = Model()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    found = []
    for model in (reference, wrapped):
        note, kept = make()
        for step in range(4):
            model(X[: 2 + step % 2], note)
        found.append(contents(kept))
    torch.testing.assert_close(found[1], found[0])
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] == 4
    assert runtime.status()["graphs"]["training"]["exports"] <= 2


def test_a_method_of_one_object_needs_one_graph():
    counter = Counter()
    runtime, wrapped = wrap_model(Model(), config.OrtModuleConfig(), stage=0)
    for _ in range(3):
        wrapped(X, counter.method)
    assert runtime.status()["graphs"]["training"]["exports"] == 1 and counter.calls == 3


@dataclasses.dataclass
class State:
    scale: float | None = 2.0


class Takes(nn.Module):
    """Takes what the script has left in an attribute, of itself or of an argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x, state):
        scale = 1.0
        if hasattr(state, "scale"):
            scale = state.scale
            del state.scale
        if hasattr(self, "extra"):
            scale = scale * self.extra
            del self.extra
        return self.layer(x).sum() * scale


def test_attributes_that_a_forward_deletes():
    module = Takes()
    reference = copy.deepcopy(module)
    _, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for step in range(5):
        left = []
        for model, own in ((reference, reference), (wrapped, module)):
            state = State()
            state.scale = 2.0
            if step % 2:
                own.extra = 3.0
            left.append((model(X, state), vars(state), hasattr(own, "extra")))
        torch.testing.assert_close(left[1], left[0])
        assert left[1][1:] == ({}, False)
