"""Models whose own forward no graph can hold, on 2 ranks: their submodules run in ONNX Runtime, as in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from rank_processes.ranks import run_on_ranks
from torch import nn

import ort_zero


class Hooked(nn.Module):
    """Hooks a gradient between its parts, and uses one of them with and without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        h = self.first(x)
        h.register_hook(lambda gradient: gradient * 0.5)
        with torch.no_grad():
            target = self.first(x * 0.5)
        return (self.last(h * self.scale) ** 2).mean() + (h - target).square().mean()


class FailsOnRank1(Hooked):
    """One rank alone cannot trace it: all of them divide it."""

    def forward(self, x):
        if torch.jit.is_tracing() and torch.distributed.get_rank() == 1:
            raise ValueError("this rank cannot trace")
        return (self.last(self.first(x) * self.scale) ** 2).mean()


class Momentum(Hooked):
    """Follows a trained part with a frozen one, in place."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.first.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            target = self.slow(x)
        return (self.first(x) * self.scale - target).square().mean() + self.last(target).square().mean()


MODELS = {kind.__name__: kind for kind in (Hooked, FailsOnRank1, Momentum)}
CASES = [("Hooked", 1), ("Hooked", 2), ("Hooked", 3), ("FailsOnRank1", 1), ("FailsOnRank1", 3), ("Momentum", 2)]


def train(name: str, stage: int, ort: bool) -> dict[str, Any]:
    import deepspeed

    torch.manual_seed(0)
    model = MODELS[name]()
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = ds_config(stage, ort=True if ort else None, lr=1e-2, **zero)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
    losses = []
    for step in range(4):
        seed = 10 * step + torch.distributed.get_rank()
        loss = engine(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
        engine.backward(loss, **({"retain_graph": True} if name == "Hooked" and step == 3 else {}))
        engine.step()
        losses.append(loss.item())
    status = ort_zero.status()["models"][-1] if ort else None
    found = {"losses": losses, "status": status, "parameters": full_parameters(engine.module)}
    engine.destroy()
    return found


def compare() -> dict[Any, Any]:
    start()
    return {case: (train(*case, False), train(*case, True)) for case in CASES}


@pytest.fixture(scope="module")
def reports():
    return run_on_ranks(compare, 2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, ZeRO-{case[1]}")
def test_the_ranks_divide_the_model_together_and_train_as_in_pytorch(case, reports):
    for report in reports:
        expected, ours = report[case]
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for name, value in expected["parameters"].items():
            torch.testing.assert_close(ours["parameters"][name], value, atol=1e-5, rtol=1e-4, msg=name)
        status = ours["status"]
        assert status["backend"] == "onnxruntime" and f"{case[0]}.forward" in status["in_torch"]
        parts = status["submodules"]
        assert set(parts) == {"first", "last", *(["slow"] if case[0] == "Momentum" else [])}
        assert parts["first"]["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}
        if case[1] == 3:
            graph = parts["first"]["graphs"]["training"]
            assert graph["gathers"] > 0 and graph["reduces"] > 0
