"""Parametrized weights have their gradients: inside of ``parametrize.cached()``, and registered by a forward."""

from __future__ import annotations

import pytest
import torch
from side_by_side import Net, batch, run_side_by_side, train
from torch import nn
from torch.nn.utils import parametrize

from ort_zero.ortmodule.compat.torch_modules import registrations_put_back


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def build():
    model = Net()
    parametrize.register_parametrization(model.b, "weight", Symmetric())
    return model


def step(call, model, number):
    with parametrize.cached():
        return train(call, model, number)


@pytest.mark.parametrize("exclude", [[], ["b"]], ids=["in the graph", "in PyTorch"])
def test_cached_weights_have_gradients(exclude):
    status = run_side_by_side(build, step, exclude=exclude)
    assert ("b" in status["in_torch"]) == bool(exclude)


class Around(nn.Module):
    """Parametrizes a weight for the time of its forward, as PEFT's LoRA on parameters does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        parametrize.register_parametrization(self.linear, "weight", Symmetric())
        try:
            with parametrize.cached():
                return self.linear(x)
        finally:
            parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)


def build_around():
    model = Net()
    model.b = Around()
    return model


def train_and_evaluate(call, model, number):
    results = list(train(call, model, number))
    model.eval()
    with torch.no_grad():
        results.append(call(batch(number)))
    model.train()
    return results


@pytest.mark.parametrize("exclude", [[], ["b"], ["b.linear"]], ids=["in the graph", "in PyTorch", "inside"])
def test_weights_parametrized_by_the_forward_stay_parameters(exclude):
    status = run_side_by_side(build_around, train_and_evaluate, exclude=exclude)
    assert set(exclude) <= set(status["in_torch"])
    assert all(graph["runs"]["forward"] for graph in status["graphs"].values()) and len(status["graphs"]) == 2


def test_what_an_interrupted_forward_registered_is_taken_back():
    model = build_around()
    model.b.linear.weight.requires_grad_(False)
    names, weight = list(model.state_dict()), model.b.linear.weight
    with pytest.raises(RuntimeError, match="given up"), registrations_put_back(model):
        parametrize.register_parametrization(model.b.linear, "weight", Symmetric())
        model.register_buffer("late", torch.ones(1))
        model.a = nn.Identity()
        raise RuntimeError("the trace is given up")
    assert list(model.state_dict()) == names and type(model.b.linear) is nn.Linear and type(model.a) is nn.Linear
    assert model.b.linear.weight is weight and not parametrize.is_parametrized(model.b.linear)
