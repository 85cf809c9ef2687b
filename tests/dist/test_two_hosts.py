"""Training, saving and aggregation under two launchers, each of which starts one rank as a host of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes.ranks import free_port
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, verify

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "1", "--hidden", "32", "--seq", "16", "--steps", "3", "--expect-ort"]
TRAIN = [f"{ROOT}/examples/train_lm.py", "--deepspeed_config", f"{ROOT}/configs/zero3.json", *SMALL]


def on_both(*launchers: list[str], folders: tuple[Path, ...] = (ROOT, ROOT), fails: bool = False) -> list[str]:
    """Run a module of Python as each host's launcher in the host's folder; return what each host printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([sys.executable, "-m", *words], cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT)
        for words, folder in zip(launchers, folders)
    ]  # fmt: skip
    with ThreadPoolExecutor() as pool:  # both are read: the other one would wait when its pipe is full
        texts = list(pool.map(lambda process: process.communicate(timeout=400)[0], started))
    assert [bool(process.returncode) for process in started] == [fails] * 2, "\n----\n".join(texts)
    return texts


def torchrun(script: list[str], **options: Any) -> list[str]:
    """Run a script under torchrun on both hosts."""
    launcher = ["torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d",
                "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id", "t"]  # fmt: skip
    return on_both([*launcher, *script], [*launcher, *script], **options)


def proof(texts: list[str]) -> None:
    """Assert that rank 0 printed three losses, and that ONNX Runtime ran every step."""
    (text,) = [text for text in texts if "loss" in text]
    assert "backend: onnxruntime, ZeRO stage 3" in text and "fallbacks: 0" in text, text
    units = int(re.search(r"torch.compile: (\d+) unit", text)[1])
    assert f"{3 * units} forward and {3 * units} backward runs" in text, text
    assert len(re.findall(r"^step\s+\d+/\d+\s+loss \S+", text, re.M)) == 3


def test_torchrun_trains_as_pytorch_does_and_both_hosts_aggregate_the_checkpoint(tmp_path: Path):
    out = tmp_path / "out"
    texts = torchrun([*TRAIN, "--compare-torch", "3", "--out", str(out)])
    proof(texts)
    apart = re.search(r"PyTorch on the same 3 steps: losses within (\S+) of these", "".join(texts))
    assert apart and float(apart[1]) < 1e-4, texts
    report = verify(out, progress=False)
    assert report.ok and report.format == "ort_zero", report.problems
    assert {path.name[:10] for path in out.glob("*/rank_*")} == {"rank_00000", "rank_00001"}
    torchrun(["-m", "ort_zero", "aggregate", str(out), str(tmp_path / "model")])
    aggregate(out, tmp_path / "alone", progress=False)
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "alone"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_accelerate_trains_on_two_machines():
    command = ["accelerate.commands.launch", "--config_file", "configs/accelerate_zero3.yaml", "--num_machines", "2",
               "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()),
               "--deepspeed_multinode_launcher", "standard"]  # fmt: skip
    script = ["examples/train_accelerate.py", *SMALL]
    proof(on_both(*([*command, "--machine_rank", str(rank), *script] for rank in range(2))))


def test_hosts_with_disks_of_their_own_are_told_to_share_a_folder(tmp_path: Path):
    disks = tmp_path / "first", tmp_path / "second"
    for disk in disks:
        disk.mkdir()
    texts = torchrun([*TRAIN, "--out", "out"], folders=disks, fails=True)
    said = "\n".join(texts)
    assert re.search(r"rank_0000\d_master.safetensors of rank \d is not there", said), said
    assert "a local disk of each machine" in said and "The checkpoint was not made" in said
    assert sum("saving" in text and "failed on another rank: rank 0" in text for text in texts) == 1, said
