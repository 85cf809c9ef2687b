"""What a value depends on that is read while a module is traced: shapes, data, random numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ort_zero.ortmodule.compat.trace_origins import Origin, Origins


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, like):
        return torch.rand_like(like)


def origin_of(compute, mode: str = "value") -> Origin:
    """Return the origin of what `compute` makes of a matrix and a single number, which are inputs of a trace."""
    found = []

    def traced(x, rate):
        value = compute(x, rate)
        found.append(Origins().of(torch._C._get_value_trace(value), mode))
        return value

    torch.jit.trace(traced, (torch.randn(3, 4), torch.tensor(0.5)), check_trace=False)
    return found[0]


ALONE = {
    "rand": lambda x, p: torch.rand([]),
    "rand of a size": lambda x, p: torch.rand(x.shape[0]).mean() < 0.5,
    "randn": lambda x, p: torch.randn(2).sum(),
    "randint": lambda x, p: torch.randint(0, 5, ()),
    "randperm": lambda x, p: torch.randperm(4)[0],
    "normal": lambda x, p: torch.normal(0.0, 1.0, (1,)),
    "normal of tensors": lambda x, p: torch.normal(torch.zeros(2), torch.ones(2)),
    "poisson": lambda x, p: torch.poisson(torch.ones(2)),
    "bernoulli": lambda x, p: torch.bernoulli(torch.full((2,), 0.5)),
    "multinomial": lambda x, p: torch.multinomial(torch.ones(4), 1),
    "rand_like": lambda x, p: torch.rand_like(x).mean(),
    "randn_like": lambda x, p: torch.randn_like(x)[0],
    "randint_like": lambda x, p: torch.randint_like(x, 3),
    "uniform_": lambda x, p: torch.empty(1).uniform_(),
    "uniform_ in place of data": lambda x, p: x.clone().uniform_(),
    "normal_": lambda x, p: x.new_empty(2).normal_(),
    "bernoulli_": lambda x, p: x.new_empty(3, 1).bernoulli_(0.5),
    "random_": lambda x, p: torch.empty(1).random_(),
    "exponential_": lambda x, p: torch.empty(1).exponential_(),
    "dropout of constants": lambda x, p: F.dropout(torch.ones(4), 0.5),
    "compared with a single input": lambda x, p: torch.rand([]) < p,
    "an autograd Function of constants": lambda x, p: Drawing.apply(torch.ones(2)),
}
MIXED = {
    "dropout of data": lambda x, p: F.dropout(x, 0.5).sum(),
    "noise on data": lambda x, p: (x + torch.randn_like(x)).argmax(),
    "multinomial of data": lambda x, p: torch.multinomial(x.softmax(-1), 1),
    "bernoulli of data": lambda x, p: torch.bernoulli(x.sigmoid()),
}
DATA = {
    "a sum": lambda x, p: x.sum(),
    "a single input": lambda x, p: p * 2,
    "dropout that is off": lambda x, p: F.dropout(x, 0.5, training=False).sum(),
    "dropout of nothing": lambda x, p: F.dropout(x, 0.0).sum(),
    "attention without dropout": lambda x, p: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}
FIXED = {
    "a constant": lambda x, p: torch.ones(3).sum(),
    "a size": lambda x, p: torch.tensor(1.0) * x.shape[0],
    "zeros_like": lambda x, p: torch.zeros_like(x).sum(),
    "the size of random numbers": lambda x, p: torch.tensor(1) * torch.rand(3, x.shape[1]).shape[1],
    "dropout of constants that is off": lambda x, p: F.dropout(torch.ones(3), 0.5, training=False),
}


@pytest.mark.parametrize(
    ("expected", "compute"),
    [
        pytest.param(expected, compute, id=name)
        for expected, table in (
            (Origin.RANDOM, ALONE),
            (Origin.RANDOM_DATA, MIXED),
            (Origin.DATA, DATA),
            (Origin.FIXED, FIXED),
        )
        for name, compute in table.items()
    ],
)
def test_values(expected, compute):
    assert origin_of(compute) is expected
    assert expected.is_random == (expected in (Origin.RANDOM, Origin.RANDOM_DATA))


@pytest.mark.parametrize(
    ("expected", "compute"),
    [
        (Origin.FIXED, lambda x, p: torch.rand(3, 2)),
        (Origin.FIXED, lambda x, p: x * 2),
        (Origin.DATA, lambda x, p: x.gt(0).nonzero()),
        (Origin.DATA, lambda x, p: x[x > 0]),
        (Origin.RANDOM, lambda x, p: torch.rand(9).gt(0.5).nonzero()),
        (Origin.RANDOM, lambda x, p: x[torch.rand(3) < 0.5]),
    ],
)
def test_shapes(expected, compute):
    assert origin_of(compute, "shape") is expected


def test_what_is_known_of_one_value_serves_the_next():
    """A value without random numbers may still depend on data, and one of constants alone may not."""

    def traced(x):
        origins, of = Origins(), torch._C._get_value_trace
        doubled, noise, ones = x * 2, torch.rand(2), torch.ones(2)
        asked = [doubled, doubled + ones[0], ones, noise, doubled.sum() + noise, noise * ones, ones + 1, doubled]
        found.extend(origins.of(of(value), "value") for value in asked)
        return doubled

    found: list[Origin] = []
    torch.jit.trace(traced, (torch.randn(3),), check_trace=False)
    data, fixed, random, mixed = Origin.DATA, Origin.FIXED, Origin.RANDOM, Origin.RANDOM_DATA
    assert found == [data, data, fixed, random, mixed, random, fixed, data]
