"""Calls and results of unusual shapes: layers without a batch, results that are constants."""

from __future__ import annotations

import copy

import pytest
import torch
from older_versions import older
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Model(nn.Module):
    """Returns what a function makes of the result of a layer."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer(x))


def compare(layer, sizes, function=lambda y: y):
    """Compare results and gradients with PyTorch's for two inputs; return the runtime."""
    torch.manual_seed(0)
    module = Model(layer(), function)
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for step in range(2):
        given = torch.randn(*sizes[:1], sizes[1] + step, *sizes[2:])
        results = []
        for model in (wrapped, reference):
            model.zero_grad()
            result = model(given)
            result = result if isinstance(result, tuple) else (result,)
            sum(tensor.square().sum() for tensor in result if tensor.requires_grad).backward()
            results.append(result)
        torch.testing.assert_close(results[0], results[1])
        for ours, expected in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-5)
    runs = runtime.status()["graphs"]["training"]["runs"]
    # instance normalization of older versions looks at sizes, so that a graph runs in vain when they have changed
    assert runs["backward"] == 2 and (runs["forward"] == 2 or older("torch", "2.13"))
    return runtime


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (lambda: nn.Conv1d(2, 4, 3), (2, 9)),
        (lambda: nn.Conv2d(2, 4, 3), (2, 9, 8)),
        (lambda: nn.Conv3d(2, 4, 2), (2, 5, 4, 3)),
        (lambda: nn.ConvTranspose2d(2, 4, 3), (2, 9, 8)),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.InstanceNorm2d(4)), (2, 9, 8)),
    ],
    ids=["1d", "2d", "3d", "transposed", "stack"],
)  # fmt: skip
def test_convolutions_without_a_batch(layer, sizes):
    compare(layer, sizes)


@pytest.mark.parametrize(
    "function", [lambda y: (y, y.new_ones(3)), lambda y: (y, y.new_full((2,), 3.0), torch.ones(2))]
)
def test_results_that_are_constants(function):
    compare(lambda: nn.Linear(4, 4), (3, 3, 4), function)


def test_norms_of_matrices():
    compare(lambda: nn.Linear(4, 4), (3, 3, 4), torch.linalg.matrix_norm)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_windows_that_do_not_overlap_keep_their_values(width):
    compare(lambda: nn.Linear(4, 4), (2, 5, 4), lambda y: y.clamp(-1, 0.7).unfold(2, width, width)[..., 0].exp())


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y[:, torch.arange(y.shape[1] - 1, -1, -1)],
        lambda y: y[:, torch.arange(-y.shape[1], 0)] * y,
        lambda y: y[:, torch.arange(4, -1, -2)],
        lambda y: y.index_select(1, torch.arange(y.shape[1] - 1, 0, -2, dtype=torch.int32)),
        lambda y: y[:, torch.arange(1, y.shape[1])],
    ],
)
def test_ranges_as_indices(function):
    compare(lambda: nn.Linear(4, 4), (2, 5, 4), function)


def test_a_range_that_is_longer_than_the_axis_is_an_error():
    torch.manual_seed(0)

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 4))

        def forward(self, x):
            return x * self.table[torch.arange(x.shape[0])]

    runtime, ours = wrap_model(Positions(), config.OrtModuleConfig(log_level="ERROR"), stage=0)
    assert ours(torch.ones(1, 4)).shape == (1, 4) and runtime.status()["backend"] == "onnxruntime"
    with pytest.raises(IndexError, match="index 1 is out of bounds"):
        ours(torch.ones(3, 4))
