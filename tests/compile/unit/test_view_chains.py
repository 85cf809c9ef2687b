"""Chains of views become one view, or none, and mean the same."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ort_zero.compile.view_chains import shorten

ATEN = torch.ops.aten


def chain(*steps):
    """Return a function that applies views, one after the other, to twice its argument."""

    def function(x):
        x = x * 2
        for operator, argument in steps:
            x = operator(x, argument)
        return x

    return function


CASES = {
    "views": (chain((ATEN.view, [6, 4]), (ATEN.view, [2, 12]), (ATEN.view, [2, -1, 3])), ["mul", "view"]),
    "unsafe views": (chain((ATEN._unsafe_view, [6, 4]), (ATEN.view, [24])), ["mul", "view"]),
    "two transposes": (chain((ATEN.permute, [1, 2, 0]), (ATEN.permute, [2, 0, 1])), ["mul"]),
    "negative dimensions": (chain((ATEN.permute, [-1, 0, 1]), (ATEN.permute, [1, 2, -3])), ["mul"]),
    "three permutations": (
        chain((ATEN.permute, [1, 2, 0]), (ATEN.permute, [0, 2, 1]), (ATEN.permute, [2, 1, 0])),
        ["mul", "permute"],
    ),
    "a view of a permutation": (chain((ATEN.permute, [2, 0, 1]), (ATEN.reshape, [4, 6])), ["mul", "permute", "view"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_chain_means_the_same(name):
    function, left = CASES[name]
    x = torch.arange(24.0).reshape(2, 3, 4)
    module = make_fx(function)(x)
    shorten(module.graph)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(x), function(x), rtol=0, atol=0)
    assert module(x).stride() == function(x).stride()
    called = [node.target.overloadpacket.__name__ for node in module.graph.nodes if node.op == "call_function"]
    assert called == left


def test_a_view_that_others_read_stays():
    x = torch.arange(24.0).reshape(2, 3, 4)

    def function(x):
        middle = ATEN.view(x * 2, [6, 4])
        return middle, ATEN.view(middle, [24])

    module = make_fx(function)(x)
    shorten(module.graph)
    module.recompile()
    assert [result.shape for result in module(x)] == [(6, 4), (24,)]


def test_an_input_does_not_become_a_result():
    module = make_fx(lambda x: ATEN.permute(ATEN.permute(x, [1, 0]), [1, 0]))(torch.ones(2, 3))
    shorten(module.graph)
    module.recompile()
    x = torch.ones(2, 3)
    assert module(x) is not x and module(x).shape == (2, 3)
