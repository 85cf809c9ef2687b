"""Writes into the weights of a module that is being exported."""

from __future__ import annotations

import pytest
import torch

from ort_zero.ortmodule.compat.value_reads import ValueReadError
from ort_zero.ortmodule.runtime.export import scaled_weights, unchanged_weights
from ort_zero.ortmodule.runtime.export.unchanged_weights import UnchangedWeights


@pytest.fixture
def layer(monkeypatch):
    """A layer with a partitioned weight for which one element stands."""
    layer = torch.nn.Linear(3, 2)
    layer.weight.data = torch.ones(1).expand(2, 3)
    monkeypatch.setattr(unchanged_weights, "is_partitioned", lambda parameter: parameter is layer.weight)
    return layer


def test_a_write_into_a_fake_weight_names_the_module_and_its_runs_get_memory_for_it(layer):
    model = torch.nn.Sequential(layer)
    with pytest.raises(ValueReadError, match=r"changes its parameter weight in place") as found:
        with UnchangedWeights(model).noticed(), torch.no_grad():
            layer.weight.copy_(torch.zeros(2, 3))
    assert found.value.module is layer
    given, scaled = scaled_weights.with_copies_of_scaled(model, dict(model.named_parameters()))
    with torch.no_grad():
        given["0.weight"].copy_(torch.zeros(2, 3))
    assert scaled == [] and given["0.bias"] is layer.bias and layer.weight.data.eq(1).all()


def test_what_a_fake_weight_allows_is_no_write(layer):
    """``torch.nn.utils.parametrize`` gives a weight the storage that it has."""
    with UnchangedWeights(layer).noticed(), torch.no_grad():
        layer.weight.set_(layer.weight.detach())


def test_a_write_that_fails_elsewhere_keeps_its_error(layer):
    with UnchangedWeights(layer).noticed(), torch.no_grad(), pytest.raises(RuntimeError, match="single memory"):
        torch.ones(1).expand(4).copy_(torch.zeros(4))


def test_other_weights_get_their_values_back(layer):
    weights = UnchangedWeights(layer)
    before = layer.bias.detach().clone()
    with weights.noticed(), torch.no_grad():
        layer.bias.zero_()
    weights.restore()
    assert torch.equal(layer.bias, before)
