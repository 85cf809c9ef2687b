"""Two ranks, here two threads, write their shards and a manifest: all of it or nothing that counts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoint_files import SAVED_ELSEWHERE, some_tensors
from thread_group import ThreadGroup

from ort_zero.checkpoint.files.storage import LocalFolder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.records import WEIGHT, Optimizer, ParamGroup, Source
from ort_zero.checkpoint.saves.checkpoint_writer import SaveJob, Shard, ShardEntry, write_checkpoint
from ort_zero.errors import CheckpointError, RankError

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


def write(
    path: Path,
    tensors: dict[tuple[str, str], torch.Tensor],
    without: str = "",
    of_rank_1: str = "",
    save_id: str = "0123456789abcdef",
    suffix: str = "",
) -> list[BaseException | None]:
    """Write a checkpoint and return what each rank raised; no rank holds the tensors that are named `without`.

    Rank 1 writes into the folder `of_rank_1` in `path`.
    """
    held = {key: value for key, value in tensors.items() if key[1] != without}
    trained = tuple(name for kind, name in tensors if kind == "exp_avg")
    shapes = {name: tuple(tensor.shape) for (kind, name), tensor in tensors.items() if kind in SAVED_ELSEWHERE}
    about = Source(
        format="ort_zero", root="", tag="t", step=7, world_size=0, zero_stage=2, tensors=(), files={}, dtype="F32",
        aliases={"head.weight": "emb.weight"}, frozen=frozenset(name for kind, name in tensors if kind == WEIGHT),
        optimizer=Optimizer(
            class_name="AdamW", groups=(ParamGroup(names=trained, options={"lr": 0.01}),), scalars={}
        ),
        run_id="run", save_id=save_id,
    )  # fmt: skip
    values, barrier = [None] * RANKS, threading.Barrier(RANKS)

    def one(rank: int) -> BaseException | None:
        place = str(path / of_rank_1 if rank else path)
        shard = shard_of(held, rank)
        job = SaveJob(
            path=place, about=about, shapes=shapes, suffix=suffix, save_latest=True, durable=False, shard=shard
        )
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
        write(tmp_path, some_tensors(1))
    changes = {"save_id": "f" * 16, "suffix": ".ffffffff"} if before else {}
    there = sorted(path.name for path in (tmp_path / "t").iterdir()) if before else []
    first, second = write(tmp_path, some_tensors(), of_rank_1="elsewhere", **changes)
    assert isinstance(first, CheckpointError) and isinstance(second, RankError)
    assert "rank_00001_master" in str(first) and "do not write into one folder" in str(first)
    assert not list((tmp_path / "elsewhere" / "t").iterdir())
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == there
    assert not before or verify(str(tmp_path), progress=False).ok


def test_a_parameter_that_no_rank_holds_makes_no_checkpoint(tmp_path):
    first, second = write(tmp_path / "c", some_tensors(), without="a.bias")
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
    assert write(tmp_path / "c", some_tensors()) == [None, None]
    assert seen and (tmp_path / "c" / manifest.LATEST).read_text() == "t"
