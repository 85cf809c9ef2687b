"""Results that share memory in PyTorch share it here: views of each other, of arguments, of weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(4, 4), function
        self.kept = None

    def forward(self, x):
        return self.function(self, self.layer(x).tanh(), x)


def keep(model, hidden, x):
    model.kept = hidden[:, 0]
    return hidden, x.sum()


def without_gradients(model, hidden, x):
    with torch.no_grad():
        first = hidden[:1]
    return hidden, first


def changed_afterwards(model, hidden, x):
    hidden = hidden + 1
    row = hidden[0]
    hidden.mul_(2)
    return hidden, row


def parts(model, hidden, x):
    flat = hidden.reshape(-1)
    left, right = flat[:5], flat[3:]
    return left, right, *x.chunk(2, dim=1)


CASES = {
    "detached": lambda model, hidden, x: (hidden, hidden.detach()),
    "rows": lambda model, hidden, x: (hidden[:, 0], hidden, hidden.t()[1:, ::2]),
    "sizes": lambda model, hidden, x: (hidden, hidden.view(x.shape[0] * 2, -1), hidden[x.shape[0] - 1 :]),
    "like": lambda model, hidden, x: (hidden, hidden.flatten().view_as(x), hidden[:, :1].expand_as(hidden)),
    "of arguments": lambda model, hidden, x: (hidden, x.detach(), x.view(-1), x.unsqueeze(0)),
    "of weights": lambda model, hidden, x: (hidden, model.layer.weight.t(), model.layer.bias.detach()),
    "dict": lambda model, hidden, x: {"hidden": hidden, "heads": {"all": hidden.unflatten(1, (2, 2)).transpose(0, 1)}},
    "pieces": lambda model, hidden, x: (hidden, *hidden.split(2, dim=1), hidden.T.diagonal()),
    "kept": keep,
    "no_grad": without_gradients,
    "changed": changed_afterwards,
    "parts": parts,
    "no views": lambda model, hidden, x: (hidden, hidden.clone(), x + 0, x.clone(), hidden * 1, model.layer.bias * 1),
    "copies of weights": lambda model, hidden, x: (hidden, model.layer.weight.clone(), model.layer.bias.clone()),
}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in (value.values() if isinstance(value, dict) else value) for t in tensors_in(part)]


def all_tensors(model, own, x):
    results = tensors_in(model(x))
    kept = [own.kept] if own.kept is not None else []
    return [*results, *kept, x, *own.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_a_change_in_place_shows_where_it_does_in_pytorch(name):
    module = Model(CASES[name])
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for rows in (3, 2, 5):
        count = len(all_tensors(reference, reference, torch.ones(rows, 4)))
        for changed in range(count):
            found = []
            for model, own in ((reference, reference), (wrapped, module)):
                x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
                weights = copy.deepcopy(own.state_dict())
                tensors = all_tensors(model, own, x)
                with torch.no_grad():
                    tensors[changed].fill_(7.0)
                found.append([tensor.tolist() for tensor in tensors])
                own.load_state_dict(weights)
            torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert runtime.status()["graphs"]["training"]["exports"] == 1


@pytest.mark.parametrize("name", CASES)
def test_gradients_through_views(name):
    gradients = []
    module = Model(CASES[name])
    reference = copy.deepcopy(module)
    _, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for model, own in ((reference, reference), (wrapped, module)):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        results = tensors_in(model(x))
        wanted = [(i + 1) * result.square().sum() for i, result in enumerate(results) if result.requires_grad]
        torch.stack(wanted).sum().backward()
        gradients.append([len(wanted), x.grad, *(p.grad for p in own.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0])
