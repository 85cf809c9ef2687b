"""Backwards that start at a place in autograd's graph, on a torch that can and on one that cannot."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from ort_zero.ortmodule.compat import torch_autograd
from ort_zero.ortmodule.compat.torch_autograd import BackwardEnd, gradients


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.fixture(params=[True, False], ids=["at edges", "at results without data"])
def kind(request, monkeypatch):
    """Let this torch be one that starts backwards at edges, or one that does not."""
    if request.param and not torch_autograd._starts_at_edges():
        pytest.skip("this torch starts no backward at the place of a Python Function's result")
    monkeypatch.setattr(torch_autograd, "_starts_at_edges", lambda: request.param)


def test_gradients_are_those_of_the_tensors(kind):
    x = torch.randn(3, 4, requires_grad=True)
    unused = torch.randn(2, requires_grad=True)
    made = [Double.apply(x), x.sin().sum(0)]
    with torch.no_grad():  # as in the forward of a Function
        ends = [BackwardEnd(tensor) for tensor in made]
    given = [torch.randn(3, 4), torch.randn(4)]
    starts = [get_gradient_edge(x), get_gradient_edge(unused)]
    found = gradients(ends, starts, given)
    torch.testing.assert_close(found[0], 2 * given[0] + x.detach().cos() * given[1])
    assert found[1] is None
    assert gradients([], starts, []) == [None, None]


def test_an_end_holds_no_data(kind):
    x = torch.randn(3, requires_grad=True)
    made = Double.apply(x)
    end, gone = BackwardEnd(made), weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    torch.testing.assert_close(gradients([end], [get_gradient_edge(x)], [torch.ones(3)])[0], torch.full((3,), 2.0))


def test_no_gradient_comes_where_nothing_leads_any_more(kind):
    x = torch.randn(3, requires_grad=True)
    left = [get_gradient_edge(Double.apply(x))]  # no result was computed of it
    made = Double.apply(x)
    ends, given = [BackwardEnd(made)], [torch.ones(3)]
    assert gradients(ends, left, given) == [None]
    found = gradients([BackwardEnd(made)], [*left, get_gradient_edge(x)], given)
    assert found[0] is None
    torch.testing.assert_close(found[1], torch.full((3,), 2.0))
