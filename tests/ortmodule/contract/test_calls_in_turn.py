"""What a forward changes and reads several times has PyTorch's values: running statistics, lists, PyTorch parts."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model


class Counting(nn.Module):
    """Changes a buffer and a number with each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x + self.mean * self.calls


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.counting = nn.Linear(6, 6), nn.BatchNorm1d(6), Counting()
        self.function, self.last, self.seconds = function, [], 0.0

    def forward(self, x):
        return self.function(self, x)


def run(function, **options):
    """Return the runtime and the module after steps that give PyTorch's results, gradients and buffers."""
    module = Model(function)
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(**options), stage=0)
    for step in range(4):
        x = torch.randn(5 + step % 2, 6, generator=torch.Generator().manual_seed(step))
        for model in (reference, wrapped):
            model.zero_grad()
        expected, got = reference(x), wrapped(x)
        torch.testing.assert_close(got, expected)
        for result in (got, expected):
            result.square().mean().backward()
        for name in ("linear.weight", "norm.weight"):
            torch.testing.assert_close(module.get_parameter(name).grad, reference.get_parameter(name).grad)
        torch.testing.assert_close(dict(module.named_buffers()), dict(reference.named_buffers()))
        torch.testing.assert_close(module.last, reference.last)
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] >= 4
    return runtime, module


def twice(model, x):
    return model.norm(model.linear(x)) + model.norm(x)


def both_modes(model, x):
    model.norm.eval()
    first = model.norm(x)
    model.norm.train()
    return first + model.norm(model.linear(x))


def test_running_statistics_change_in_the_order_of_the_calls():
    run(twice)


def test_normalisation_in_both_modes_is_run_by_pytorch():
    runtime, _ = run(both_modes)
    assert "is called in train() and in eval()" in runtime.status()["in_torch"]["norm"]


def test_a_module_in_pytorch_is_called_in_turn():
    runtime, module = run(lambda m, x: m.counting(m.linear(x)) - 2 * m.counting(x), exclude=["counting"])
    assert list(runtime.status()["in_torch"]) == ["counting"] and module.counting.calls == 8


def keeps_two(model, x):
    model.last.append(x.detach().mean())
    model.last = model.last[-2:]
    return model.linear(x) * sum(model.last)


def test_what_a_list_held_before_is_not_that_of_the_trace():
    run(keeps_two)


def test_half_precision_results_have_their_dtype():
    module = Model(lambda m, x: m.linear(x).softmax(-1, dtype=torch.float16))
    wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)[1]
    result = wrapped(torch.ones(2, 6))
    assert result.dtype == torch.float16
    result.float().square().sum().backward()
    assert module.linear.weight.grad is not None


def measures(model, x):
    begin = time.time()
    y = model.linear(x)
    model.seconds = time.time() - begin
    return y


def test_times_that_are_not_written_are_named():
    module = Model(measures)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    wrapped(torch.ones(2, 6))
    assert runtime.status()["graphs"]["training"]["attributes_not_written"] == ["Model.seconds"]


def freezes(model, x):
    model.linear.requires_grad_(False)
    first = model.linear(x)
    model.linear.weight.requires_grad = True
    return first + 2 * model.linear(x) + model.norm(x)


def leaves_frozen(model, x):
    first = model.linear(x)
    model.linear.bias.requires_grad_(False)
    return first + model.linear(2 * x) + model.norm(x)


@pytest.mark.parametrize("function", [freezes, leaves_frozen])
def test_parameters_whose_gradient_a_forward_switches_off(function):
    module = Model(function)
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for step in range(4):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        for model, own in ((wrapped, module), (reference, reference)):
            own.linear.bias.requires_grad_(step != 2)
            model.zero_grad()
            model(x).square().sum().backward()
        for one, other in zip(module.parameters(), reference.parameters()):
            assert one.requires_grad == other.requires_grad
            none = torch.zeros_like(one)
            torch.testing.assert_close(
                none if one.grad is None else one.grad, none if other.grad is None else other.grad
            )
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}


def thaws(model, x):
    model.linear.requires_grad_(True)
    return model.linear(x) + model.norm(x)


def test_parameters_that_a_forward_thaws_are_refused():
    module = Model(thaws)
    module.linear.requires_grad_(False)
    wrapped = wrap_model(module, config.OrtModuleConfig(split="off"), stage=0)[1]
    with pytest.raises(ExportError, match=r"switches the gradient of a frozen parameter on .*test_calls_in_turn.py"):
        wrapped(torch.ones(2, 6))
