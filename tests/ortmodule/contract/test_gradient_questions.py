"""Forwards that ask what wants a gradient get PyTorch's answer, although a trace is made with gradients everywhere."""

from __future__ import annotations

import pytest
import torch
from side_by_side import Net, batch, changing, run_side_by_side, train


def asking(question):
    """Return a class of models that multiply by 3 if the answer for the model and its hidden layer is yes."""

    def forward(self, x):
        hidden = self.a(x)
        return self.c(torch.tanh(self.b(hidden * 3 if question(self, x, hidden) else hidden)))

    return type("Asking", (Net,), {"forward": forward})


def frozen(question, *layers):
    model = asking(question)()
    for layer in layers:
        getattr(model, layer).requires_grad_(False)
    return model


QUESTIONS = {
    "weight": lambda model, x, hidden: model.b.weight.requires_grad,
    "parameters": lambda model, x, hidden: all(p.requires_grad for p in model.b.parameters()),
    "argument": lambda model, x, hidden: x.requires_grad,
    "result": lambda model, x, hidden: hidden.requires_grad,
    "grad_fn": lambda model, x, hidden: hidden.grad_fn is not None,
    "leaf": lambda model, x, hidden: hidden.is_leaf,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_frozen_layers(name):
    status = run_side_by_side(lambda: frozen(QUESTIONS[name], "a", "b"))
    assert status["graphs"]["training"]["exports"] == 1


@pytest.mark.parametrize("name", ["parameters", "result"])
def test_layers_that_are_frozen_and_set_free(name):
    def switch(model, number):
        model.a.requires_grad_(number % 2 == 0)
        model.b.requires_grad_(number % 2 == 0)

    status = run_side_by_side(lambda: frozen(QUESTIONS[name]), changing(switch), steps=5)
    assert status["graphs"]["training"]["exports"] == 2


def test_an_argument_that_wants_a_gradient_in_some_calls():
    def step(call, model, number):
        x = batch(number).requires_grad_(number % 2 == 1)
        result = call(x)
        result.square().mean().backward()
        return [result, x.grad if number % 2 else x]

    status = run_side_by_side(lambda: frozen(QUESTIONS["argument"]), step)
    assert status["graphs"]["training"]["exports"] == 2


def test_who_does_not_ask_has_one_graph_for_frozen_and_free_layers():
    def switch(model, number):
        model.a.requires_grad_(number % 2 == 0)

    status = run_side_by_side(Net, changing(switch))
    assert status["graphs"]["training"]["exports"] == 1


def test_the_gradient_that_a_parameter_has_is_read_by_pytorch():
    model = asking(lambda model, x, hidden: model.b.weight.grad is not None)

    def step(call, module, number):
        return [*train(call, module, number), *train(call, module, number)]

    status = run_side_by_side(model, step)
    assert "reads the gradient of a parameter" in str(status["in_torch"])


@pytest.mark.parametrize("switched", [False, True])
def test_whether_gradients_are_on_where_nothing_wants_one(switched):
    def step(call, model, number):
        with torch.set_grad_enabled(not switched or number % 2 == 0):
            return [call(batch(number))]

    status = run_side_by_side(lambda: frozen(lambda *_: torch.is_grad_enabled(), "a", "b", "c"), step)
    assert status["graphs"]["inference"]["exports"] == 1 + switched
