"""Slices that the forward takes at one line and changes in place at another: the tensor behind them changes."""

from __future__ import annotations

import pytest
from side_by_side import Net, run_side_by_side
from torch import nn


def double(tensor):
    tensor.mul_(2.0)


class Doubles(nn.Module):
    def forward(self, tensor):
        tensor.mul_(2.0)


def in_a_function(self, hidden):
    double(hidden[:, :3])
    return hidden


def in_a_module(self, hidden):
    self.part(hidden[:3])
    return hidden


def on_the_next_line(self, hidden):
    part = hidden[:, :3]
    part.mul_(2.0)
    return hidden + part.sum()


def a_column(self, hidden):
    column = hidden.select(-1, 2)
    column.add_(1.0)
    return hidden + column[:, None]


def one_after_the_other(self, hidden):
    for i in range(3):
        column = hidden[:, i]
        column.mul_(float(i))
    return hidden


def copied(self, hidden):
    part = hidden[:, :3]
    part.copy_(hidden[:, 3:].detach())
    return hidden


def by_a_mask(self, hidden):
    part = hidden[:, :3]
    part[part > 0] = 0.5
    return hidden


@pytest.mark.parametrize(
    "change",
    [in_a_function, in_a_module, on_the_next_line, a_column, one_after_the_other, copied, by_a_mask],
    ids=lambda change: change.__name__,
)
def test_the_tensor_behind_a_slice_changes(change):
    def build():
        model = type("Model", (Net,), {"forward": lambda self, x: self.c(change(self, self.a(x) * 1.0))})()
        model.part = Doubles()
        return model

    status = run_side_by_side(build, steps=3)
    assert not {name for name in status["in_torch"] if not name.startswith(("aten::", "ort_zero::"))}
