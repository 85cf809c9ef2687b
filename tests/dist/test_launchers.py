"""The examples run under each launcher as the README says."""

from __future__ import annotations

import argparse
import base64
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed_setup import ds_config, start
from rank_processes.ranks import free_port, run_on_ranks

import ort_zero
from ort_zero.checkpoint import verify

# -- what each rank runs -----------------------------------------------------------------------------------------------


def all_forms(folder: str) -> dict[str, str | None]:
    """Return, for each form, which backend runs the model; None where ort_zero has no part in it."""
    import deepspeed

    start()
    config = ds_config(1, ort=True)
    path = Path(folder) / "ds.json"
    path.write_text(json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    off = {**config, "ort_zero": {"enabled": False}}
    forms = {
        "dict": {"config": config},
        "path": {"config": str(path)},
        "string": {"config": encoded},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "disabled": {"config": off},
        "absent": {"config": ds_config(1, ort=None)},
    }
    result: dict[str, str | None] = {}
    for name, how in forms.items():
        model = torch.nn.Linear(4, 2)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), **how)
        before = sum(not model["gone"] for model in ort_zero.status()["models"])
        engine.backward(engine(torch.randn(4, 4)).sum())
        engine.step()
        models = [model for model in ort_zero.status()["models"] if not model["gone"]]
        ours = [model for model in models if model["graph_runs"].get("backward")]
        result[name] = ours[-1]["backend"] if len(ours) == before and before else None
        assert type(engine.module) is torch.nn.Linear, name
        engine.destroy()
        del engine, model, _
        gc.collect()
    return result


@pytest.fixture(autouse=True)
def no_placements_of_other_runs(tmp_path, monkeypatch):
    """Let no earlier run decide who runs a segment: three steps are too few to measure it."""
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path / "cache"))


# -- what comes of it --------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SMALL = ["--steps", "3", "--layers", "1", "--hidden", "32", "--seq", "16", "--expect-ort"]


def _run(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def _proof(text: str, stage: int) -> None:
    assert f"backend: onnxruntime, ZeRO stage {stage}" in text, text
    assert "fallbacks: 0" in text
    found = re.search(
        r"torch.compile: (\d+) unit\(s\), (\d+) graphs, (\d+) of (\d+) segments in ONNX Runtime with (\d+)% of the "
        r"floating-point operations, (\d+) forward and (\d+) backward runs", text,
    )  # fmt: skip
    assert found, text
    units, graphs, in_ort, segments, share, forwards, backwards = map(int, found.groups())
    assert units >= 1 and graphs >= 2 and 0 < in_ort <= segments and share > 50, text
    assert forwards == backwards == 3 * units, text
    assert len(re.findall(r"^step\s+\d/3\s+loss \d", text, re.M)) == 3


def test_torchrun_trains_plain_deepspeed():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
               str(free_port()), "examples/train_lm.py", "--deepspeed_config", "configs/zero2.json"]  # fmt: skip
    _proof(_run([*command, *SMALL]), 2)


MISTAKE = """
import argparse, deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank")
parser.parse_known_args()
deepspeed.init_distributed()
model = torch.nn.Linear(2, 2)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "ort_zero": {"place": "ort"}}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
"""


@pytest.mark.parametrize("launcher", ["torch.distributed.run --nproc_per_node", "deepspeed.launcher.runner --num_gpus"])
def test_a_mistake_in_the_section_is_said_last_by_rank_0_alone(tmp_path, launcher):
    (tmp_path / "train.py").write_text(MISTAKE)
    command = [sys.executable, "-m", *launcher.split(), "2", "--master_port", str(free_port()), "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    lines = (done.stdout + done.stderr).splitlines()
    said = "ConfigError: ort_zero.place: unknown key (value 'ort'); did you mean \"compile.place\""
    of_python = [line for line in lines if line.startswith(("[rank", "[ort_zero rank"))]
    assert done.returncode and said in of_python[-1] and of_python[-1].startswith("[ort_zero rank 0]")
    assert not [line for line in of_python if "rank 1]" in line or "rank1]" in line]
    if "torch" in launcher:  # its report is long, and ends in the error
        assert said in lines[-2] and lines[-2].strip().startswith("traceback")


def test_accelerate_launch_with_the_shipped_yaml():
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file",
               "configs/accelerate_zero3.yaml", "--main_process_port", str(free_port()),
               "examples/train_accelerate.py"]  # fmt: skip
    _proof(_run([*command, *SMALL]), 3)


def _command_of_make_train(folder: Path, steps: str) -> str:
    """Return the first command line of ``make train`` with its variables replaced."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^train:.*\n((?:\t.*\n)+)", makefile.replace("\\\n", " "), flags=re.M)[1]
    for name, value in {
        "$(QUIET)": "DS_ACCELERATOR=cpu",
        'PATH="$(CURDIR)/$(BIN):$$PATH"': f'PATH="{BIN}:$PATH"',
        "$(BIN)": str(BIN),
        "$(FREE_PORT)": str(free_port()),
        "$(STEPS)": steps,
        "out/train": str(folder / "train"),
    }.items():
        recipe = recipe.replace(name, value)
    assert "$(" not in recipe, recipe
    return recipe.splitlines()[0].strip().lstrip("@")


def _printed_by(command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    environment.pop("ORT_ZERO_LOG_LEVEL", None)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, timeout=800,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


_ABOUT_BUILDS = r"^DeepSpeed \S+ built successfully|No CUDA runtime is found"
"""What is printed only where DeepSpeed's operator has not been built before, or by a torch for CUDA."""
_ABOUT_3_13_0 = r"^.*RuntimeWarning: Guards may run slower on Python 3\.13\.0.*\n  warnings\.warn\(\n"
"""Torch's advice on one release of Python, with the line of torch that gives it."""


_COMPARED = 14
"""Steps that ``make train`` compares. Step 15 (gradient norm 5.5) and step 19 (29.0) tell little of a runtime: losses
of PyTorch itself come to 1.7e-4 apart there when each weight is changed by its last bit. Up to step 14 the losses of
float32 and of float64 are within 5e-7."""


def test_the_command_of_make_train_prints_a_screenful_compares_with_pytorch_and_saves(tmp_path):
    text = _printed_by(_command_of_make_train(tmp_path, "20"))
    rest = re.sub(_ABOUT_3_13_0, "", text, flags=re.M)
    lines = [line for line in rest.splitlines() if not re.search(_ABOUT_BUILDS, line)]
    assert "onnxruntime:" not in text, "ONNX Runtime warns of a graph"
    # what `make train` does after it, aggregation and a sample, prints 8 lines
    assert len(lines) <= 52, text
    assert sum(line.startswith("step ") for line in lines) == 20
    assert not [line for line in lines if "Warning" in line or "deprecated" in line or "[WARNING]" in line]
    losses, figures = lines[-2:]
    apart = re.search(rf"^PyTorch on the same {_COMPARED} steps: losses within (\S+) of these$", losses)[1]
    ours, theirs, ratio, memory, its_ratio = re.search(
        r"^ONNX Runtime runs \d+% of the floating-point operations; a step takes (\S+) s, in eager PyTorch (\S+) s: "
        r'ratio (\S+); PyTorch with "cpu_memory" alone (\S+) s: ratio (\S+)$', figures,
    ).groups()  # fmt: skip
    assert 0 <= float(apart) < 5e-6
    report = verify(tmp_path / "train", progress=False)
    assert report.ok and report.tag == "step_20" and report.format == "ort_zero"
    assert {p.name[:10] for p in (tmp_path / "train" / "step_20").glob("rank_*")} == {"rank_00000", "rank_00001"}
    assert float(ratio) == pytest.approx(float(ours) / float(theirs), rel=0.1)
    assert float(its_ratio) == pytest.approx(float(memory) / float(theirs), rel=0.1)


def test_every_form_of_config_reaches_the_engine(tmp_path):
    (got,) = run_on_ranks(all_forms, 1, str(tmp_path))
    assert got == {"dict": "onnxruntime", "path": "onnxruntime", "string": "onnxruntime", "args": "onnxruntime",
                   "disabled": None, "absent": None}  # fmt: skip
