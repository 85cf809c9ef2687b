"""What a program may change between two calls: sizes of buffers, classes, arrays, objects behind weak references."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from side_by_side import Net, changing, run_side_by_side


def model(forward, **attributes):
    one = type("Model", (Net,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


def with_buffer():
    def forward(self, x):
        factor = self.values / 2 if self.values.dtype == torch.float32 else self.values // 2
        return self.c(self.a(x)) * factor.sum() / self.values.shape[0] + len(self.values)

    one = model(forward)
    one.register_buffer("values", torch.ones(3) * 3)
    return one


DTYPES = torch.float32, torch.int64
CHANGES = {
    "another size": lambda one, step: setattr(one, "values", torch.ones(3 + step // 2)),
    "another size in place": lambda one, step: one.values.resize_(3 + step // 2).fill_(step),
    "another dtype": lambda one, step: setattr(one, "values", torch.ones(3, dtype=DTYPES[step // 2])),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_buffers(kind):
    status = run_side_by_side(with_buffer, changing(CHANGES[kind]))
    assert 'buffer "values"' in str(status["transitions"][-1]["reasons"])
    assert status["graphs"]["training"]["exports"] == 2


def test_buffers_with_other_values_have_one_graph():
    status = run_side_by_side(with_buffer, changing(lambda one, step: setattr(one, "values", torch.ones(3) * step)))
    assert status["graphs"]["training"]["exports"] == 1


def test_a_model_that_gets_another_class():
    class Other(Net):
        def forward(self, x):
            return self.c(torch.tanh(self.a(x)))

    def change(one, step):
        if step == 2:
            one.__class__ = Other

    status = run_side_by_side(Net, changing(change))
    assert "has another class (Net -> Other)" in str(status["transitions"][-1]["reasons"])


def test_arrays_that_change_in_place():
    def forward(self, x):
        return self.c(self.a(x)) * float(self.array[0]) + torch.from_numpy(self.array.copy()).sum()

    def change(one, step):
        one.array[0] = 1.0 + step // 2

    status = run_side_by_side(lambda: model(forward, array=np.ones(3, np.float32)), changing(change))
    assert status["graphs"]["training"]["exports"] == 2


def test_a_tensor_in_an_attribute_that_wants_a_gradient_in_some_calls():
    def forward(self, x):
        return self.c(self.a(x)) * (2 if self.factors.requires_grad else 1) * self.factors

    def change(one, step):
        one.factors.requires_grad_(step >= 2)

    run_side_by_side(lambda: model(forward, factors=torch.ones(3)), changing(change))


class Settings:
    """An object of the script's."""

    scale = 1.0


def test_objects_behind_weak_references():
    settings = Settings()

    def change(one, step):
        settings.scale = 1.0 + step // 2

    def forward(self, x):
        return self.c(self.a(x)) * self.settings().scale

    status = run_side_by_side(lambda: model(forward, settings=weakref.ref(settings)), changing(change))
    assert status["graphs"]["training"]["exports"] == 2


def counting(self, x):
    type(self).calls += 1
    return self.c(self.a(x)) * type(self).calls


def counting_in_dict(self, x):
    self.seen["calls"] = self.seen.get("calls", 0) + 1
    return self.c(self.a(x)) * self.seen["calls"]


def branching(self, x):
    self.calls = self.calls + 1
    return self.c(self.a(x) * 2 if self.calls % 2 else self.a(x))


@pytest.mark.parametrize("forward", [counting, counting_in_dict, branching])
def test_attributes_of_classes_count_from_the_first_step(forward):
    run_side_by_side(lambda: type("Model", (Net,), {"calls": 0, "seen": {}, "forward": forward})())
