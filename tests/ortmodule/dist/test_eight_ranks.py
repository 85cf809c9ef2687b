"""Everything that ranks exchange, on 8 ranks: training in ONNX Runtime, checkpoints, aggregation, an error of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_engines import Odd, digest, engine_of, train
from deepspeed_setup import ds_config, full_parameters, start
from rank_processes.ranks import run_on_ranks
from safetensors.torch import load_file

import ort_zero
from ort_zero.checkpoint import aggregate, convert, verify
from ort_zero.distributed.raise_on_all_ranks import default_group

pytestmark = pytest.mark.slow
RANKS = 8


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def losses_and_parameters(stage: int, ort: bool) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """Train four steps on other batches on each rank; return losses, full parameters and the model's status."""
    import deepspeed

    config = ds_config(stage, ort=ort, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    model = Odd()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    losses = []
    for step in range(4):
        loss = engine(batch(step, torch.distributed.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    status = ort_zero.status()["models"][-1] if ort else {}
    found = losses, full_parameters(engine.module), json.loads(json.dumps(status, default=str))
    engine.destroy()
    return found


def on_each_rank(folder: str) -> dict[str, Any]:
    rank = start()
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        ours, theirs = (losses_and_parameters(stage, ort) for ort in (True, False))
        apart = max((ours[1][name] - value).abs().max().item() for name, value in theirs[1].items())
        found[f"stage {stage}"] = (ours[0], theirs[0], apart, ours[2])
    engine = engine_of(3)
    train(engine, range(3))
    engine.save_checkpoint(f"{folder}/out", tag="t")
    before = digest(engine)
    other = engine_of(3, seed=7)
    found["differs before loading"] = digest(other) != before
    other.load_checkpoint(f"{folder}/out")
    found["same after loading"] = digest(other) == before
    below = engine_of(1, seed=7)
    below.load_checkpoint(f"{folder}/out")
    found["goes on alike"] = train(engine, range(3, 5)), train(below, range(3, 5))
    aggregate(f"{folder}/out", f"{folder}/model", what="weights+optimizer", progress=False, ranks=default_group())
    try:
        with default_group().raise_on_all("trying"):
            if rank == 5:
                raise ort_zero.errors.CheckpointError("rank 5 cannot")
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def test_eight_ranks_train_save_load_and_aggregate_as_one(tmp_path: Path) -> None:
    results = run_on_ranks(on_each_rank, RANKS, str(tmp_path), timeout=1500)
    for rank, found in enumerate(results):
        for stage in (1, 2, 3):
            ours, theirs, apart, status = found[f"stage {stage}"]
            assert ours == pytest.approx(theirs, abs=1e-5) and apart < 1e-5, (rank, stage, apart)
            assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0
            assert status["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}
            assert (status["graphs"]["training"]["reduces"] > 0) == (stage == 3)
        assert found["differs before loading"] and found["same after loading"], rank
        assert found["goes on alike"][0] == pytest.approx(found["goes on alike"][1], abs=1e-5)
        assert ("CheckpointError: rank 5 cannot" if rank == 5 else "rank 5: rank 5 cannot") in found["error"]
    assert verify(tmp_path / "out", progress=False).ok
    aggregate(tmp_path / "out", tmp_path / "alone", what="weights+optimizer", progress=False)
    convert(tmp_path / "out", tmp_path / "three", world_size=3, progress=False)
    aggregate(tmp_path / "three", tmp_path / "of_three", what="weights+optimizer", progress=False)
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other, third = (load_file(tmp_path / folder / name) for folder in ("model", "alone", "of_three"))
        assert one.keys() == other.keys() == third.keys()
        assert all(torch.equal(one[key], other[key]) and torch.equal(one[key], third[key]) for key in one), name
