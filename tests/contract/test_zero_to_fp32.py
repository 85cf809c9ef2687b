"""The script ``zero_to_fp32.py`` of our checkpoints, its functions, and DeepSpeed's own on our checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.utils import zero_to_fp32 as stock
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as imported_before
from older_versions import older
from safetensors.torch import load_file
from torch import nn

import ort_zero
from ort_zero.checkpoint import zero_to_fp32
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.errors import CheckpointError

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
OURS = GOLDEN / f"checkpoint_v{manifest.VERSION}"
THEIRS = [GOLDEN / "deepspeed_zero2", GOLDEN / "deepspeed_zero3"]
FROZEN = {"frozen.weight", "frozen.bias"}


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """Return the state dict that the engine had."""
    stored = load_file(folder / "expected.safetensors")
    found = {k.split("/", 1)[1]: v for k, v in stored.items() if k.startswith(("master/", "weight/", "buffer/"))}
    return {**found, "head.weight": found["embed.weight"]}


def assert_same(found: dict, wanted: dict, *, of_deepspeed: bool = False) -> None:
    """Compare two state dicts by value and dtype; before 0.19 DeepSpeed's own have floats for buffers of integers."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if of_deepspeed and older("deepspeed", "0.19"):
            kind = min(found[name].dtype, value.dtype, key=lambda dtype: dtype.is_floating_point)
            found, value = {**found, name: found[name].to(kind)}, value.to(kind)
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.fixture
def run(tmp_path) -> Path:
    """A copy of our stored checkpoint, with the script."""
    folder = tmp_path / "run"
    shutil.copytree(OURS, folder)
    zero_to_fp32.write_script(open_folder(folder), "token", durable=False)
    return folder


@pytest.fixture
def switched_off():
    """DeepSpeed as it is, whether or not the entry point has patched it."""
    was_enabled = ort_zero.status()["enabled"]
    ort_zero.disable()
    yield
    (ort_zero.enable if was_enabled else ort_zero.disable)()


@pytest.mark.parametrize("folder", [OURS, *THEIRS], ids=lambda path: path.name)
def test_the_state_dict_is_the_engines(folder):
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert_same(state, expected(folder))
    assert state["head.weight"] is state["embed.weight"]
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder), "saved", lazy_mode=True)
    assert all(lazy[name].shape == value.shape and lazy[name].dtype == value.dtype for name, value in state.items())
    assert_same({name: weight.contiguous() for name, weight in lazy.items()}, state)
    without = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert without.keys() == state.keys() - FROZEN


@pytest.mark.parametrize("folder", THEIRS, ids=lambda path: path.name)
@pytest.mark.parametrize("exclude", [False, True])
def test_results_are_those_of_deepspeeds_own(folder, exclude, tmp_path):
    theirs = stock.get_fp32_state_dict_from_zero_checkpoint(str(folder), exclude_frozen_parameters=exclude)
    ours = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder), exclude_frozen_parameters=exclude)
    assert_same(ours, theirs, of_deepspeed=True)
    for name, module in (("theirs", stock), ("ours", zero_to_fp32)):
        module.convert_zero_checkpoint_to_fp32_state_dict(
            str(folder), str(tmp_path / name), exclude_frozen_parameters=exclude
        )
    assert os.listdir(tmp_path / "theirs") == os.listdir(tmp_path / "ours") == ["pytorch_model.bin"]
    loaded = [torch.load(tmp_path / name / "pytorch_model.bin", weights_only=True) for name in ("ours", "theirs")]
    assert_same(*loaded, of_deepspeed=True)


def test_files_are_written_beside_those_of_others(run):
    (run / "config.json").write_text("{}")
    (run / "model.safetensors").write_bytes(b"of the Trainer")
    before = set(os.listdir(run))
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(run, run, max_shard_size=200)
    new = set(os.listdir(run)) - before
    assert "pytorch_model.bin.index.json" in new and len(new) > 2
    assert (run / "config.json").read_text() == "{}" and (run / "model.safetensors").read_bytes() == b"of the Trainer"
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(run, run, max_shard_size=None)
    assert set(os.listdir(run)) - before == {"pytorch_model.bin"}
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(run, run / "half", "bf16", safe_serialization=True)
    half = load_file(run / "half" / "model.safetensors")
    assert half["embed.weight"].dtype is torch.bfloat16 and os.listdir(run / "half") == ["model.safetensors"]
    for refused in ({"dtype": "int8"}, {"tag": "other"}):
        with pytest.raises(CheckpointError):
            zero_to_fp32.convert_zero_checkpoint_to_state_dict(run, run / "refused", **refused)


ALONE = """
import runpy, sys
sys.modules["onnxruntime"] = sys.modules["deepspeed"] = None
sys.argv = ["zero_to_fp32.py", *sys.argv[1:]]
runpy.run_path("zero_to_fp32.py", run_name="__main__")
"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run the script in its folder, in an interpreter that has neither onnxruntime nor DeepSpeed."""
    return subprocess.run([sys.executable, "-c", ALONE, *words], cwd=folder, capture_output=True, text=True)


def test_the_script_runs_in_its_folder_without_onnxruntime_and_deepspeed(run):
    assert os.access(run / "zero_to_fp32.py", os.X_OK) and verify(str(run), progress=False).ok
    done = command(run, ".", "out", "-t", "saved", "--safe_serialization")
    assert done.returncode == 0, done.stderr
    model = load_file(run / "out" / "model.safetensors")
    assert_same(model, {k: v for k, v in expected(OURS).items() if k != "head.weight"})
    done = command(run, ".", "out", "--exclude_frozen_parameters", "--max_shard_size", "10GB")
    assert done.returncode == 0, done.stderr
    state = torch.load(run / "out" / "pytorch_model.bin", weights_only=True)
    assert state.keys() == expected(OURS).keys() - FROZEN
    done = command(run, ".", "none", "--tag", "other")
    assert done.returncode == 1 and "tag 'other' was given" in done.stderr and len(done.stderr.splitlines()) == 1


class Model(nn.Module):
    """Has some of the parameters of the stored checkpoint."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(*expected(OURS)["embed.weight"].shape)


def test_deepspeeds_own_functions_read_our_checkpoints_while_the_plugin_is_on(tmp_path, switched_off):
    original = stock._get_fp32_state_dict_from_zero_checkpoint
    with pytest.raises(FileNotFoundError):
        imported_before(str(OURS))
    ort_zero.enable()
    try:
        assert_same(imported_before(str(OURS)), expected(OURS))
        trained = stock.get_fp32_state_dict_from_zero_checkpoint(str(OURS), "saved", True, lazy_mode=True)
        assert trained.keys() == expected(OURS).keys() - FROZEN
        model = stock.load_state_dict_from_zero_checkpoint(Model(), str(OURS))
        assert torch.equal(model.embed.weight, expected(OURS)["embed.weight"])
        stock.convert_zero_checkpoint_to_fp32_state_dict(str(OURS), str(tmp_path))
        assert_same(torch.load(tmp_path / "pytorch_model.bin", weights_only=True), expected(OURS))
        for folder in THEIRS:
            assert_same(imported_before(str(folder)), expected(folder), of_deepspeed=True)
    finally:
        ort_zero.disable()
    assert stock._get_fp32_state_dict_from_zero_checkpoint is original


def test_the_files_that_lightning_opens_hold_the_stage_and_the_users_state(switched_off):
    """Its conversion loads them between DeepSpeed's functions, with ``weights_only=False``."""
    folder = next(path.parent for path in OURS.rglob("manifest.json"))
    manifest = json.loads((folder / "manifest.json").read_text())
    ort_zero.enable()
    try:
        (path,) = stock.get_optim_files(str(folder))
        stage = torch.load(path, weights_only=False)["optimizer_state_dict"]["zero_stage"]
        assert stage == manifest["zero_stage"]
        state = torch.load(stock.get_model_state_file(str(folder), stage), weights_only=False)
        extra = json.loads(next(folder.glob("rank_00000_extra*.json")).read_text())
        assert isinstance(state, dict) and len(state) == len(extra["client_state"])
    finally:
        ort_zero.disable()
    with pytest.raises(FileNotFoundError):
        stock.get_optim_files(str(folder))
