"""Values at the edges of what kernels hold, and modes of operators that ONNX Runtime computes otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

NAN, INF = float("nan"), float("inf")
VALUES = torch.tensor([NAN, INF, -INF, 3e38, -3e38, 1e20, -7.5, 7.5, 0.3, 0.0])


class Scaled(nn.Module):
    """Applies a function to its argument, which a parameter multiplies by 1."""

    def __init__(self, function):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x):
        return self.function(x * self.scale)


def compare(function, x: torch.Tensor, *, gradients: bool) -> None:
    module = Scaled(function)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), 0)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(wrapped(x), module(x), rtol=1e-5, atol=1e-5, equal_nan=True)
    mode = runtime.status()["graphs"]["training" if gradients else "inference"]
    assert mode["runs"]["forward"] == 1


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.clamp(min=0),
        lambda t: t.clamp(max=3) + t.double().clamp(min=-2).float(),
        lambda t: torch.div(t, 3, rounding_mode="trunc") + t * 0.5,
        F.softshrink,
        F.hardshrink,
    ],
    ids=["clamp min", "clamp max", "div trunc", "softshrink", "hardshrink"],
)
def test_values_that_are_not_finite(function, gradients):
    compare(function, VALUES, gradients=gradients)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_modes_of_grid_sample_without_gradients(mode, padding):
    torch.manual_seed(0)
    grid = torch.randn(2, 5, 6, 2)
    images = torch.randn(2, 3, 7, 8)
    compare(lambda t: F.grid_sample(t, grid, mode, padding, align_corners=False), images, gradients=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t[:, :1].expand_as(t).std(1, keepdim=True),
        lambda t: torch.std_mean(t * 0, -1, unbiased=False)[0],
        lambda t: (t * 0).std() + t,
        lambda t: t.masked_fill(torch.arange(4)[:, None] > 1, -INF).logsumexp(-1, keepdim=True).nan_to_num(),
        lambda t: (t * 0).norm(dim=-1, keepdim=True) + F.normalize(t * 0, dim=-1),
    ],
    ids=["std", "std_mean", "std of all", "logsumexp of -inf", "norms of 0"],
)
def test_gradients_that_pytorch_takes_for_zero(function):
    torch.manual_seed(0)
    module = Scaled(function)
    _, wrapped = wrap_model(module, config.OrtModuleConfig(), 0)
    found = []
    for model in (wrapped, module):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
        model(x).sum().backward()
        found.append((x.grad, module.scale.grad))
        module.scale.grad = None
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert found[0][0].isfinite().all()
