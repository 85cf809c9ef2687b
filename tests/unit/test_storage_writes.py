"""Files are written by few calls, whole whatever the kernel takes at a time."""

from __future__ import annotations

import os
import resource
from itertools import accumulate

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from ort_zero.checkpoint.files import storage
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.saves import checkpoint_writer
from ort_zero.checkpoint.saves.checkpoint_writer import ShardEntry, write_shard
from ort_zero.errors import CheckpointError


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


@pytest.mark.parametrize(
    ("sizes", "most"),
    [([1000] * 3000, 26), ([1] * 3000, 4), ([1000, 1 << 19, 77, 1 << 20], 9)],
    ids=["many", "tiny", "large"],
)
def test_a_shard_takes_few_calls_that_end_where_large_pages_of_a_file_do(tmp_path, monkeypatch, sizes, most):
    calls: list[tuple[int, int]] = []
    real = os.writev

    def writev(descriptor, views):
        calls.append((len(views), real(descriptor, views)))
        return calls[-1][1]

    monkeypatch.setattr(storage.os, "writev", writev)
    file, _ = write_shard(open_folder(tmp_path), "s.safetensors", entries(sizes), {}, "token")
    ends = list(accumulate(written for _, written in calls))
    assert len(calls) <= most and ends[-1] == file.size == next(tmp_path.iterdir()).stat().st_size
    assert max(buffers for buffers, _ in calls) <= os.sysconf("SC_IOV_MAX")
    full = {end for end, (buffers, _) in zip(ends, calls) if buffers == checkpoint_writer.MAX_BUFFERS}
    assert all(end % checkpoint_writer.BLOCK == 0 or end in full for end in ends[:-1])


def test_a_file_that_may_not_be_so_large_is_an_error_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            write_shard(open_folder(tmp_path), "s.safetensors", entries([1 << 19]), {}, "token")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
