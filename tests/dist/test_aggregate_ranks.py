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
from ort_zero.checkpoint.aggregation.destination import RECORD
from ort_zero.distributed.launched_ranks import from_launcher

# -- what each rank runs -----------------------------------------------------------------------------------------------


def together(src: str, dst: str, fails: int | None = None, **options: Any) -> dict[str, Any]:
    """Aggregate as one of the ranks that run; rank `fails` has a full disk."""
    rank = int(os.environ["RANK"])
    if rank == fails:

        def full(self: Any, *args: Any) -> None:
            raise OSError(28, "No space left on device")

        streaming.Streamer._put = full
    started = time.monotonic()
    ranks = from_launcher(src)
    try:
        report = aggregate(src, dst, ranks=ranks, **options)
        result = {"type": None, "files": dict(report.files), "read": report.bytes_read, "warnings": report.warnings}
    except Exception as error:
        result = {"type": type(error).__name__, "text": str(error)}
    dist.barrier()
    return {**result, "seconds": time.monotonic() - started}


def shards(src: str, dst: str) -> dict[str, Any]:
    """Aggregate into several files."""
    return together(src, dst, max_shard_size=200)


def full_on_rank_1(src: str, dst: str) -> dict[str, Any]:
    """Aggregate into several files; the disk of rank 1 is full."""
    return together(src, dst, fails=1, max_shard_size=200)


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
    assert not [name for name in written(out) if name.startswith(".")]


def test_three_ranks_write_all_files_once(src, tmp_path):
    reports = run_on_ranks(together, 3, str(src), str(tmp_path / "out"), None)
    assert [r["type"] for r in reports] == [None] * 3 and set(reports[0]["files"]) == written(tmp_path / "out")


def test_ranks_share_shards_and_agree(src, tmp_path):
    out = tmp_path / "out"
    reports = run_on_ranks(shards, 3, str(src), str(out))
    assert NEEDED <= reports[0]["read"] < 2 * NEEDED
    assert all(r["files"] == reports[0]["files"] and r["type"] is None for r in reports)
    check(out)


def test_one_failing_rank_fails_all_and_leaves_nothing(src, tmp_path):
    out = tmp_path / "out"
    reports = run_on_ranks(full_on_rank_1, 3, str(src), str(out))
    assert [r["type"] for r in reports] == ["RankError", "CheckpointError", "RankError"], reports
    assert all("No space left on device" in r["text"] for r in reports) and "rank 1" in reports[0]["text"]
    assert max(r["seconds"] for r in reports) < 30 and os.listdir(out) == []


def test_bad_input_is_found_by_rank_0_and_known_to_all(src, tmp_path):
    for r in run_on_ranks(together, 2, str(tmp_path / "gone"), str(tmp_path / "out")):
        assert r["type"] in ("CheckpointError", "RankError") and "gone" in r["text"]


def test_what_one_rank_noticed_all_report(tmp_path):
    tensors = {(MASTER, f"t{i}"): torch.full((64,), float(i)) for i in range(6)}
    tensors[MASTER, "t4"][3] = torch.nan
    write(tmp_path / "src", tensors)
    for r in run_on_ranks(shards, 2, str(tmp_path / "src"), str(tmp_path / "out")):
        assert r["warnings"] == ("NaN or inf in t4",)


def environment(**more: str) -> dict[str, str]:
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def written(out: Path) -> set[str]:
    """Return the names of all files in the output but the record of them."""
    return set(os.listdir(out)) - {RECORD}


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
def test_ranks_of_mpirun_meet_beside_the_destination(src, tmp_path, damaged):
    if damaged:
        path = src / "rank_00000_master.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    command = [sys.executable, "-m", "ort_zero", "aggregate", str(src), str(tmp_path / "new" / "out"),
               "--max-shard-size", "200"]  # fmt: skip
    job = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_ess_base_jobid": "4711"}
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
