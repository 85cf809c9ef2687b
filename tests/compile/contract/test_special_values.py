"""NaN, infinities, zeros, denormals and huge numbers: compiled functions return what eager PyTorch does.

Functions of one, two and three elements are called with all of these numbers, pairs and triples of them; results and
gradients are compared. The numbers fill the processor's vectors and leave a rest, which PyTorch treats differently.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ort_zero.compile.engine import CompileEngine
from ort_zero.compile.settings import Settings

NUMBERS = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, 1e30,
           -1e30, 1e20, 1e10, -1e10, 1e5, 100.0, -100.0, 89.0, -104.0, 20.0, -15.0, 7.0, 6.0, -6.0, 3.0, -3.0, 2.5,
           1.5, -1.5, 1.0, -1.0, 0.5, -0.5, 1e-8]  # fmt: skip
FEW = [math.nan, math.inf, -math.inf, 0.0, 3.4028235e38, 1e30, -1e10, -1.0, 2.5, 1e-40]


def _of_torch(names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(torch, name) for name in names.split()}


def _of_functional(names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(F, name) for name in names.split()}


ONE = {
    **_of_torch(
        "exp log tanh erf sigmoid sin cos atan sqrt reciprocal floor ceil round neg abs sign rsqrt relu isnan isinf "
        "isfinite logical_not expm1 log1p sinh cosh asinh exp2 log2 log10 square frac trunc nan_to_num"
    ),
    **_of_functional(
        "gelu silu elu selu celu leaky_relu hardtanh relu6 hardsigmoid hardswish hardshrink softshrink softplus "
        "softsign tanhshrink mish logsigmoid"
    ),
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    **{f"** {power}": lambda x, power=power: x**power for power in (2, 3, 0.5, -0.5, -1, -2, 4, 1.5, 0.3, 0, 1)},
    "2 **": lambda x: 2.0**x,
    "clamp": lambda x: x.clamp(-1, 1),
    "through bool": lambda x: x.bool().float() + x,
    "through half": lambda x: (x * 1.5).half().float(),
    "through bfloat16": lambda x: (x * 1.5).bfloat16().float(),
    "* 0": lambda x: x * 0,
    "/ 0": lambda x: x / 0,
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "masked_fill": lambda x: x.masked_fill(x > 0, -math.inf),
    "fmod": lambda x: torch.fmod(x, 3.0),
}
TWO = {
    **_of_torch("add sub mul div maximum minimum pow eq ne lt le gt ge logical_and logical_xor fmax xlogy logaddexp"),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamp": lambda x, y: torch.clamp(x, min=y),
}
THREE = {
    **{
        name: lambda x, name=name: getattr(torch, name)(x, dim=-1)
        for name in "sum mean prod amax amin argmax logsumexp var std softmax log_softmax cumsum any norm var_mean "
        "std_mean".split()
    },
    "sum of all": torch.sum,
    "prod of all": torch.prod,
    "prod, kept": lambda x: x.prod(keepdim=True, dim=0),
    "norm 1": lambda x: x.norm(1, -1),
    "matmul": lambda x: x @ x.T,
    "pad": lambda x: F.pad(x, (1, 1), value=math.nan),
}
CASES = [
    pytest.param(function, arguments, id=f"{name}, {len(arguments)} of {arguments[0].dim()}")
    for table, arguments in (
        (ONE, (torch.tensor(NUMBERS),)),
        (TWO, tuple(torch.tensor(list(itertools.product(NUMBERS, repeat=2))).unbind(1))),
        (THREE, (torch.tensor(list(itertools.product(FEW, repeat=3))),)),
    )
    for name, function in table.items()
]


def results(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return results and gradients of a function."""
    copies = [each.clone().requires_grad_() for each in inputs]
    made = function(*copies)
    outputs = list(made) if isinstance(made, tuple) else [made]
    ends = [end for end in outputs if end.requires_grad]
    weights = [torch.linspace(0.5, 1.5, end.numel()).reshape(end.shape) for end in ends]
    return outputs + list(torch.autograd.grad(ends, copies, weights) if ends else ())


@pytest.mark.parametrize(("function", "inputs"), CASES)
def test_special_values_are_treated_as_in_eager_pytorch(function, inputs):
    torch._dynamo.reset()
    backend = CompileEngine(Settings(place="ort", verify="off", reproducers=os.devnull)).compiler()
    ours, theirs = results(torch.compile(function, backend=backend), inputs), results(function, inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)


LOOKUPS = {
    "embedding": lambda x, ids: F.embedding(ids, x) * 2,
    "index_select": lambda x, ids: (x + 1).index_select(0, ids) * 2,
    "gather": lambda x, ids: (x + 1).gather(0, ids[:, None].expand(-1, 4)) * 2,
    "take_along_dim": lambda x, ids: torch.take_along_dim(x + 1, ids[:, None].expand(-1, 4), 0) * 2,
    "index": lambda x, ids: (x + 1)[ids] * 2,
    "index_add": lambda x, ids: x.index_add(0, ids, torch.ones(len(ids), 4)) * 2,
    "index_copy": lambda x, ids: x.index_copy(0, ids, torch.ones(len(ids), 4)) * 2,
    "index_fill": lambda x, ids: x.index_fill(0, ids, 3.0) * 2,
    "scatter": lambda x, ids: x.scatter(0, ids[:, None].expand(-1, 4), 1.0) * 2,
    "index_put": lambda x, ids: torch.index_put(x, (ids,), torch.tensor(3.0)) * 2,
}


@pytest.mark.parametrize("index", [-1, -5, 5, -6])
@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_that_pytorch_refuses_is_refused(name, index):
    """A later call has it: what a first run has shown to be right says nothing about other values."""
    torch._dynamo.reset()
    function, x = LOOKUPS[name], torch.randn(5, 4)
    call = torch.compile(function, backend=CompileEngine(Settings(place="ort", reproducers=os.devnull)).compiler())
    for ids in torch.tensor([0, 4, 2]), torch.tensor([1, 1, 0]), torch.tensor([0, index, 2]):
        try:
            wanted = function(x, ids)
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error), match="out of (range|bounds)"):
                call(x, ids)
        else:
            torch.testing.assert_close(call(x, ids), wanted)
