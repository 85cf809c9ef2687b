"""Recurrent layers, which keep lists of their weights, train as in PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

STEPS = 5


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(4, 6), kind(6, 5, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.layer(self.first(x))[0].square().mean()


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("exclude", [[], ["layer"]], ids=["in-the-graph", "excluded"])
def test_one_graph_serves_all_steps_of_an_optimizer(kind, exclude):
    module = Tagger(kind)
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(exclude=exclude), stage=0)
    losses = []
    for model in (wrapped, reference):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3 + step, 4, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    graph = runtime.status()["graphs"]["training"]
    assert graph["exports"] == 1 and graph["runs"] == {"forward": STEPS, "backward": STEPS}
    # a run leaves none of its own tensors in the list
    own = {id(parameter) for parameter in module.layer.parameters()}
    assert {id(weight) for weight in module.layer._flat_weights} == own
