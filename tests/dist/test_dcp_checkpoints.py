"""Checkpoints of FSDP1, FSDP2, HSDP and tensor parallelism: read, aggregated, loaded by DeepSpeed, written back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dcp_runs
import pytest
import torch
from rank_processes.ranks import run_on_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ort_zero.checkpoint import aggregate, verify
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.errors import CheckpointError

RUNS = {
    1: [("gpt2", "fsdp", "adamw")],
    2: [
        ("llama", "fsdp", "adamw"),
        ("gpt2", "fsdp", "sgd"),
        ("experts", "fsdp", "adamw"),
        ("frozen", "fsdp", "adamw"),
        ("odd", "fsdp1", "adamw"),
    ],
    3: [("odd", "fsdp", "adamw")],
    4: [("odd", "hsdp", "adamw"), ("odd", "tensor", "adamw"), ("llama", "fsdp", "adagrad")],
}
NAMES = ["-".join(run) for runs in RUNS.values() for run in runs]
FORMS = ("dcp", "titan", "accelerate", "ranks", "safetensors")
CASES = [(name, form) for name in NAMES for form in FORMS if form != "safetensors" or "fsdp1" not in name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    for size, some in RUNS.items():
        run_on_ranks(dcp_runs.save_runs, size, str(folder), some, timeout=400)
    for run in folder.glob("*-fsdp1-*"):
        dcp_to_torch_save(run / "dcp", run / "read.pt")
        state = torch.load(run / "read.pt", weights_only=False)
        torch.save((state["model"], state["optim"]), run / "whole.pt")
    return folder


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits."""
    one, other = one.detach().cpu(), other.detach().cpu()
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    as_bytes = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*as_bytes)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_each_form_is_aggregated_bit_for_bit(runs, tmp_path, name, form):
    weights, optimizer = torch.load(runs / name / "whole.pt", weights_only=False)
    what = "weights" if form == "safetensors" else "weights+optimizer"
    report = aggregate(runs / name / form, tmp_path / "model", what=what)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "model").glob("model*.safetensors"):
        found |= load_file(file)
    missing = weights.keys() - found.keys()
    if form == "safetensors":  # torch does not write the others
        assert {key for key in missing if weights[key].is_floating_point() and weights[key].dim()} <= {
            "eighths",
            *tied(weights),
        }
    else:
        assert missing <= tied(weights), report.warnings
    assert found and all(is_same(found[key], weights[key]) for key in found)
    if form == "safetensors":
        return
    states = load_file(tmp_path / "model" / "optimizer.safetensors")
    expected = {
        f"{kind}/{parameter}": value
        for parameter, by_kind in optimizer["state"].items()
        for kind, value in by_kind.items()
        if kind != "step"
    }
    assert states.keys() == expected.keys()
    assert all(is_same(states[key], expected[key]) for key in expected)
    assert verify(str(runs / name / form)).ok


def test_accelerates_names_of_ranks_files(runs, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    for rank in range(2):
        file = runs / "llama-fsdp-adamw" / "ranks" / f"model_world_size_2_rank_{rank}.pt"
        shutil.copy(file, local / f"pytorch_model_fsdp_rank{rank}.bin")
    aggregate(local, tmp_path / "model")
    weights, _ = torch.load(runs / "llama-fsdp-adamw" / "whole.pt", weights_only=False)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found and all(is_same(found[key], weights[key]) for key in weights.keys() - tied(weights))
    (local / "pytorch_model_fsdp_rank1.bin").unlink()
    with pytest.raises(CheckpointError, match="its elements .* are in no shard"):
        aggregate(local, tmp_path / "other")


@pytest.mark.parametrize("form", ["dcp", "accelerate", "ranks"])
def test_buffers_are_no_frozen_weights(runs, tmp_path, form):
    report = aggregate(runs / "frozen-fsdp-adamw" / form, tmp_path / "model", exclude_frozen=True)
    assert any("leaves out" in note and note.endswith("up.bias, up.weight") for note in report.warnings)
    names = load_file(tmp_path / "model" / "model.safetensors").keys()
    assert {"halves", "eighths", "count"} < names and names.isdisjoint({"up.weight", "up.bias"})


def tied(weights: dict[str, Any]) -> set[str]:
    """Return the names of tied weights, of which one file keeps one."""
    return {key for key in weights if key in ("head.weight", "lm_head.weight")} & set(weights)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_resumes_what_fsdp_saved_and_fsdp_what_deepspeed_saved(runs, tmp_path, stage):
    run = runs / "llama-fsdp-adamw"
    losses = [torch.load(run / f"losses_{rank}.pt") for rank in range(2)]
    results = run_on_ranks(dcp_runs.deepspeed_from, 2, str(run / "dcp"), str(tmp_path / "saves"), "llama", stage)
    for rank, (found, about) in enumerate(results):
        assert found == pytest.approx(losses[rank], rel=1e-6)
        assert about == {"lr": [1e-2], "steps": 2}
    report = convert(tmp_path / "saves", tmp_path / "dcp", to="dcp")
    back = run_on_ranks(dcp_runs.load_and_train, 2, str(tmp_path / "dcp" / report.tag), "llama", "fsdp")
    weights, optimizer = torch.load(run / "whole.pt", weights_only=False)
    for rank, (found, _) in enumerate(back):
        assert found == pytest.approx(losses[rank], rel=1e-6)
    found_weights, found_optimizer = back[0][1]
    assert all(is_same(found_weights[key], weights[key]) for key in weights)
    for parameter, states in optimizer["state"].items():
        assert all(is_same(found_optimizer["state"][parameter][kind], value) for kind, value in states.items())
    (group,) = found_optimizer["param_groups"]
    assert group["lr"] == 1e-2 and set(group["params"]) == set(optimizer["state"])
