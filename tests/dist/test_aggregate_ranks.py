"""Ranks share an aggregation or a conversion under every launcher, and fail as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_engines import outcome
from checkpoint_files import MASTER, SAVED_ELSEWHERE, some_tensors, write
from deepspeed_checkpoints import read
from rank_processes.ranks import free_port, run_on_ranks
from safetensors.torch import load_file

from ort_zero.checkpoint import verify
from ort_zero.checkpoint.aggregation import streaming
from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.files import storage
from ort_zero.checkpoint.finding import find_source
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


FORMATS = ("ort_zero", "deepspeed", "universal")
OPTIONS: dict[str, Any] = {"stage": 2, "world_size": 5, "progress": False}
"""Options of each conversion."""


def full(self: Any, *args: Any) -> None:
    """Fail as a write to a full disk does."""
    raise OSError(28, "No space left on device")


def together(folder: str) -> dict[str, dict[str, Any]]:
    """Aggregate in each way and convert into each format as one of the ranks that run; return what came of it."""
    put, ranks = streaming.Streamer._put, from_launcher()
    found: dict[str, dict[str, Any]] = {}

    def attempt(way: str, action: Callable[[], Any]) -> None:
        reports: list[Any] = []
        found[way] = outcome(lambda: reports.append(action()))
        dist.barrier()
        for report in reports:
            found[way] |= {"files": dict(report.files), "warnings": report.warnings}
            found[way]["read"] = getattr(report, "bytes_read", None)  # of an aggregation

    for way, (source, options) in WAYS.items():
        streaming.Streamer._put = full if way == "full" and ranks.rank == 1 else put
        attempt(way, lambda: aggregate(f"{folder}/{source}", f"{folder}/{way}", ranks=ranks, **options))
    for to in FORMATS:
        attempt(to, lambda: convert(f"{folder}/saved/t", f"{folder}/{to}", to=to, ranks=ranks, **OPTIONS))
    attempt("no source", lambda: convert(f"{folder}/gone", f"{folder}/none", ranks=ranks, **OPTIONS))
    if ranks.rank == 1:
        storage._WholeWrites.write = full
    for to in FORMATS:
        attempt(
            f"full {to}", lambda: convert(f"{folder}/saved/t", f"{folder}/full {to}", to=to, ranks=ranks, **OPTIONS)
        )
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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder in which three ranks have worked together, and what came of it on each."""
    folder = tmp_path_factory.mktemp("shared")
    write(folder / "src")
    tensors = {(MASTER, f"t{i}"): torch.full((64,), float(i)) for i in range(6)}
    tensors[MASTER, "t4"][3] = torch.nan
    write(folder / "odd", tensors)
    convertible = {key: value for key, value in some_tensors().items() if key[1] not in ("none", "bn.mask")}
    write(folder / "saved" / "t", convertible, tag="t")
    return folder, run_on_ranks(together, 3, str(folder))


def test_three_ranks_share_the_files_of_an_aggregation(shared):
    folder, reports = shared
    for way in ("one file", "shards"):
        assert all(r[way]["files"] == reports[0][way]["files"] for r in reports)
        assert set(reports[0][way]["files"]) == set(os.listdir(folder / way))
        assert NEEDED <= reports[0][way]["read"] < 2 * NEEDED
    check(folder / "shards")
    assert all(r["not finite"]["warnings"] == ("NaN or inf in t4",) for r in reports)


@pytest.mark.parametrize("to", FORMATS)
def test_three_ranks_share_the_files_of_a_conversion(shared, tmp_path, to):
    folder, reports = shared
    assert all(r[to]["type"] is None and r[to]["files"] == reports[0][to]["files"] for r in reports), reports
    convert(folder / "saved" / "t", tmp_path / to, to=to, **OPTIONS)
    mine, alone = (find_source(str(place / to / "t")) for place in (folder, tmp_path))
    assert verify(str(folder / to / "t"), progress=False).ok and mine.world_size == 5
    assert mine.optimizer == alone.optimizer and mine.files.keys() == alone.files.keys()
    values, expected = ({(t.kind, t.name): read(source, t) for t in source.tensors} for source in (mine, alone))
    assert values.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in values.items())


@pytest.mark.parametrize("way", ["full", *(f"full {to}" for to in FORMATS)])
def test_a_full_disk_of_one_rank_is_one_error_and_leaves_nothing(shared, way):
    folder, reports = shared
    assert [r[way]["type"] for r in reports] == ["RankError", "CheckpointError", "RankError"], reports
    assert all("No space left on device" in r[way]["text"] for r in reports) and "rank 1" in reports[0][way]["text"]
    assert max(r[way]["seconds"] for r in reports) < (30 if way == "full" else 60)
    assert not (folder / way).exists() or os.listdir(folder / way) == []


@pytest.mark.parametrize("way", ["gone", "no source"])
def test_a_source_that_is_not_there_is_named_on_all_ranks(shared, way):
    for report in shared[1]:
        assert report[way]["type"] in ("CheckpointError", "RankError") and "gone" in report[way]["text"]


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
