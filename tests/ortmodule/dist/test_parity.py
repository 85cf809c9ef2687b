"""ORT under ZeRO-1, 2 and 3 trains like PyTorch under the same stage, and it is ORT that trained."""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from rank_processes.ranks import run_on_ranks

import ort_zero

# -- what each rank runs -----------------------------------------------------------------------------------------------


def train(name: str, config: dict, steps: int, inspect: bool = False) -> dict[str, Any]:
    """Train the model `name` and return losses, final parameters, the status of ort_zero and what `inspect` saw."""
    import deepspeed
    from models import Batches, build

    model = build(name)
    calls = tempfile.TemporaryFile()  # graphs carry over numbers, containers and iterators, but never what a file holds
    plain = type(model).forward

    def counted(self, *args, **kwargs):
        calls.write(b".")
        return plain(self, *args, **kwargs)

    counted.__wrapped__ = plain
    type(model).forward = counted
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
        )
        batches = Batches(name, torch.distributed.get_rank())
        gas = engine.gradient_accumulation_steps()
        losses, between, left = [], [], []
        for step in range(steps):
            total = 0.0
            for micro in range(gas):
                loss = batches.loss(engine, step * gas + micro)
                if inspect:
                    between.append(_whole(model))
                engine.backward(loss)
                if inspect:
                    left.append(_whole(model))
                engine.step()
                total += loss.item()
            if inspect:
                left.append(_whole(model))
            losses.append(total / gas)
        engine.eval()
        with torch.no_grad():
            evaluated = batches.loss(engine, 0).item()
        engine.train()
        result = {
            "losses": losses,
            "evaluated": evaluated,
            "parameters": full_parameters(model),
            "status": ort_zero.status(),
            "forward_calls": calls.tell(),
            "whole_between": between,
            "left_whole": left,
        }
        engine.destroy()
        del engine, model
        gc.collect()
        return result
    finally:
        type(build(name)).forward = plain
        calls.close()


def compare(name: str, stages: list[int], steps: int, options: dict | None = None) -> dict[str, Any]:
    """Train once in PyTorch and once in ORT for each stage; return what the test asserts on."""
    start()
    options = options or {}
    distance = 0 if options else 10**9  # within which weights stay whole
    report = {}
    for stage in stages:
        zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": distance} if stage == 3 else {}
        reference = train(name, ds_config(stage, ort=None, **options, **zero), steps)
        ours = train(name, ds_config(stage, ort=True, **options, **zero), steps, inspect=stage == 3)
        pairs = [(reference["parameters"][n], p) for n, p in ours["parameters"].items()]
        report[stage] = {
            "reference": reference["losses"],
            "losses": ours["losses"],
            "evaluated": (reference["evaluated"], ours["evaluated"]),
            "parameter_difference": max((a - b).abs().max().item() for a, b in pairs),
            "moved": max(
                (a - b).abs().max().item()
                for a, b in zip(ours["parameters"].values(), _initial(name).values(), strict=True)
            ),
            "status": ours["status"]["models"][-1],
            "fallbacks": ours["status"]["fallbacks"],
            "forward_calls": (reference["forward_calls"], ours["forward_calls"]),
            "left_whole": ours["left_whole"],
            "whole_between": (distance, ours["whole_between"]),
            "parameters": sum(p.numel() for p in ours["parameters"].values()),
        }
    return report


def _initial(name: str) -> dict[str, torch.Tensor]:
    from models import build

    return {n: p.detach() for n, p in build(name).named_parameters()}


def _whole(model: torch.nn.Module) -> int:
    """Return how many parameters are not partitioned at the moment."""
    return sum(p.ds_status.name != "NOT_AVAILABLE" or p.numel() > 0 for p in model.parameters())


# -- what comes of it --------------------------------------------------------------------------------------------------


STEPS = 20
LOSS = 2e-4
PARAMETERS = 1e-4

CASES = [
    pytest.param("mlp", [1, 2, 3], 2, {}, marks=pytest.mark.smoke),
    pytest.param("mlp", [1, 2, 3], 3, {"gas": 2}, marks=pytest.mark.slow),
    ("bert", [1, 2, 3], 2, {"gas": 2}),
    pytest.param("bert", [3], 3, {}, marks=pytest.mark.slow),
    pytest.param("gpt2_eager", [1, 2, 3], 2, {}, marks=pytest.mark.slow),
    pytest.param("gpt2_sdpa", [1, 2, 3], 2, {}, marks=pytest.mark.smoke),
    ("gpt2_sdpa", [3], 3, {"gas": 2}),
    pytest.param("llama", [1, 2, 3], 2, {}, marks=pytest.mark.smoke),
    ("gpt2_frozen", [1, 2, 3], 2, {}),
    ("shared", [1, 3], 2, {}),
]


@pytest.mark.parametrize(("name", "stages", "ranks", "options"), CASES, ids=lambda v: str(v).replace(" ", ""))
def test_trains_like_pytorch_and_in_ort(name, stages, ranks, options):
    reports = run_on_ranks(compare, ranks, name, stages, STEPS, options, timeout=800)
    for rank, report in enumerate(reports):
        for stage in stages:
            where = f"{name}, ZeRO-{stage}, rank {rank}"
            got = report[stage]
            _ran_in_ort(got, stage, where)
            for step, (theirs, ours) in enumerate(zip(got["reference"], got["losses"], strict=True)):
                assert abs(theirs - ours) <= LOSS, f"{where}: loss of step {step} is {ours}, PyTorch's {theirs}"
            theirs, ours = got["evaluated"]
            assert abs(theirs - ours) <= LOSS, f"{where}: loss in eval mode is {ours}, PyTorch's {theirs}"
            assert got["moved"] > 10 * PARAMETERS, f"{where}: the parameters did not move"
            assert got["parameter_difference"] <= PARAMETERS, where
            assert got["losses"][-1] < got["losses"][0], where


def _ran_in_ort(got, stage, where):
    status = got["status"]
    micro = STEPS * (2 if status["graphs"]["training"]["runs"]["forward"] == 2 * STEPS else 1)
    assert got["fallbacks"] == 0 and status["backend"] == "onnxruntime", where
    assert status["graphs"]["training"]["exports"] == 1, where
    assert status["graphs"]["training"]["runs"] == {"forward": micro, "backward": micro}, where
    assert status["graphs"]["inference"]["runs"] == {"forward": 1}, where
    # the module's own forward runs only to be traced: twice for each of the two graphs
    reference, ours = got["forward_calls"]
    assert (reference, ours) == (micro + 1, 4), where
    if stage < 3:
        assert status["graphs"]["training"]["gathers"] == 0, where
        return
    assert status["graphs"]["training"]["gathers"] >= 2 * micro, where
    assert status["graphs"]["training"]["reduces"] >= micro, where
    assert set(got["left_whole"]) == {0}, f"{where}: parameters stayed gathered after the backward"
    distance, between = got["whole_between"]
    assert (set(between) == {0}) == (distance == 0), f"{where}: {between} stayed gathered until the backward"


def test_dropout_trains():
    (report, _) = run_on_ranks(compare, 2, "gpt2_dropout", [1, 3], STEPS, timeout=800)
    for stage, got in report.items():
        assert got["fallbacks"] == 0
        assert got["status"]["graphs"]["training"]["runs"]["backward"] == STEPS
        assert got["losses"][-1] < got["losses"][0] - 0.2, f"ZeRO-{stage}"
        assert abs(got["losses"][-1] - got["reference"][-1]) < 0.1, f"ZeRO-{stage}: dropout acts otherwise"
