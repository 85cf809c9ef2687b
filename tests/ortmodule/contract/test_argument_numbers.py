"""Numbers among the arguments that change with every call: not every call exports, and results are PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Arithmetic(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, scale, *, step=0, length=None):
        return (self.linear(x) * scale / (1 + step)).pow(2).mean()


class Sized(nn.Module):
    """Wants a Python number."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, rows):
        return self.linear(x)[: int(rows)].pow(2).mean() + torch.zeros(rows).sum()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, step):
        out = self.linear(x)
        return (out * 2 if step > 3 else out).pow(2).mean() * step


def both(cls):
    """Return a module, its twin in ORT, and the runtime of the twin."""
    torch.manual_seed(0)
    reference = cls()
    torch.manual_seed(0)
    runtime, wrapped = wrap_model(cls(), config.OrtModuleConfig(), stage=0)
    return reference, wrapped, runtime


def compare(reference, wrapped, x, *args, **kwargs):
    found = []
    for model in (reference, wrapped):
        model.zero_grad()
        loss = model(x, *args, **kwargs)
        loss.backward()
        found.append([loss.detach(), model.linear.weight.grad])
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


def exports(runtime):
    return runtime.status()["graphs"]["training"]["exports"]


def test_numbers_that_change_become_inputs_whether_the_code_reads_them_or_not():
    reference, wrapped, runtime = both(Arithmetic)
    counts = []
    for i in range(10):
        x = torch.randn(4 + i % 2, 6)
        compare(reference, wrapped, x, 0.5 + 0.1 * i, step=i, length=17 - i)
        counts.append(exports(runtime))
    assert counts == [1, 2, 3] + [3] * 7
    wrapped.eval(), reference.eval()
    for i in range(5):
        with torch.no_grad():
            x = torch.randn(3, 6)
            assert wrapped(x, 0.1 * i, step=i).item() == pytest.approx(reference(x, 0.1 * i, step=i).item(), abs=1e-6)


def test_a_number_that_alternates_between_two_values_keeps_two_graphs():
    reference, wrapped, runtime = both(Arithmetic)
    for i in range(6):
        compare(reference, wrapped, torch.randn(4, 6), 1.0, step=i % 2)
    assert exports(runtime) == 2


def test_a_number_that_python_wants_is_exported_each_time():
    reference, wrapped, runtime = both(Sized)
    for rows in (1, 2, 3, 4, 5, 5, 5):
        compare(reference, wrapped, torch.randn(8, 6), rows)
    assert exports(runtime) >= 5
    assert runtime.status()["backend"] == "onnxruntime"


def test_a_branch_on_a_number_is_taken_anew():
    reference, wrapped, runtime = both(Branching)
    for step in range(8):
        compare(reference, wrapped, torch.randn(4, 6), step)
    assert exports(runtime) <= 5
