"""The files in configs/ are what the examples and the README promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ort_zero import config

ROOT = Path(__file__).resolve().parents[2]
STATISTICS = {"zero3_statistics_ort.json": True, "zero3_statistics_torch.json": False}
STAGES = {"zero1.json": 1, "zero2.json": 2, "zero3.json": 3, "zero3_offload.json": 3, "zero3_trl.json": 3}
YAMLS = {"accelerate_zero1.yaml": "configs/zero1.json", "accelerate_zero3.yaml": "configs/zero3.json"}


def test_every_file_is_listed_here():
    assert {p.name for p in (ROOT / "configs").iterdir()} == {*STAGES, *STATISTICS, *YAMLS}


@pytest.mark.parametrize(("name", "stage"), STAGES.items())
def test_json_asks_for_onnxruntime_at_its_stage(name, stage):
    loaded = json.loads((ROOT / "configs" / name).read_text())
    section = config.section_of(loaded)
    assert section is not None and section.engine() == "compile" and section.fallback == "warn"
    assert loaded["zero_optimization"]["stage"] == stage
    # the other Adam is compiled on first use; a trainer brings an optimizer of its own
    assert ("optimizer" in loaded and loaded["optimizer"]["params"]["torch_adam"]) == (name != "zero3_trl.json")
    assert ("offload_optimizer" in loaded["zero_optimization"]) == ("offload" in name)


@pytest.mark.parametrize(("name", "ort"), STATISTICS.items())
def test_what_is_compared_differs_in_its_backend_alone(name, ort):
    loaded = json.loads((ROOT / "configs" / name).read_text())
    section = config.section_of(loaded)
    assert section.engine() == ("compile" if ort else "torch") and section.statistics.enabled
    assert section.statistics.output_dir == f"out/statistics/{'ort' if ort else 'torch'}"
    plain = json.loads((ROOT / "configs" / "zero3.json").read_text())
    assert {**loaded, "ort_zero": None} == {**plain, "ort_zero": None}


@pytest.mark.parametrize(("name", "json_path"), YAMLS.items())
def test_yaml_starts_two_deepspeed_ranks_on_cpu(name, json_path):
    yaml = pytest.importorskip("yaml")
    loaded = yaml.safe_load((ROOT / "configs" / name).read_text())
    assert loaded["distributed_type"] == "DEEPSPEED" and loaded["use_cpu"] is True and loaded["num_processes"] == 2
    assert loaded["deepspeed_config"]["deepspeed_config_file"] == json_path
    assert (ROOT / json_path).is_file()
