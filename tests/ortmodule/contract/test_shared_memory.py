"""Tensors that share memory, one of which the forward changes in place: the others change as well, as in PyTorch."""

from __future__ import annotations

import collections

import pytest
import torch
from side_by_side import Net, batch, run_side_by_side


def with_arguments(self, x, y):
    x.mul_(0.5)
    return self.c(self.a(x)).sum() + self.c(self.a(y)).square().sum()


def model(forward, **attributes):
    one = type("Model", (Net,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize("number_of_rows", [2, 4], ids=["slice", "same memory"])
def test_arguments_in_some_calls(number_of_rows):
    def step(call, module, number):
        x = batch(number)
        y = x[:number_of_rows] if number % 2 else x[:number_of_rows].clone()
        loss = call(x, y)
        loss.backward()
        return [loss, x, y]

    status = run_side_by_side(lambda: model(with_arguments), step)
    assert status["graphs"]["training"]["runs"] == {"forward": 2, "backward": 2}
    assert status["called_in_torch"] == {"forward with arguments that share memory": 2}


def test_parts_of_one_tensor_that_do_not_overlap():
    def step(call, module, number):
        whole, other = batch(number), batch(number)
        loss = call(whole[:2], whole[2:])
        loss.backward()
        with torch.no_grad():
            return [loss, whole, call(other[:2], other[2:]), other]

    status = run_side_by_side(lambda: model(with_arguments), step)
    # autograd counts the changes of both together
    assert status["called_in_torch"] == {"forward with arguments that share memory": 4}
    assert status["graphs"]["inference"]["runs"]["forward"] == 4


def test_an_argument_that_is_a_buffer_in_some_calls():
    def forward(self, x, scale):
        scale.mul_(1.1)
        return self.c(self.a(x) * self.scale)

    def build():
        one = model(forward)
        one.register_buffer("scale", torch.ones(6))
        return one

    def step(call, module, number):
        result = call(batch(number), module.scale if number % 2 else torch.ones(6))
        result.square().mean().backward()
        return [result]

    assert run_side_by_side(build, step)["called_in_torch"] == {"forward with arguments that share memory": 2}


def test_attributes():
    def forward(self, x):
        self.state.mul_(1.5)
        return self.c(self.a(x)) * self.view

    def build():
        state = torch.ones(3)
        return model(forward, state=state, view=state[:1])

    assert "changes it for the next call" in str(run_side_by_side(build)["in_torch"])


def test_buffers():
    def forward(self, x):
        self.state.mul_(1.5)
        return self.c(self.a(x)) * self.view

    def build():
        one = model(forward)
        one.register_buffer("state", torch.ones(3))
        one.register_buffer("view", one.state[:1])
        return one

    assert "shares memory" in str(run_side_by_side(build)["in_torch"])


def in_deque(self, value):
    self.values.append(value)


def from_front(self, value):
    self.values.append(value)
    del self.values[:-2]


@pytest.mark.parametrize(("make", "append"), [(lambda: collections.deque(maxlen=2), in_deque), (list, from_front)])
def test_a_list_whose_items_move_to_other_indices(make, append):
    def forward(self, x):
        hidden = self.a(x)
        append(self, hidden.detach().mean())
        return self.c(hidden) * torch.stack(list(self.values)).mean()

    run_side_by_side(lambda: model(forward, values=make()), steps=6)
