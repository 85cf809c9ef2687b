"""Functions whose operands are inputs or weights of the graph, or have no dimensions, as torch's OpInfo has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ort_zero.config import OrtModuleConfig
from ort_zero.ortmodule.wrap import wrap_model

HALF = torch.half
FUNCTIONS = {
    "square": lambda x, w: torch.square(x),
    "square of a weight": lambda x, w: w * w * 3 + x,
    "x * x * w": lambda x, w: x * x * w,
    "x + x": lambda x, w: x + x,
    "x / x": lambda x, w: x / x,
    "cat": lambda x, w: torch.cat([x.reshape(-1), x.reshape(-1)]) * w,
    "mm": lambda x, w: torch.mm(x.reshape(-1, 1) @ x.reshape(1, -1), w.reshape(1, 1).expand(x.numel(), 1)),
    "cross entropy": lambda x, w: (
        torch.nn.functional.cross_entropy(x.expand(2, 4), torch.tensor([0, 2])) * w
        if x.dim()
        else torch.nn.functional.cross_entropy(x.reshape(1, 1), torch.tensor([0])) + w
    ),
    "standard deviation of all": lambda x, w: (
        ((torch.stack([x, x * 2]) - torch.stack([x, x * 2]).sum() / 8) ** 2).sum().sqrt() * w
    ),
    "round with decimals": lambda x, w: torch.round(x, decimals=0) + w * x,
    "round with decimals alone": lambda x, w: torch.round(x, decimals=0),
    "div to zero": lambda x, w: torch.div(x, 2.0, rounding_mode="trunc"),
    "div to zero and more": lambda x, w: torch.div(x, 2.0, rounding_mode="trunc") + w * x,
    **{
        f"16 bit {function.__name__}": lambda x, w, function=function: function(x.to(HALF), w).float()
        for function in (torch.mul, torch.add, torch.sub, torch.div, torch.maximum)
    },
    "16 bit on the right": lambda x, w: w * x.bfloat16(),
    "16 bit comparison": lambda x, w: (x.half() < x).float() * w,
    "16 bit where": lambda x, w: torch.where(x > 0, x.half(), w),
    "16 bit of an element": lambda x, w: x.half().reshape(-1)[0] * w,
}


class Function(nn.Module):
    """A function of an input and of a weight without dimensions."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor(1.2345678))

    def forward(self, x):
        return self.function(x, self.weight)


def run(model: nn.Module, called: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the result and the gradients of the input and of the weight."""
    model.zero_grad()
    given = x.clone().requires_grad_()
    result = called(given)
    result.float().sum().backward()
    return [result.detach(), given.grad, None if model.weight.grad is None else model.weight.grad.clone()]


# with dimensions both sides compute in 16 bit, and round a product in another order
@pytest.mark.parametrize(
    ("name", "dimensions"), [(name, n) for name in FUNCTIONS for n in (0, 1) if not n or "16 bit" not in name]
)
def test_results_and_gradients_are_pytorchs(name, dimensions):
    x = torch.tensor(0.7654321) if not dimensions else torch.tensor([0.7654321, -1.5, 2.25, 3.125])
    model = Function(FUNCTIONS[name])
    expected = run(model, model, x)
    runtime, wrapped = wrap_model(model, OrtModuleConfig(log_level="ERROR"), stage=0)
    for ours, theirs in zip(run(model, wrapped, x), expected, strict=True):
        assert (ours is None) == (theirs is None) or theirs is not None and not theirs.any()
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert runtime.status()["fallbacks"] == 0 and runtime.status()["graphs"]["training"]["runs"]["forward"] == 1
