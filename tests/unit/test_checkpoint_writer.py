"""Shards are written whole, whatever the kernel takes at a time; of two ranks' files all or none count."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash
from checkpoint_files import SAVED_ELSEWHERE, some_tensors
from file_limits import files_of_at_most
from safetensors.torch import load_file
from thread_group import ThreadGroup

from ort_zero.checkpoint.files import safetensors_header, storage
from ort_zero.checkpoint.files.storage import LocalFolder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.records import WEIGHT, Optimizer, ParamGroup, Source
from ort_zero.checkpoint.saves import checkpoint_writer
from ort_zero.checkpoint.saves.checkpoint_writer import SaveJob, Shard, ShardEntry, write_checkpoint, write_shard
from ort_zero.errors import CheckpointError, RankError

# -- shards ------------------------------------------------------------------------------------------------------------


def entries(sizes: list[int]) -> list[ShardEntry]:
    """Return entries of these numbers of elements, of two dtypes."""
    dtypes = (torch.float32, torch.bfloat16)
    return [
        ShardEntry(name=f"t{n}", kind="master", start=0, tensor=torch.randn(size).to(dtypes[n % 2]))
        for n, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("taken", [0, 1, 7, 1 << 30], ids=lambda n: f"{n} bytes at a time")
def test_a_shard_is_whole_however_much_the_kernel_takes(tmp_path, monkeypatch, taken):
    monkeypatch.setattr(checkpoint_writer, "BLOCK", 64)
    monkeypatch.setattr(checkpoint_writer, "MAX_BUFFERS", 3)
    real = os.writev

    def short(descriptor, views):
        joined = b"".join(views)[:taken]
        return real(descriptor, [joined])

    monkeypatch.setattr(storage.os, "writev", short)
    held = entries([5, 1, 0, 100, 3, 3, 3, 3, 40])
    folder = open_folder(tmp_path)
    file, pieces = write_shard(folder, "s.safetensors", held, {}, "token")
    folder.publish("s.safetensors", "token")
    content = (tmp_path / "s.safetensors").read_bytes()
    assert len(content) == file.size and xxhash.xxh3_128_hexdigest(content) == file.xxh3_128
    stored = load_file(tmp_path / "s.safetensors")
    assert all(torch.equal(stored[entry.name], entry.tensor) for entry in held)
    for item in pieces:
        part = content[item.run.offset : item.run.offset + item.run.length]
        assert xxhash.xxh3_64_digest(part) == item.run.checks


def test_a_file_that_may_not_be_so_large_is_an_error_and_leaves_nothing(tmp_path):
    with files_of_at_most(1 << 20), pytest.raises(CheckpointError, match="File too large"):
        write_shard(open_folder(tmp_path), "s.safetensors", entries([1 << 19]), {}, "token")
    assert list(tmp_path.iterdir()) == []


def test_a_header_longer_than_safetensors_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match='too many tensors .*"sharded": false'):
        write_shard(open_folder(tmp_path), "s.safetensors", entries([2, 2]), {}, "token")
    assert list(tmp_path.iterdir()) == []


# -- two ranks, here two threads ---------------------------------------------------------------------------------------


RANKS = 2


def shard_of(tensors: dict[tuple[str, str], torch.Tensor], rank: int) -> Shard:
    """Return a rank's half of every tensor; the halves of odd sizes differ."""
    weights, moments = [], []
    for (kind, name), tensor in tensors.items():
        flat = tensor.reshape(-1)
        low, high = flat.numel() * rank // RANKS, flat.numel() * (rank + 1) // RANKS
        if low < high:
            entry = ShardEntry(name=name, kind=kind, start=low, tensor=flat[low:high])
            (weights if kind in SAVED_ELSEWHERE else moments).append(entry)
    extra = dict.fromkeys(("client_state", "lr_scheduler", "loss_scaler", "extra_state"), {})
    extra["counters"] = {"global_steps": 7}
    scalars = {"step": {name: 7.0 for kind, name in tensors if kind == "exp_avg"}}
    return Shard(weights=weights, moments=moments, extra=extra, extra_tensors=[torch.arange(rank + 2)], scalars=scalars)


def write(path: Path, without: str = "", of_rank_1: str = "", **changes: str) -> list[BaseException | None]:
    """Write a checkpoint and return what each rank raised; no rank holds the tensors that are named `without`.

    Rank 1 writes into the folder `of_rank_1` in `path`. `changes` are the save's name and the suffix of its files.
    """
    tensors = some_tensors()
    held = {key: value for key, value in tensors.items() if key[1] != without}
    trained = tuple(name for kind, name in tensors if kind == "exp_avg")
    shapes = {name: tuple(tensor.shape) for (kind, name), tensor in tensors.items() if kind in SAVED_ELSEWHERE}
    group = ParamGroup(names=trained, options={"lr": 0.01})
    about = Source(
        format="ort_zero", root="", tag="t", step=7, world_size=0, zero_stage=2, tensors=(), files={}, dtype="F32",
        aliases={}, frozen=frozenset(name for kind, name in tensors if kind == WEIGHT), run_id="run",
        optimizer=Optimizer(class_name="AdamW", groups=(group,), scalars={}),
        save_id=changes.get("save_id", "0123456789abcdef"),
    )  # fmt: skip
    values, barrier = [None] * RANKS, threading.Barrier(RANKS)

    def one(rank: int) -> BaseException | None:
        job = SaveJob(
            path=str(path / of_rank_1 if rank else path), about=about, shapes=shapes, shard=shard_of(held, rank),
            suffix=changes.get("suffix", ""), save_latest=True, durable=False,
        )  # fmt: skip
        try:
            write_checkpoint(job, ThreadGroup(rank, values, barrier))
        except BaseException as error:
            return error
        return None

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


@pytest.mark.parametrize("before", [False, True], ids=["new", "over another"])
def test_ranks_that_do_not_write_into_one_folder_are_an_error(tmp_path, before):
    if before:
        write(tmp_path)
    changes = {"save_id": "f" * 16, "suffix": ".ffffffff"} if before else {}
    there = sorted(path.name for path in (tmp_path / "t").iterdir()) if before else []
    first, second = write(tmp_path, of_rank_1="elsewhere", **changes)
    assert isinstance(first, CheckpointError) and isinstance(second, RankError)
    assert "rank_00001_master" in str(first) and "do not write into one folder" in str(first)
    assert not list((tmp_path / "elsewhere" / "t").iterdir())
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == there
    assert not before or verify(str(tmp_path), progress=False).ok


def test_a_parameter_that_no_rank_holds_makes_no_checkpoint(tmp_path):
    first, second = write(tmp_path / "c", without="a.bias")
    assert isinstance(first, CheckpointError) and "no rank holds a.bias" in str(first)
    assert isinstance(second, RankError) and not list((tmp_path / "c" / "t").iterdir())


def test_another_process_that_takes_a_partial_file_for_a_left_over_harms_no_save(tmp_path, monkeypatch):
    """Two runs that save into one folder: each removes what killed saves left of the small files beside the tags."""
    real, seen = LocalFolder.publish, []

    def publish(self: LocalFolder, name: str, token: str) -> None:
        if name == manifest.LATEST and not seen:
            seen.append(name)
            self.discard(name, token)
        real(self, name, token)

    monkeypatch.setattr(LocalFolder, "publish", publish)
    assert write(tmp_path / "c") == [None, None]
    assert seen and (tmp_path / "c" / manifest.LATEST).read_text() == "t"
