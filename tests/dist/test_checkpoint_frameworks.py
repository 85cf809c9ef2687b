"""Accelerate and HF Trainer save and resume through the sharded format, and transformers loads what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import framework_workers as workers
import pytest
import torch
from transformers import AutoModelForCausalLM

from ort_zero.checkpoint import aggregate
from ort_zero.testing.ranks import run_on_ranks


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_saves_and_loads_state(tmp_path, stage):
    first, second = run_on_ranks(workers.accelerate_round_trip, 2, str(tmp_path), stage, timeout=200)
    assert first["found"] == pytest.approx(first["expected"], abs=1e-5)
    assert abs(first["other"][0] - first["expected"][0]) > 1e-2
    manifest = json.loads((tmp_path / "state" / "pytorch_model" / "manifest.json").read_text())
    assert manifest["zero_stage"] == stage and manifest["world_size"] == 2

    aggregate(str(tmp_path / "last"), str(tmp_path / "model"), tag="pytorch_model", progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        logits = model(**workers.batch()).logits
    assert torch.allclose(logits, first["logits"], atol=1e-4)
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.slow  # tests/dist/test_trainer_example.py does so with a script
def test_trainer_resumes(tmp_path):
    whole = run_on_ranks(workers.trainer_run, 2, str(tmp_path / "a"), 3, 4, False, timeout=200)[0]
    run_on_ranks(workers.trainer_run, 2, str(tmp_path / "b"), 3, 2, False, timeout=200)
    (found,) = Path(tmp_path / "b" / "trainer" / "checkpoint-2").glob("global_step*/manifest.json")
    assert json.loads(found.read_text())["step"] == 2
    resumed = run_on_ranks(workers.trainer_run, 2, str(tmp_path / "b"), 3, 4, True, timeout=200)[0]
    assert len(whole) == 4 and resumed[-2:] == pytest.approx(whole[-2:], abs=1e-5)
