"""What one world size has saved goes on at another, with every kind of optimizer.

All ranks see the same batches, so that the averaged gradients do not depend on the world size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_engines import Odd
from optimizer_kinds import BY_DEEPSPEED, BY_SHARD, OPTIMIZERS
from rank_processes.ranks import run_on_ranks
from resumed_engines import made, step
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, convert, verify

STAGES = (1, 2, 3)
KINDS = OPTIMIZERS | BY_DEEPSPEED
UNCUT = {"muon-1", "muon-2"}
"""Cases whose states lie whole on each rank: saving refuses them."""
CASES = [case for name in KINDS for stage in STAGES if (case := f"{name}-{stage}") not in UNCUT]


def engine_of(case: str, model: torch.nn.Module | None = None) -> Any:
    name, stage = case.rsplit("-", 1)
    kind, options = KINDS[name]
    return made(int(stage), kind, model=model, **options)


def save_all(folder: str) -> None:
    """Train each case, and save it."""
    start()
    for case in CASES:
        engine = engine_of(case)
        step(engine, range(4))
        engine.save_checkpoint(f"{folder}/saved/{case}", tag="t")
        engine.destroy()


def go_on(folder: str, name: str, cases: list[str]) -> None:
    """Load each case, save it at once, train on and save again; `name` is that of this training."""
    start()
    for case in cases:
        engine = engine_of(case, Odd(seed=1))
        assert engine.load_checkpoint(f"{folder}/saved/{case}")[0]
        engine.save_checkpoint(f"{folder}/{name} loaded/{case}", tag="t")
        step(engine, range(4, 8))
        engine.save_checkpoint(f"{folder}/{name} trained/{case}", tag="t")
        engine.destroy()


def start() -> None:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)


WORLDS = {1: CASES, 2: CASES, 4: CASES[::4]}
"""Cases that go on at each world size; all stages are among those at four ranks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of what two ranks have saved, and of what each world size has made of it."""
    folder = tmp_path_factory.mktemp("worlds")
    run_on_ranks(save_all, 2, str(folder), timeout=800)
    for world, cases in WORLDS.items():
        run_on_ranks(go_on, world, str(folder), str(world), cases, timeout=800)
    return folder


def model_of(checkpoint: Path, into: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, weights, masters and moments, as one model has them."""
    assert verify(str(checkpoint), progress=False).ok
    aggregate(str(checkpoint), str(into), what="weights+optimizer", progress=False)
    return {
        f"{file.name} {name}": value for file in into.glob("*.safetensors") for name, value in load_file(file).items()
    }


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in (1, 4) for case in WORLDS[world]])
def test_a_case_goes_on_as_at_the_world_size_that_saved_it(world, case, folder, tmp_path):
    saved = model_of(folder / "saved" / case, tmp_path / "saved")
    assert len(saved) > 5
    torch.testing.assert_close(model_of(folder / f"{world} loaded" / case, tmp_path / "loaded"), saved, rtol=0, atol=0)
    if case.split("-")[0] not in BY_SHARD:
        wanted = model_of(folder / "2 trained" / case, tmp_path / "wanted")
        found = model_of(folder / f"{world} trained" / case, tmp_path / "found")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_every_kind_is_converted_and_comes_back(case, folder, tmp_path):
    saved = folder / "saved" / case
    convert(str(saved), str(tmp_path / "deepspeed"), to="deepspeed", world_size=3, progress=False)
    convert(str(tmp_path / "deepspeed"), str(tmp_path / "back"), to="ort_zero", progress=False)
    there, back = model_of(saved, tmp_path / "there"), model_of(tmp_path / "back", tmp_path / "here")
    torch.testing.assert_close(back, there, rtol=0, atol=0)
