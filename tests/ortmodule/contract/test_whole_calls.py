"""Calls that PyTorch runs as a whole, and arguments that no graph takes: the other calls stay in ONNX Runtime."""

from __future__ import annotations

import copy

import pytest
import torch
from older_versions import older
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.runtime import calls_in_torch
from ort_zero.ortmodule.wrap import wrap_model


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 2))


def batch(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("adapted", ["", "2."], ids=["all", "head"])
def test_functional_call_exports_nothing(adapted):
    """As meta-learning does: weights of one call that are computed from the model's own."""
    module = network()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    found = []
    for model in (wrapped, reference):
        losses = []
        for step in range(3):
            weights = {name: p for name, p in model.named_parameters() if name.startswith(adapted)}
            loss = model(batch(step)).square().mean()
            gradients = torch.autograd.grad(loss, list(weights.values()))
            fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
            query = torch.func.functional_call(model, fast, (batch(9 + step),)).square().mean()
            query.backward()
            losses += [loss, query]
        found.append([losses, [p.grad for p in model.parameters()]])
    torch.testing.assert_close(*found)
    status = runtime.status()
    assert status["graphs"]["training"]["exports"] == 1
    assert status["graphs"]["training"]["runs"] == {"forward": 3, "backward": 3}
    assert status["called_in_torch"] == {calls_in_torch.REPLACED: 3}


def test_gradients_of_each_sample_by_vmap():
    module = network()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    found = []
    for model in (wrapped, reference):
        result = model(batch(0))  # a graph is there already
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights, x, model=model):
            return torch.func.functional_call(model, weights, (x[None],)).square().mean()

        found.append([result, torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, batch(1)), model(batch(2))])
    torch.testing.assert_close(*found)
    status = runtime.status()
    assert status["called_in_torch"] == {calls_in_torch.TRANSFORMED: 1}
    assert status["graphs"]["training"]["runs"]["forward"] == 2


def test_lazy_modules_are_initialized_by_the_first_call():
    module, reference = (
        nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(2)) for _ in range(2)
    )
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    found = []
    for model, own in ((wrapped, module), (reference, reference)):
        torch.manual_seed(1)
        results = [model(batch(step)) for step in range(3)]
        results[-1].sum().backward()
        found.append([results, {name: p.grad for name, p in own.named_parameters()}])
    torch.testing.assert_close(*found)
    status = runtime.status()
    assert status["called_in_torch"] == {calls_in_torch.UNINITIALIZED: 1}
    assert status["graphs"]["training"]["runs"]["forward"] == 2


class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, self.linear(x))


class GraphNetwork(nn.Module):
    """Gives its submodules the sparse matrix, as graph networks do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = GraphConvolution(6, 8), GraphConvolution(8, 2)

    def forward(self, x, adjacency):
        return self.second(self.first(x, adjacency).relu(), adjacency)


class NestedTokens(nn.Module):
    """Its embedding takes a nested tensor, its head the dense rows of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, tokens):
        return self.head(self.layer(tokens).values())


def adjacency():
    return torch.eye(4).roll(1, 0).to_sparse()


def nested_rows():
    return torch.nested.nested_tensor([batch(0)[:3], batch(1)[:2]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("kind", "arguments", "graphs"),
    [
        (GraphNetwork, lambda step: (batch(step), adjacency()), ["first.linear", "second.linear"]),
        pytest.param(
            *(NestedTokens, lambda step: (nested_rows(),), ["head"]),
            marks=pytest.mark.xfail(older("torch", "2.13"), reason="jagged tensors lose their attributes"),
        ),
    ],
    ids=["sparse", "nested"],
)
def test_arguments_that_are_not_dense(kind, arguments, graphs):
    """The code that is given them runs in PyTorch; what it calls with dense tensors has graphs."""
    module = kind()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for step in range(3):
        results = []
        for model in (wrapped, reference):
            results.append(model(*arguments(step)))
            results[-1].square().sum().backward()
        torch.testing.assert_close(*results)
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    status = runtime.status()
    assert status["backend"] == "onnxruntime"
    assert "tensor; ONNX graphs take dense ones" in status["in_torch"][f"{kind.__name__}.forward"]
    ran = _forwards(status["submodules"])
    assert {path: ran[path] for path in graphs} == dict.fromkeys(graphs, 3)


def _forwards(parts, prefix=""):
    """Return the number of forwards that ONNX Runtime has run of each submodule, those of its submodules by path."""
    found = {}
    for path, status in parts.items():
        found[prefix + path] = status["graphs"].get("training", {}).get("runs", {}).get("forward", 0)
        found |= _forwards(status.get("submodules", {}), f"{prefix}{path}.")
    return found


def test_quantized_arguments_of_a_model_without_other_parts_are_an_error():
    _, wrapped = wrap_model(nn.Linear(6, 2), config.OrtModuleConfig(), stage=0)
    quantized = torch.quantize_per_tensor(batch(0), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="argument input is a quantized tensor; ONNX graphs take dense ones"):
        wrapped(quantized)
