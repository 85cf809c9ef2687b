"""Weights that stay whole between forward and backward, as the DeepSpeed configuration allows: real engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks
from stack_models import IN, Stack

import ort_zero

NUMBERS = {"default": {}, "no reuse": {"stage3_max_reuse_distance": 0}, "few": {"stage3_max_live_parameters": 300}}
STEPS = 4


def whole(engine: Any) -> int:
    """Return how many elements of partitioned parameters are whole."""
    return sum(p.ds_numel for p in engine.module.parameters() if p.ds_status.name == "AVAILABLE")


def inputs(step: int) -> torch.Tensor:
    return torch.randn(5, IN, generator=torch.Generator().manual_seed(10 * step + torch.distributed.get_rank()))


def engine_of(ort: bool, **zero: Any) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = Stack()
    config = ds_config(3, ort=ort, lr=1e-2, stage3_param_persistence_threshold=0, **zero)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def assert_ort_ran() -> None:
    status = ort_zero.status()["models"][-1]
    assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status


def trained(ort: bool, **zero: Any) -> dict[str, Any]:
    """Train some steps; return losses, and how many elements are whole between and behind the halves of each."""
    engine = engine_of(ort, **zero)
    seen: dict[str, Any] = {"losses": [], "between": [], "after": []}
    for step in range(STEPS):
        loss = engine(inputs(step)).pow(2).mean()
        seen["between"].append(whole(engine))
        engine.backward(loss)
        seen["after"].append(whole(engine))
        engine.step()
        seen["losses"].append(loss.item())
    seen["elements"] = sum(p.ds_numel for p in engine.module.parameters())
    if ort:
        assert_ort_ran()
    engine.destroy()
    return seen


def left_from_a_run_without_backward(folder: str) -> dict[str, list[float]]:
    """Run forwards that nobody runs a backward for, and change the weights behind each."""
    import deepspeed

    losses: dict[str, list[float]] = {}
    for ort in (False, True):
        engine = engine_of(ort)
        found = losses.setdefault("ort" if ort else "torch", [])

        def loss() -> Any:
            return engine(inputs(0)).pow(2).mean()

        engine.save_checkpoint(f"{folder}/{ort}", tag="first")
        for step in range(2):
            engine.backward(engine(inputs(step)).pow(2).mean())
            engine.step()
        found.append(loss().item())
        engine.load_checkpoint(f"{folder}/{ort}", tag="first")
        engine.eval()
        with torch.no_grad():
            found.append(loss().item())
        engine.train()
        found.append(loss().item())
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                for parameter in engine.module.parameters():
                    parameter.data.mul_(0.5)
        last = loss()
        found.append(last.item())
        engine.backward(last)
        assert not ort or whole(engine) == 0
        engine.step()
        if ort:
            assert_ort_ran()
        engine.destroy()
    return losses


def on_each_rank(folder: str) -> dict[str, Any]:
    """Run all of it."""
    start()
    found: dict[str, Any] = {
        name: {"ort": trained(True, **zero), "torch": trained(False, **zero)} for name, zero in NUMBERS.items()
    }
    found["left"] = left_from_a_run_without_backward(folder)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(on_each_rank, 2, str(tmp_path_factory.mktemp("kept")), timeout=300)


@pytest.mark.parametrize("name", NUMBERS)
def test_losses_are_those_of_deepspeed(ranks, name):
    for seen in ranks:
        torch.testing.assert_close(seen[name]["ort"]["losses"], seen[name]["torch"]["losses"], rtol=1e-5, atol=1e-6)


def test_weights_stay_as_far_as_the_configuration_allows(ranks):
    for seen in ranks:
        default, none, few = (seen[name]["ort"] for name in NUMBERS)
        # all but those that the backward does not need
        assert all(count > 0.5 * default["elements"] for count in default["between"]), default
        assert set(none["between"]) == {0}
        assert all(0 < count <= 300 < default["elements"] for count in few["between"]), few
        assert all(set(case["after"]) == {0} for case in (default, none, few))


def test_a_forward_sees_weights_that_changed_behind_one_without_a_backward(ranks):
    for seen in ranks:
        left = seen["left"]
        torch.testing.assert_close(left["ort"], left["torch"], rtol=1e-5, atol=1e-6)
        trained_, loaded, again, halved = left["ort"]
        assert loaded == pytest.approx(again, rel=1e-6) and len({trained_, loaded, halved}) == 3
