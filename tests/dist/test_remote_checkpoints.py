"""Checkpoints in an object store: saved, loaded, verified, merged through fsspec against a server that speaks S3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_engines import (
    load_all,
    save_all,
)
from object_store import environment_of, led_to_a_server, s3_server
from rank_processes.ranks import run_on_ranks

from ort_zero.checkpoint import aggregate, diff, verify
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.distributed.launched_ranks import from_launcher
from ort_zero.errors import CheckpointError, CorruptCheckpointError, RankError


def save_remote(url: str, plans: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Do as :func:`save_all` does, without DeepSpeed's own files, which go to local folders only."""
    return save_all(url, plans, compare=False)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """Environment that leads to a local S3 server with the bucket ``models``."""
    with s3_server(tmp_path_factory.mktemp("server")) as port:
        environment = environment_of(f"http://127.0.0.1:{port}")
        with led_to_a_server(environment):
            import boto3

            boto3.client("s3").create_bucket(Bucket="models")
            yield environment


@pytest.fixture(scope="module")
def saved(s3):
    """Losses after the save of ZeRO-2 and ZeRO-3 runs on 2 ranks into the bucket."""
    plans = [{"name": f"s{stage}", "stage": stage} for stage in (2, 3)]
    return run_on_ranks(save_remote, 2, "s3://models/run", plans, timeout=800, env=s3)[0]


def test_loads_at_another_world_size(saved, s3):
    plans = [{"name": tag, "tag": tag, "stage": stage} for tag, stage in (("s2", 3), ("s3", 1))]
    after = run_on_ranks(load_all, 3, "s3://models/run", plans, timeout=800, env=s3)[0]
    for tag, losses in after.items():
        assert losses == pytest.approx(saved[tag], abs=1e-5)


def test_aggregates_from_and_to_the_store(saved, tmp_path):
    from safetensors.torch import load, load_file

    report = aggregate("s3://models/run", "s3://models/out", tag="s3", what="weights+optimizer", progress=False)
    assert {"model.safetensors", "optimizer.safetensors"} <= set(open_folder("s3://models/out").names())
    aggregate("s3://models/run", str(tmp_path), tag="s3", progress=False)
    remote = load(open_folder("s3://models/out").read("model.safetensors"))
    local = load_file(tmp_path / "model.safetensors")
    assert remote.keys() == local.keys() and all(torch.equal(remote[n], local[n]) for n in local)
    assert report.source == "s3://models/run/s3"


def test_verify_finds_a_changed_object(saved):
    assert verify("s3://models/run", "s2", progress=False).ok
    folder = open_folder("s3://models/run/s2")
    data = bytearray(folder.read("rank_00001_master.safetensors"))
    data[-5] ^= 4
    folder.write("rank_00001_master.safetensors", bytes(data), "test")
    (problem,) = verify("s3://models/run", "s2", progress=False).problems
    assert "rank_00001_master.safetensors" in problem
    with pytest.raises(CorruptCheckpointError, match="rank_00001_master"):
        aggregate("s3://models/run", "s3://models/bad", tag="s2", progress=False)
    assert open_folder("s3://models/bad").names() == []


def convert_together(scratch: str) -> list[str]:
    """Convert from the bucket into it, into a folder and back, and what must fail, all on two ranks."""
    ranks = from_launcher()
    said = []
    for src, dst, options in (
        ("s3://models/run/s3", "s3://models/ours", {"world_size": 3}),
        ("s3://models/run/s3", f"{scratch}/local", {"to": "deepspeed", "stage": 2, "world_size": 3}),
        (f"{scratch}/local", "s3://models/back", {"world_size": 2}),
        ("s3://models/run/s3", "s3://models/theirs", {"to": "deepspeed", "stage": 3, "world_size": 2}),
        ("s3://models/run/s3", "s3://models/ours", {"overwrite": True}),
        ("s3://models/gone", "s3://models/none", {}),
    ):
        try:
            convert(src, dst, ranks=ranks, progress=False, **options)
            said.append("")
        except (CheckpointError, RankError) as error:
            said.append(str(error))
    ranks.close()
    return said


def test_two_ranks_convert_from_and_to_the_store(saved, s3, tmp_path):
    first, second = run_on_ranks(convert_together, 2, str(tmp_path), timeout=300, env=s3)
    for said in (first, second):
        assert said[:4] == [""] * 4, said
        assert "only local folders are replaced" in said[4] and "s3://models/gone" in said[5], said
    for place in ("s3://models/ours", "s3://models/back", "s3://models/theirs", str(tmp_path / "local")):
        assert verify(place, progress=False).ok, place
        found = diff("s3://models/run/s3", place, progress=False)
        assert found.same and found.compared > 10, place
    assert open_folder("s3://models/none").names() == []
