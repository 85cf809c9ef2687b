"""Batches of size 0, and what a mask selects nothing of: values and gradients are PyTorch's, NaN among them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4, 2)

    def forward(self, x, labels):
        hidden = nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2).mean((2, 3))
        return nn.functional.cross_entropy(self.head(hidden), labels)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, batch):
        return self.head(self.layer(self.embedding(batch["ids"]))).softmax(-1).square().sum()


MODELS = {
    "images": (Images, lambda n: (torch.ones(n, 3, 8, 8), torch.zeros(n, dtype=torch.int64))),
    "tokens": (Tokens, lambda n: ({"ids": torch.ones(n, 3, dtype=torch.int64)},)),
}


def compare(models, args):
    """Run forward and backward of ONNX Runtime's model and of PyTorch's, and compare."""
    (wrapped, module), reference = models
    found = []
    for model, own in ((wrapped, module), (reference, reference)):
        model.zero_grad()
        loss = model(*args)
        if loss.requires_grad:
            loss.backward()
        found.append([loss, {n: p.grad if p.grad is not None else 0 * p for n, p in own.named_parameters()}])
    torch.testing.assert_close(*found, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(2, 0, 3), (0, 2, 0)], ids=["later", "first"])
def test_batches_of_size_0(name, sizes):
    kind, batch = MODELS[name]
    module = kind()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for mode in (True, False):
        wrapped.train(mode), reference.train(mode)
        for size in sizes:
            compare(((wrapped, module), reference), batch(size))
            with torch.no_grad():
                torch.testing.assert_close(wrapped(*batch(size)), reference(*batch(size)), equal_nan=True)
    status, empty = runtime.status(), sizes.count(0)
    assert status["graphs"]["training"]["runs"]["forward"] == 2 * (3 - empty)
    assert status["called_in_torch"]["forward with a batch of size 0"] == 4 * empty


class Selects(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.expert, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x, mask):
        return self.function(self, self.layer(x), mask)


SELECTIONS = {
    "mean": lambda model, y, mask: y.square()[mask].mean(),
    "mean of rows": lambda model, y, mask: y[mask].mean(0).sum(),
    "mse": lambda model, y, mask: nn.functional.mse_loss(y[mask], torch.ones(4).expand_as(y)[mask]),
    "sum": lambda model, y, mask: y[mask].sum() / mask.sum().clamp(min=1) + y.mean(),
    "expert": lambda model, y, mask: y.index_put((mask,), model.expert(y[mask]).tanh()).square().mean(),
    "loss of an expert": lambda model, y, mask: model.expert(y[mask]).square().sum() + y.square().mean(),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_nothing_is_selected(name):
    module = Selects(SELECTIONS[name])
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for mask in ([True, False, True], [False] * 3, [True] * 3):
        compare(((wrapped, module), reference), (x, torch.tensor(mask)))
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 3, "backward": 3}


@pytest.mark.parametrize("in_torch", [False, True], ids=["result", "node"])
def test_a_gradient_of_nothing_is_expanded(in_torch):
    """Of a sum, whose gradient has strides of 0."""
    module = Selects(lambda model, y, mask: (y[mask].cumprod(0) if in_torch else y[mask], y))
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for mask in ([True, False, True], [False] * 3, [True] * 3):
        found = []
        for model, own in ((wrapped, module), (reference, reference)):
            model.zero_grad()
            chosen, whole = model(x, torch.tensor(mask))
            (chosen.sum() + whole.square().mean()).backward()
            found.append([chosen.detach(), *(p.grad for p in own.layer.parameters())])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 3, "backward": 3}
