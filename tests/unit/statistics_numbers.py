"""A small model with statistics, and the comparison of what was written with numpy; for both engines' tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from statistics_files import records_of
from torch import nn

from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from ort_zero.statistics.files import open_run
from ort_zero.statistics.records import Phase


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc, self.head = nn.Embedding(20, 8), nn.Linear(8, 300), nn.Linear(300, 3)

    def forward(self, ids, weight=None):
        x = inspect_activation("looked up", self.table(ids)).mean(1)
        x = self.fc(x).relu()
        return {"logits": self.head(x), "hidden": x if weight is None else x * weight}


IDS = torch.arange(12).view(3, 4)


def train(folder, steps=3, *, model=None, wrap: Callable[[nn.Module], Any] = lambda model: model, **options):
    """Train with statistics; return the model and what every place held, by (step, phase, module, kind, slot)."""
    model = model or Net()
    run = wrap(model)
    session = GlobalSubscriberManager.subscribe(run, [StatisticsSubscriber(str(folder), **options)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        out = run(IDS)
        out["logits"].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.remove()
    return model


def records(folder, rank=0):
    found = {}
    for table in open_run(str(folder)).tables(rank):
        for record in records_of(table):
            key = record.step, record.phase, record.module, record.occurrence, record.kind, record.slot
            assert key not in found
            found[key] = record
    return found


def assert_is(statistics, values, rel):
    """Compare with numpy in float64."""
    values = values.detach().to(torch.float64).numpy().ravel()
    assert statistics.elements == values.size
    for name, expected in {
        "min": values.min(), "max": values.max(), "mean": values.mean(), "std": values.std(),
        "abs_mean": np.abs(values).mean(), "l2": np.sqrt((values**2).sum()),
    }.items():  # fmt: skip
        # a mean of both signs may be next to nothing
        absolute = rel * np.abs(values).mean() if name == "mean" else 0
        assert getattr(statistics, name) == pytest.approx(expected, rel=rel, abs=absolute), name
    assert (statistics.negative, statistics.positive) == ((values < 0).sum(), (values > 0).sum())
    assert statistics.zero == (values == 0).sum()
    np.testing.assert_allclose(statistics.first, values[:8], rtol=rel * 10)


def assert_numbers_are_those_of_numpy(folder: Path, wrap: Callable[[nn.Module], Any]) -> None:
    """Train one step with statistics, and compare them with numpy's."""
    model = Net()
    expected = {}
    x = model.table(IDS)
    pooled = x.mean(1)
    hidden = model.fc(pooled)
    out = model.head(hidden.relu())
    for tensor in (x, pooled, hidden):
        tensor.retain_grad()
    out.square().sum().backward()
    expected = {
        (Phase.FORWARD, "table", "output", ""): x,
        (Phase.FORWARD, "fc", "input", "[0]"): pooled,
        (Phase.FORWARD, "fc", "output", ""): hidden,
        (Phase.FORWARD, "head", "input", "[0]"): hidden.relu(),
        (Phase.FORWARD, "head", "output", ""): out,
        (Phase.BACKWARD, "table", "output", ""): x.grad,
        (Phase.BACKWARD, "fc", "input", "[0]"): pooled.grad,
        (Phase.BACKWARD, "fc", "output", ""): hidden.grad,
        (Phase.PARAMETER, "fc", "parameter", "weight"): model.fc.weight,
        (Phase.PARAMETER_GRADIENT, "fc", "parameter", "weight"): model.fc.weight.grad,
        (Phase.FORWARD, "", "input", "[0]"): IDS,
    }
    with torch.no_grad():
        expected = {key: value.clone() for key, value in expected.items()}
    train(folder, 1, wrap=wrap)
    found = records(folder)
    for (phase, module, kind, slot), values in expected.items():
        record = found[0, phase, module, 1, kind, slot]
        assert record.shape == tuple(values.shape) and record.dtype == str(values.dtype).removeprefix("torch.")
        assert_is(record.statistics, values, rel=1e-6)
    looked_up = found[0, Phase.FORWARD, "", 1, "inspect", "looked up"]
    own = found[0, Phase.FORWARD, "table", 1, "output", ""]
    assert looked_up.source == own.order and looked_up.statistics is None and looked_up.shape == own.shape
    root = found[0, Phase.FORWARD, "", 1, "output", ".logits"]
    assert root.source == found[0, Phase.FORWARD, "head", 1, "output", ""].order
