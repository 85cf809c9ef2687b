"""Checkpoints that were stored once are read as on the day they were written; see tests/golden/make_checkpoints.py."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.reads.training_state import read_training_state
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
OURS = f"checkpoint_v{manifest.VERSION}"
STORED = pytest.mark.parametrize("name", [OURS, "deepspeed_zero2", "deepspeed_zero3"])
STEPS = 3.0


@STORED
def test_every_file_is_whole(name):
    report = verify(str(GOLDEN / name), progress=False)
    assert report.ok and report.tag == "saved" and not report.notes
    assert report.format == ("ort_zero" if name == OURS else "deepspeed") and report.tensors == 22


@STORED
def test_aggregation_gives_what_the_engine_held(name, tmp_path):
    report = aggregate(GOLDEN / name, tmp_path, what="weights+optimizer", progress=False)
    assert (report.step, report.world_size, report.verified) == (STEPS, 2, True)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    model = load_file(tmp_path / "model.safetensors")
    weights = {
        key.split("/", 1)[1]: value for key, value in expected.items() if key.startswith((MASTER, WEIGHT, BUFFER))
    }
    moments = {key: value for key, value in expected.items() if key.startswith("exp_avg")}
    assert len(weights) == 10 and len(moments) == 12
    for found, wanted in ((model, weights), (load_file(tmp_path / "optimizer.safetensors"), moments)):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


def test_what_is_no_tensor_of_the_model_is_read_too():
    folder = open_folder(GOLDEN / OURS / "saved")
    source = manifest.read(folder)
    assert source.optimizer.class_name == "AdamW" and set(source.optimizer.scalars["step"].values()) == {STEPS}
    assert [group.options["weight_decay"] for group in source.optimizer.groups] == [0.1, 0.0]
    assert source.aliases == {"head.weight": "embed.weight"} and source.frozen == {"frozen.weight", "frozen.bias"}
    saved = read_training_state(folder, source, 0)
    assert saved.client_state.pop("order").tolist() == [0, 1, 2]
    assert saved.client_state == {
        "epoch": 3, "best": 0.5, "seen": ["a", None], "key": b"x", "last": deque([[1], 3]),
    }  # fmt: skip
    assert saved.counters["global_steps"] == STEPS and saved.lr_scheduler["last_batch_iteration"] == 2
