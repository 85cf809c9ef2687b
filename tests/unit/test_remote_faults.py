"""Faults of object stores: what a user is told, and what stays of an upload that fails."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch
from checkpoint_files import write
from fsspec.implementations.memory import MemoryFileSystem

from ort_zero.checkpoint.files.folders import CHUNK
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, ReadRequest
from ort_zero.checkpoint.records import MASTER
from ort_zero.errors import CheckpointError, CorruptCheckpointError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ConnectionResetError(errno.ECONNRESET, "reset by peer"),
            "reset by peer (do it again when the store",
        ),
        (RuntimeError("Unclosed"), "RuntimeError: Unclosed (do it again when the store answers"),
        (
            PermissionError("The provided token has expired."),
            "expired. (do it again when the store",
        ),
        (ValueError("no such setting"), "ValueError: no such setting"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_read_names_the_object_and_the_way_out(monkeypatch, error, message):
    folder = open_folder("memory://faulty")
    folder.write("x", b"0123456789", "t")
    assert folder.read("x", 2, 5) == b"23456"

    def cat_file(*args: Any, **options: Any) -> bytes:
        raise error

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    with pytest.raises(CheckpointError) as raised:
        folder.read("x")
    assert str(raised.value).startswith("cannot read memory://faulty/x: ") and message in str(raised.value)
    assert raised.value.__context__ is None, "the library's error may hold secrets"


def test_objects_that_are_missing_or_short_are_damage():
    folder = open_folder("memory://short")
    folder.write("x", b"0123456789", "t")
    with pytest.raises(CorruptCheckpointError, match="short/x is truncated: it ends at byte 10, bytes up to 12 are"):
        folder.read("x", 8, 4)
    with pytest.raises(CorruptCheckpointError, match="short/y is missing"):
        folder.read("y", 0, 1)


def test_a_large_read_is_several_requests(monkeypatch):
    folder = open_folder("memory://large")
    content = bytes(range(251)) * (3 * CHUNK // 251)
    folder.write("x", content, "t")
    asked, real = [], MemoryFileSystem.cat_file
    monkeypatch.setattr(
        MemoryFileSystem, "cat_file", lambda self, path, start, end: asked.append(start) or real(self, path, start, end)
    )
    assert folder.read("x", 5) == content[5:] and asked == [5, 5 + CHUNK, 5 + 2 * CHUNK]


def test_a_reader_brings_little_that_nobody_needs(tmp_path):
    """Every other tensor of a file, small and large ones."""
    tensors = {(MASTER, f"{number:03}"): torch.randn(number % 7 * 1500 + 3) for number in range(80)}
    write(tmp_path / "t", tensors, ranks=1)
    source = manifest.read(open_folder(tmp_path / "t"))
    wanted = [tensor for tensor in source.tensors if int(tensor.name) % 2]
    requests = [ReadRequest(tensor=tensor, start=0, length=tensor.elements, target=torch.empty(tensor.elements))
                for tensor in wanted]  # fmt: skip
    folder = open_folder(tmp_path / "t")
    CheckedReader(folder, source.files).read(requests)
    for request in requests:
        assert torch.equal(request.target, tensors[MASTER, request.tensor.name])
    needed = sum(tensor.nbytes for tensor in wanted)
    assert needed <= folder.bytes_read <= 1.05 * needed, folder.bytes_read / needed
