"""Ranks share an aggregation under every launcher, and fail as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_files import MASTER, SAVED_ELSEWHERE, some_tensors, write
from rank_processes.ranks import free_port, run_on_ranks
from safetensors.torch import load_file

from ort_zero.checkpoint.aggregation import streaming
from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.distributed.launched_ranks import from_launcher

# -- what each rank runs -----------------------------------------------------------------------------------------------


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "one file": ("src", {}),
    "shards": ("src", {"max_shard_size": 200}),
    "full": ("src", {"max_shard_size": 200}),
    "gone": ("gone", {}),
    "not finite": ("odd", {"max_shard_size": 200}),
}
"""The source and the options of each aggregation; in the way "full" the disk of rank 1 is full."""


def together(folder: str) -> dict[str, dict[str, Any]]:
    """Aggregate in each way as one of the ranks that run; return what came of it."""
    put, ranks = streaming.Streamer._put, from_launcher()

    def full(self: Any, *args: Any) -> None:
        raise OSError(28, "No space left on device")

    found = {}
    for way, (source, options) in WAYS.items():
        streaming.Streamer._put = full if way == "full" and ranks.rank == 1 else put
        started = time.monotonic()
        try:
            report = aggregate(f"{folder}/{source}", f"{folder}/{way}", ranks=ranks, **options)
            found[way] = {"files": dict(report.files), "read": report.bytes_read, "warnings": report.warnings}
        except Exception as error:
            found[way] = {"type": type(error).__name__, "text": str(error)}
        dist.barrier()
        found[way]["seconds"] = time.monotonic() - started
    ranks.close()
    return found


# -- what comes of it --------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
WEIGHTS = {name: value for (kind, name), value in some_tensors().items() if kind in SAVED_ELSEWHERE}
NEEDED = sum(value.numel() * value.element_size() for value in WEIGHTS.values())
"""Bytes of the weights; a read may include small gaps between them."""


@pytest.fixture
def src(tmp_path):
    write(tmp_path / "src")
    return tmp_path / "src"


def check(out: Path) -> None:
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {}
    for name in set(index["weight_map"].values()):
        found.update(load_file(out / name))
    assert found.keys() == WEIGHTS.keys() and all(torch.equal(found[n], WEIGHTS[n]) for n in WEIGHTS)
    assert not [name for name in os.listdir(out) if name.startswith(".")]


def test_three_ranks_share_the_files_and_fail_as_one(tmp_path):
    write(tmp_path / "src")
    tensors = {(MASTER, f"t{i}"): torch.full((64,), float(i)) for i in range(6)}
    tensors[MASTER, "t4"][3] = torch.nan
    write(tmp_path / "odd", tensors)
    reports = run_on_ranks(together, 3, str(tmp_path))
    for way in ("one file", "shards"):
        assert all(r[way]["files"] == reports[0][way]["files"] for r in reports)
        assert set(reports[0][way]["files"]) == set(os.listdir(tmp_path / way))
        assert NEEDED <= reports[0][way]["read"] < 2 * NEEDED
    check(tmp_path / "shards")
    assert [r["full"]["type"] for r in reports] == ["RankError", "CheckpointError", "RankError"], reports
    assert all("No space left on device" in r["full"]["text"] for r in reports)
    assert "rank 1" in reports[0]["full"]["text"] and os.listdir(tmp_path / "full") == []
    assert max(r["full"]["seconds"] for r in reports) < 30
    for r in reports:
        assert r["gone"]["type"] in ("CheckpointError", "RankError") and "gone" in r["gone"]["text"]
        assert r["not finite"]["warnings"] == ("NaN or inf in t4",)


def environment(**more: str) -> dict[str, str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=400)


def test_torchrun_prints_one_report(src, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
               str(free_port()), "-m", "ort_zero", "aggregate", str(src), str(tmp_path / "out"),
               "--max-shard-size", "200", "--json"]  # fmt: skip
    done = run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert NEEDED <= json.loads(done.stdout)["bytes_read"] < 2 * NEEDED
    check(tmp_path / "out")


def test_deepspeed_launcher_passes_a_rank_that_is_ignored(src, tmp_path):
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port()),
               "--module", "ort_zero", "aggregate", str(src), str(tmp_path / "out"),
               "--max-shard-size", "200"]  # fmt: skip
    done = run(command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("wrote 8 tensors") == 1
    check(tmp_path / "out")


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_of_mpirun_share_the_work(src, tmp_path, damaged):
    if damaged:
        path = src / "rank_00000_master.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    command = [sys.executable, "-m", "ort_zero", "aggregate", str(src), str(tmp_path / "new" / "out"),
               "--max-shard-size", "200"]  # fmt: skip
    job = {"OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=environment(OMPI_COMM_WORLD_RANK=str(rank), **job), text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    try:
        (first, error), (second, _) = [rank.communicate(timeout=400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert second == ""
    if damaged:
        assert all(rank.returncode in (1, 2) for rank in ranks) and first == "", [rank.returncode for rank in ranks]
        assert "rank_00000_master.safetensors is damaged" in error and os.listdir(tmp_path / "new" / "out") == []
    else:
        assert [rank.returncode for rank in ranks] == [0, 0], error
        assert "wrote 8 tensors" in first
        check(tmp_path / "new" / "out")
    assert sorted(os.listdir(tmp_path)) == ["new", "src"]
