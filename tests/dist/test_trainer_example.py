"""examples/train_trainer.py under each launcher: trains in ORT, evaluates, saves, resumes, all as in PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rank_processes.ranks import free_port, run_script_on_ranks

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SCRIPT = "examples/train_trainer.py"
SMALL = ["--layers", "1", "--hidden", "32", "--seq", "16"]
TOLERANCE = 2e-4


def _launch(launcher: str | None, out: Path, *arguments: str) -> str:
    """Return what the script printed under a launcher, or (None) on two forked ranks, which start in no time."""
    if launcher is None:
        ranks = run_script_on_ranks(ROOT / SCRIPT, 2, *SMALL, "--out", out, *arguments, timeout=800)
        for rank in ranks:
            assert rank.returncode == 0, rank.stdout[-3000:] + rank.stderr[-6000:]
        return "".join(rank.stdout for rank in ranks)
    port = str(free_port())
    command = {
        "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port],
    }[launcher]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, SCRIPT, *SMALL, "--out", str(out), *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def _logged(out: Path, key: str) -> list[float]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [row[key] for row in history if key in row]


def _ran(text: str, steps: int) -> None:
    assert "backend: onnxruntime, ZeRO stage 3" in text and "fallbacks: 0" in text, text
    (backwards,) = re.findall(r"(\d+) backward runs", text)
    assert int(backwards) >= 2 * steps, text  # of each unit


@pytest.fixture(scope="module")
def in_pytorch(tmp_path_factory) -> Path:
    """The output of the uninterrupted run of six steps with the section left out of the JSON."""
    out = tmp_path_factory.mktemp("pytorch")
    config = json.loads((ROOT / "configs" / "zero3.json").read_text())
    del config["ort_zero"]
    (out / "ds.json").write_text(json.dumps(config))
    text = _launch(None, out, "--steps", "6", "--deepspeed_config", str(out / "ds.json"))
    assert "backend: torch" in text
    return out


def test_an_uninterrupted_run_trains_evaluates_and_saves_as_pytorch_does(tmp_path, in_pytorch):
    from safetensors.torch import load_file

    _ran(_launch("deepspeed", tmp_path, "--steps", "6", "--expect-ort"), 6)
    losses = _logged(tmp_path, "loss")
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert losses == pytest.approx(_logged(in_pytorch, "loss"), abs=TOLERANCE)
    assert _logged(tmp_path, "eval_loss") == pytest.approx(_logged(in_pytorch, "eval_loss"), abs=TOLERANCE)
    ours, theirs = (load_file(out / "model.safetensors") for out in (tmp_path, in_pytorch))
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-4
