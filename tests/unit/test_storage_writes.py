"""Files are written by few calls, whole whatever the kernel takes at a time, into room that is reserved before."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import subprocess
import tempfile
from typing import Any

import pytest
import torch
import xxhash
from checkpoint_files import write
from safetensors.torch import load_file

from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.files import storage
from ort_zero.checkpoint.files.preallocation import reserve_blocks
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.records import MASTER
from ort_zero.checkpoint.saves import shard_writer
from ort_zero.checkpoint.saves.shard_writer import ShardEntry, write_shard
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
    monkeypatch.setattr(shard_writer, "BLOCK", 64)
    monkeypatch.setattr(shard_writer, "MAX_BUFFERS", 3)
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
        part = content[item.piece.offset : item.piece.offset + item.piece.length]
        assert xxhash.xxh3_64_hexdigest(part) == item.piece.check


def test_a_shard_takes_few_calls(tmp_path, monkeypatch):
    calls = []
    real = os.writev
    monkeypatch.setattr(storage.os, "writev", lambda fd, views: calls.append(len(views)) or real(fd, views))
    write_shard(open_folder(tmp_path), "s.safetensors", entries([1000] * 3000), {}, "token")
    assert len(calls) <= 26 and 3000 <= sum(calls) <= 3030  # a few tensors lie across the end of a write


def test_one_call_takes_no_more_tensors_than_the_kernel_does(tmp_path, monkeypatch):
    calls = []
    real = os.writev
    monkeypatch.setattr(storage.os, "writev", lambda fd, views: calls.append(len(views)) or real(fd, views))
    file, _ = write_shard(open_folder(tmp_path), "s.safetensors", entries([1] * 3000), {}, "token")
    assert max(calls) <= os.sysconf("SC_IOV_MAX") and sum(calls) > 3000 and len(calls) <= 4
    (partial,) = tmp_path.iterdir()
    assert partial.stat().st_size == file.size


def test_writes_end_where_large_pages_of_a_file_do(tmp_path, monkeypatch):
    ends = [0]
    real = os.writev

    def writev(descriptor, views):
        written = real(descriptor, views)
        ends.append(ends[-1] + written)
        return written

    monkeypatch.setattr(storage.os, "writev", writev)
    file, _ = write_shard(open_folder(tmp_path), "s.safetensors", entries([1000, 1 << 19, 77, 1 << 20]), {}, "token")
    assert file.size == ends[-1] > 3 << 20
    assert all(end % (512 << 10) == 0 for end in ends[:-1]) and len(ends) <= file.size // (512 << 10) + 2


EXT4, TMPFS = 0xEF53, 0x01021994


class Kernel:
    """Calls of the C library to a kernel that reports one file system for all files, or none, and may fail.

    Args:
        file_system: type of the file system, see statfs(2); None if the kernel does not tell.
    """

    def __init__(self, file_system: int | None):
        self.error = 0
        """Number of the error with which reserving fails; 0 if it succeeds."""
        self.reserved: list[tuple[int, int]] = []
        """First byte and number of bytes of each range that was reserved."""

        def fallocate(descriptor: int, mode: int, offset: int, size: int) -> int:
            ctypes.set_errno(self.error)
            if self.error:
                return -1
            self.reserved.append((offset, size))
            return 0

        def fstatfs(descriptor: int, record: Any) -> int:
            if file_system is None:
                return -1
            record[0] = file_system
            return 0

        self.fallocate, self.fstatfs = fallocate, fstatfs


def kernel_with(file_system: int | None, monkeypatch) -> Kernel:
    """Let the C library that this process has loaded call a kernel with that file system."""
    kernel, load = Kernel(file_system), ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *args, **options: load(name, *args, **options) if name else kernel)
    return kernel


@pytest.mark.parametrize("place", [None, "/dev/shm"])
def test_room_is_reserved_on_ext4_and_nowhere_else(tmp_path, place):
    if place is not None and not os.access(place, os.W_OK):
        pytest.skip(f"no {place}")
    with tempfile.TemporaryFile(dir=place or tmp_path) as file:
        reserve_blocks(file.fileno(), 0, 3 << 20)
        status = os.fstat(file.fileno())
    kind = subprocess.run(["stat", "-f", "-c", "%t", place or tmp_path], capture_output=True, text=True, check=True)
    size = 3 << 20 if int(kind.stdout, 16) == EXT4 else 0
    assert status.st_size == size and size <= status.st_blocks * 512 <= size + (64 << 10)


@pytest.mark.parametrize("file_system, wanted", [(EXT4, 1), (TMPFS, 0), (None, 0)], ids=["ext4", "tmpfs", "?"])
def test_the_room_of_a_shard_is_reserved_where_that_pays(tmp_path, monkeypatch, file_system, wanted):
    kernel = kernel_with(file_system, monkeypatch)
    file, _ = write_shard(open_folder(tmp_path), "s.safetensors", entries([1 << 18, 1 << 18]), {}, "token")
    assert kernel.reserved == [(0, file.size)] * wanted


@pytest.mark.parametrize("file_system", [EXT4, TMPFS], ids=["ext4", "tmpfs"])
def test_the_room_of_each_range_of_an_aggregation_is_reserved_where_that_pays(tmp_path, monkeypatch, file_system):
    write(tmp_path / "c", {(MASTER, f"t{number}"): torch.full((1 << 18,), float(number)) for number in range(8)})
    asked = kernel_with(file_system, monkeypatch).reserved
    aggregate(tmp_path / "c", tmp_path / "out", workers=2)
    (first, second) = sorted(asked) or [(0, 0)] * 2
    if file_system == EXT4:
        assert first[0] == 0 and second[0] == first[1] and min(first[1], second[1]) > 3 << 20
        assert sum(second) == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert (len(asked) == 2) == (file_system == EXT4)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all((found[f"t{number}"] == number).all() for number in range(8))


def test_an_aggregation_whose_room_is_not_there_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path / "c", {(MASTER, "t"): torch.ones(1 << 20)})
    kernel_with(EXT4, monkeypatch).error = errno.ENOSPC
    with pytest.raises(CheckpointError, match="cannot write .*No space left"):
        aggregate(tmp_path / "c", tmp_path / "out", workers=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_small_files_reserve_nothing(tmp_path, monkeypatch):
    kernel = kernel_with(EXT4, monkeypatch)
    write_shard(open_folder(tmp_path), "s.safetensors", entries([100]), {}, "token")
    assert kernel.reserved == []


def test_a_kernel_that_cannot_reserve_is_no_error(tmp_path, monkeypatch):
    kernel = kernel_with(EXT4, monkeypatch)
    with open(tmp_path / "f", "wb") as file:
        kernel.error = errno.EOPNOTSUPP
        reserve_blocks(file.fileno(), 0, 1 << 20)
        kernel.error = errno.ENOSPC
        with pytest.raises(OSError, match="No space left"):
            reserve_blocks(file.fileno(), 0, 1 << 20)


def test_a_file_that_may_not_be_so_large_is_an_error_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            write_shard(open_folder(tmp_path), "s.safetensors", entries([1 << 19]), {}, "token")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
