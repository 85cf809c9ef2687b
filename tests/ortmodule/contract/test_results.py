"""Results and arguments of unusual kinds come back as PyTorch's, through the graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
BIG = torch.tensor([2**53 + 1, -(2**53) - 1, -5, 7])


class Model(nn.Module):
    """Returns what a function makes of the result of a layer, and of integers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x, numbers=None):
        return self.function(self.layer(x), numbers)


def both(function):
    """Return ORT's runtime and model, and PyTorch's copy."""
    module = Model(function)
    reference = copy.deepcopy(module)
    return *wrap_model(module, config.OrtModuleConfig(), stage=0), reference


def test_sizes_are_python_numbers():
    runtime, wrapped, reference = both(lambda y, _: (y, y.shape[0], {"half": y.shape[0] / 2, "all": [y.numel()]}, 1.5))
    for rows in (3, 5):
        got, expected = wrapped(torch.ones(rows, 4))[1:], reference(torch.ones(rows, 4))[1:]
        assert got == expected and list(map(type, got)) == list(map(type, expected))
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] == 2


def test_complex_results_are_complex():
    runtime, wrapped, reference = both(lambda y, _: (torch.fft.rfft(y), y.sum()))
    (got, _), (expected, _) = wrapped(X), reference(X)
    torch.testing.assert_close(got, expected)
    for model in (wrapped, reference):
        model(X)[0].abs().sum().backward()
    torch.testing.assert_close(runtime.module.layer.weight.grad, reference.layer.weight.grad)


@pytest.mark.parametrize("function", [lambda i: i >> 2, lambda i: torch.fmod(i, 3)], ids=["shift", "fmod"])
def test_integers_are_exact(function):
    runtime, wrapped, reference = both(lambda y, i: (y.sum(), function(i)))
    assert wrapped(X, BIG)[1].tolist() == reference(X, BIG)[1].tolist()
    assert len(runtime.status()["in_torch"]) == 1


def test_a_cast_that_changes_nothing_may_be_read_twice():
    runtime, wrapped, reference = both(lambda y, _: y.float().square().mean())
    for model in (wrapped, reference):
        model(X).backward()
    torch.testing.assert_close(runtime.module.layer.weight.grad, reference.layer.weight.grad)
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 1, "backward": 1}


def test_inference_mode():
    runtime, wrapped, reference = both(lambda y, _: y.tanh())
    with torch.inference_mode():
        x = X * 2
        torch.testing.assert_close(wrapped(x), reference(x))
    for model in (wrapped, reference):
        model(X).sum().backward()
    torch.testing.assert_close(runtime.module.layer.weight.grad, reference.layer.weight.grad)


class Parts(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.flatten, self.function = nn.Linear(8, 8), nn.Flatten(0), function

    def forward(self, x):
        return self.function(self, self.linear(x))


def with_use(result):
    """Return a result, and another one that is computed of it, so that its memory is not the caller's alone."""
    return result, (result * 3).sin()


SHARED = {
    "view": lambda model, y: with_use(y.view(-1, 2, 4)),
    "tanh": lambda model, y: with_use((y * 2).tanh()),
    "softmax": lambda model, y: with_use(y.softmax(-1)),
    "residual": lambda model, y: with_use(y + model.linear(y).tanh()),
    "sine": lambda model, y: (y, y.sin()),
    "integers": lambda model, y: ((y > 0).long().view(-1, 2, 4), (y > 0).long().view(-1, 2, 4) * y.view(-1, 2, 4)),
    "booleans": lambda model, y: ((y > 0).view(-1, 2, 4), ~(y > 0).view(-1, 2, 4), y),
    "in PyTorch": lambda model, y: with_use(model.flatten((y * 2).tanh())),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "no-backward"])
def test_results_stay_what_they_are(name, backward):
    """Also after the backward, which frees and reuses memory, and in later calls where there was none."""
    runtime, wrapped = wrap_model(Parts(SHARED[name]), config.OrtModuleConfig(exclude=["flatten"]), stage=0)
    for _ in range(2):
        results = wrapped(torch.randn(3, 8))
        before = [tensor.detach().clone() for tensor in results]
        if backward:
            sum(tensor.sum() for tensor in results if tensor.requires_grad).backward()
        else:
            results = [tensor.detach() for tensor in results]
            for _ in range(2):
                sum(tensor.sum() for tensor in wrapped(torch.randn(3, 8)) if tensor.requires_grad).backward()
        for tensor, expected in zip(results, before):
            assert torch.equal(tensor, expected)
    assert runtime.status()["backend"] == "onnxruntime"


class InPlace(nn.Module):
    """Changes its argument and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        x.add_(1)
        self.total.add_(x.sum())
        return self.norm(self.layer(x))


def test_inference_mode_changes_arguments_and_buffers():
    module = InPlace()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for _ in range(3):
        found = []
        for model, own in ((wrapped, module), (reference, reference)):
            with torch.inference_mode():
                x = X * 2
                found.append([model(x), x, dict(own.named_buffers())])
        torch.testing.assert_close(found[0], found[1])
    assert runtime.status()["graphs"]["inference"]["runs"]["forward"] == 3


@pytest.mark.parametrize("q", [0.3, torch.tensor([0.1, 0.9])], ids=["number", "tensor"])
def test_quantiles(q):
    runtime, wrapped, reference = both(lambda y, _: (y.quantile(q), y.quantile(q, dim=-1)))
    torch.testing.assert_close(wrapped(X), reference(X))
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] == 1


class ReturnsAll(nn.Module):
    """Returns what its backward reads, and could write into."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x)
        probs = hidden.softmax(-1)
        parts = [hidden.tanh(), hidden.sigmoid(), hidden.exp(), hidden.relu(), nn.functional.gelu(hidden)]
        parts += [probs, probs.log(), self.norm(hidden), self.head(hidden * probs), hidden.abs().sqrt(), hidden / 2]
        parts += [(probs[:, :1] - probs).square(), hidden.log_softmax(-1), torch.where(hidden > 0, probs, hidden)]
        loss = sum((part * probs).square().mean() + (part * x).sum() for part in parts)
        return loss, parts, hidden


def test_a_backward_leaves_the_results_as_they_are():
    module = ReturnsAll()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for _ in range(2):
        found = []
        for model in (wrapped, reference):
            model.zero_grad()
            loss, parts, hidden = model(X)
            before = [t.detach().clone() for t in (loss, *parts, hidden)]
            (loss + parts[5].square().sum()).backward()
            torch.testing.assert_close([loss, *parts, hidden], before, rtol=0, atol=0)
            found.append(before)
        torch.testing.assert_close(found[0], found[1])
        torch.testing.assert_close(module.layer.weight.grad, reference.layer.weight.grad)
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 2, "backward": 2}
