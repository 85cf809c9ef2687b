"""What torch.vmap computes of single numbers is in the graph, for all sizes; all else that it does is as before."""

from __future__ import annotations

import pytest
import torch
from older_versions import skip_unless_torch_can
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.compat.traced_vmap import vmap_by_broadcasting
from ort_zero.ortmodule.wrap import wrap_model


def mapped(function, *dims):
    """Return `function` mapped over one argument after the other, the last of `dims` outermost."""
    for axes in dims:
        function = torch.vmap(function, in_dims=axes, out_dims=0)
    return function


OVER_MASK = [(None, None, 0), (None, 0, None), (0, None, None)]


def padding_and_causal(mask, batch, query, key):
    """As transformers 4.57 makes the mask of a decoder."""

    def visible(b, q, k):
        allowed = q.new_ones((), dtype=torch.bool)
        for rule in (lambda b, q, k: k <= q, lambda b, q, k: mask[b, k]):
            allowed = allowed & rule(b, q, k).to(allowed.device)
        return allowed

    return mapped(visible, *OVER_MASK)(batch, query, key)


def sliding_window(mask, batch, query, key):
    """A mapped argument on which the result does not depend, and a number of Python."""
    return mapped(lambda b, q, k: (k > q - 2) & (k // 2 == q // 2), *OVER_MASK)(batch, query, key)


def packed_sequences(mask, batch, query, key):
    """Look-ups at two numbers, one of them of Python, and a constant result in between."""
    numbers = mask.long().cumsum(1)
    return mapped(lambda b, q, k: (numbers[b, q] == numbers[b, k]) | (numbers[0, k] == q.new_zeros(())), *OVER_MASK)(
        batch, query, key
    )


def two_maps_at_once(mask, batch, query, key):
    """Two vectors along one axis, and one map in which another is made and called."""
    weights = mask[0].long()
    near = torch.vmap(lambda q: torch.vmap(lambda k, weight: torch.where(k < q, weight, weight * 2))(key, weights))
    return near(query).expand(mask.shape[0], -1, -1) > 0


def of_rows(mask, batch, query, key):
    """Not of numbers: stays as it was."""
    return torch.vmap(lambda row: (key + row.sum())[None, :] >= query[:, None])(mask.long())


def a_vector_inside(mask, batch, query, key):
    """A number together with a vector that is not mapped."""
    return torch.vmap(lambda b: (key > query[:, None]) & (key >= b))(batch)


MASKS = (padding_and_causal, sliding_window, packed_sequences, two_maps_at_once)
FUNCTIONS = (*MASKS, of_rows, a_vector_inside)


class Masked(nn.Module):
    """A layer whose result is masked by what `make` returns, of shape (batch, length, length)."""

    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.make = make

    def forward(self, x, mask):
        places = torch.arange(x.shape[1])
        visible = self.make(mask, torch.arange(x.shape[0]), places, places)
        return visible.float() @ self.layer(x)


def inputs(count, length):
    """Return activations, and a mask that hides the end of the first row."""
    mask = torch.ones(count, length, dtype=torch.bool)
    mask[0, -2:] = False
    return torch.randn(count, length, 4), mask


@pytest.mark.parametrize("make", MASKS, ids=lambda make: make.__name__)
def test_masks_are_in_the_graph_for_all_sizes(make):
    torch.manual_seed(0)
    module = Masked(make)
    skip_unless_torch_can(lambda: module(*inputs(2, 5)))
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), 0)
    for sizes in ((2, 5), (3, 7), (1, 2)):
        x, mask = inputs(*sizes)
        result, expected = wrapped(x, mask), module(x, mask)
        result.sum().backward()
        torch.testing.assert_close(result, expected)
    status = runtime.status()
    assert status["fallbacks"] == 0 and set(status["in_torch"]) <= {"aten::floor_divide"}
    assert status["graphs"]["training"]["runs"] == {"forward": 3, "backward": 3}
    assert len(status["transitions"]) == 1, "one graph for all sizes"


@pytest.mark.parametrize("make", FUNCTIONS, ids=lambda make: make.__name__)
def test_values_types_and_shapes_are_those_of_vmap(make):
    def traced(mask):
        places = torch.arange(mask.shape[1])
        return make(mask, torch.arange(mask.shape[0]), places, places)

    mask = inputs(3, 6)[1]
    skip_unless_torch_can(lambda: traced(mask))
    expected = traced(mask)
    seen = []

    def record(mask):
        with vmap_by_broadcasting():
            seen.append(traced(mask))
        return mask

    torch.jit.trace(record, (mask,), check_trace=False)
    assert torch.equal(seen[0], expected) and seen[0].dtype == expected.dtype


def _changes_something(counts, numbers):
    def function(n):
        counts.add_(1)
        return n + counts

    return torch.vmap(function)(numbers)


def _of_other_types(counts, numbers):
    return torch.vmap(lambda n: n * torch.tensor(2, dtype=torch.int64))(numbers.int())


def _sums(counts, numbers):
    return torch.vmap(lambda n: n.sum() + 1)(numbers)


def _of_columns(counts, numbers):
    return torch.vmap(lambda n: n + 1, in_dims=1, out_dims=1)(numbers.reshape(2, 2))


def _returns_a_pair(counts, numbers):
    return torch.stack(torch.vmap(lambda n: (n + 1, n * 2))(numbers))


def _looks_up_rows(counts, numbers):
    return torch.vmap(lambda n: numbers.reshape(2, 2)[n // 2])(torch.arange(4))


@pytest.mark.parametrize(
    "function", [_changes_something, _of_other_types, _sums, _of_columns, _returns_a_pair, _looks_up_rows]
)
def test_what_is_no_arithmetic_of_numbers_is_left_to_vmap(function):
    """Also if it has begun as such: nothing is changed twice."""
    numbers = torch.arange(4.0)
    skip_unless_torch_can(lambda: function(torch.zeros(()), numbers))
    expected = function(torch.zeros((), dtype=torch.float32), numbers)
    seen, counts = [], torch.zeros((), dtype=torch.float32)

    def record(x):
        with vmap_by_broadcasting():
            seen.append(function(counts, numbers))
        return x

    try:
        torch.jit.trace(record, (numbers,), check_trace=False)
    except RuntimeError as error:  # the tracer's own limits, which the exporter meets as well
        assert "Unsupported value kind" in str(error)
        return
    assert torch.equal(seen[0], expected) and seen[0].dtype == expected.dtype
    assert counts.item() <= 1
