"""Faults of object stores: which are tried again, for how long, and what a user is told."""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest
import torch
from aiohttp import ClientPayloadError, ServerDisconnectedError
from aiohttp.http_exceptions import ContentLengthError
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from checkpoint_files import write
from fsspec.implementations.memory import MemoryFileSystem

from ort_zero.checkpoint.files import remote_faults, s3_uploads
from ort_zero.checkpoint.files.folders import CHUNK
from ort_zero.checkpoint.files.remote_faults import Attempts, is_passing, way_out
from ort_zero.checkpoint.files.s3_uploads import S3Upload
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.reads.checked_reads import CheckedReader
from ort_zero.checkpoint.reads.reading import ReadRequest
from ort_zero.checkpoint.records import MASTER
from ort_zero.errors import CheckpointError


def said(code: str, kind: type[OSError] = OSError) -> OSError:
    """Return an error as s3fs makes it of botocore's."""

    class ClientError(Exception):
        response = {"Error": {"Code": code, "Message": "..."}}

    error = kind("...")
    error.__cause__ = ClientError(code)
    return error


def cut() -> Exception:
    error = ClientPayloadError("Response payload is not completed")
    error.__cause__ = ContentLengthError("Not enough data")
    return error


class Answer(Exception):
    """An answer's number, as aiohttp and others tell it."""

    def __init__(self, status: int):
        super().__init__(f"{status}, message='...'")
        self.status = status


@pytest.mark.parametrize(
    "error",
    [said("SlowDown"), said("InternalError"), said("503"), OSError(errno.ECONNRESET, "reset"), TimeoutError(),
     ConnectionResetError(), cut(), ServerDisconnectedError(),
     EndpointConnectionError(endpoint_url="x"), ReadTimeoutError(endpoint_url="x"), Answer(503), Answer(429)],
    ids=repr,
)  # fmt: skip
def test_what_passes_is_known(error):
    assert is_passing(error) and way_out(error)


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("x"), said("AccessDenied", PermissionError), said("ExpiredToken", PermissionError),
     said("NoSuchBucket"), Answer(404), Answer(403), ValueError("x"), OSError(errno.ENOSPC, "full")],
    ids=repr,
)  # fmt: skip
def test_what_does_not_pass_is_known(error):
    assert not is_passing(error)


def test_credentials_are_renewed_once():
    renewed = []
    attempts = Attempts(lambda: bool(renewed.append(1)) or True)
    expired = said("ExpiredToken", PermissionError)
    assert attempts.again(expired) and not attempts.again(expired) and len(renewed) == 1
    assert not Attempts(lambda: False).again(expired)
    assert "renew the credentials" in way_out(expired)


@pytest.fixture
def flaky(monkeypatch) -> dict[str, Any]:
    """Reads from memory that fail as often as the value of "left" says."""
    state = {"left": 0, "asked": 0}
    real = MemoryFileSystem.cat_file

    def cat_file(self: Any, *args: Any, **options: Any) -> bytes:
        state["asked"] += 1
        if state["left"]:
            state["left"] -= 1
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return real(self, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(remote_faults, "FIRST_PAUSE", 0.05)
    return state


def test_reads_are_tried_again_for_a_while(flaky, monkeypatch):
    folder = open_folder("memory://flaky")
    folder.write("x", b"0123456789", "t")
    flaky["left"] = 3
    assert folder.read("x", 2, 5) == b"23456" and flaky["asked"] == 4
    flaky["left"] = 1000
    monkeypatch.setattr(remote_faults, "PATIENCE", 0.5)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match=r"memory://flaky/x: .*reset by peer \(do it again when the store"):
        folder.read("x")
    assert 0.05 < time.monotonic() - begun < 2 and flaky["asked"] < 20


class Store:
    """What an upload needs of s3fs."""

    fixed_upload_size = False

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.ended: list[str] = []
        self.fails: dict[str, BaseException] = {}

    def call_s3(self, method: str, **options: Any) -> dict[str, Any]:
        if method == "complete_multipart_upload":
            numbers = [part["PartNumber"] for part in options["MultipartUpload"]["Parts"]]
            assert numbers == sorted(self.parts)
            self.objects["b/k"] = b"".join(self.parts[number] for number in numbers)
        if method in self.fails:
            raise self.fails[method]
        if method == "put_object":
            self.objects["b/k"] = options["Body"]
        if method == "upload_part":
            time.sleep(0.01 * (options["PartNumber"] % 3))  # they end in another order
            self.parts[options["PartNumber"]] = options["Body"]
        return {"UploadId": "u", "ETag": str(options.get("PartNumber"))}

    def abort_mpu(self, bucket: str, key: str, upload: str, timeout: float) -> None:
        self.ended.append(upload)

    def info(self, path: str) -> dict[str, int]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"size": len(self.objects[path])}

    def invalidate_cache(self, path: str) -> None:
        """Nothing is cached."""


def upload_of(store: Store, size: int = 0) -> S3Upload:
    return S3Upload(store, "b/k", lambda operation: operation(), size)


@pytest.mark.parametrize("size", [0, 5, 1000, 1003])
def test_an_upload_holds_what_was_written(monkeypatch, size):
    monkeypatch.setattr(s3_uploads, "CHUNK", 100)
    store, content = Store(), bytes(i % 251 for i in range(size))
    upload = upload_of(store)
    for begin in range(0, size, 77):
        upload.write(memoryview(content)[begin : begin + 77])
    assert not store.objects
    upload.finish()
    assert store.objects == {"b/k": content} and upload.tell() == size and not store.ended


def first_part(size: int) -> int:
    """Return the number of bytes of the first part of an upload of `size` bytes, 0 if unknown."""
    store = Store()
    upload = upload_of(store, size)
    while upload.tell() < 5 * CHUNK:
        upload.write(bytes(CHUNK))
    upload.finish()
    return len(store.parts[1])


def test_no_upload_has_more_parts_than_s3_takes(monkeypatch):
    assert first_part(0) == CHUNK
    assert first_part(140 << 30) * 10_000 > 140 << 30
    monkeypatch.setattr(s3_uploads, "CHUNK", 1)
    monkeypatch.setattr(s3_uploads, "MAX_PARTS", 20)
    for size in (0, 1000):
        store = Store()
        upload = upload_of(store, size)
        for number in range(100):
            upload.write(bytes([number] * 10))
        upload.finish()
        assert store.objects["b/k"] == bytes(number for number in range(100) for _ in range(10))
        assert 1 < len(store.parts) <= 20


def test_a_completion_that_was_carried_out_and_not_heard_of_is_one(monkeypatch):
    monkeypatch.setattr(s3_uploads, "CHUNK", 100)
    store = Store()
    store.fails["complete_multipart_upload"] = FileNotFoundError("The specified upload does not exist")
    upload = upload_of(store)
    upload.write(bytes(250))
    upload.finish()
    assert len(store.objects["b/k"]) == 250
    upload = upload_of(store)
    upload.write(bytes(250))
    upload.written += 1  # what is there is not what was written
    with pytest.raises(FileNotFoundError):
        upload.finish()


def test_a_part_that_fails_ends_the_upload(monkeypatch):
    monkeypatch.setattr(s3_uploads, "CHUNK", 100)
    store = Store()
    store.fails["upload_part"] = OSError("no")
    upload = upload_of(store)
    with pytest.raises(OSError, match="no"):
        upload.write(bytes(1000))
        upload.finish()
    upload.abort()
    assert store.ended == ["u"] and not store.objects


def test_a_reader_brings_little_that_nobody_needs(tmp_path):
    """Every other tensor of a file, small and large ones."""
    tensors = {(MASTER, f"{number:03}"): torch.randn(number % 7 * 1500 + 3) for number in range(80)}
    write(tmp_path / "t", tensors, ranks=1)
    source = manifest.source_of(manifest.read(open_folder(tmp_path / "t")), str(tmp_path / "t"))
    wanted = [tensor for tensor in source.tensors if int(tensor.name) % 2]
    requests = [ReadRequest(tensor=tensor, start=0, length=tensor.elements, target=torch.empty(tensor.elements))
                for tensor in wanted]  # fmt: skip
    folder = open_folder(tmp_path / "t")
    CheckedReader(folder, source.files).read(requests)
    for request in requests:
        assert torch.equal(request.target, tensors[MASTER, request.tensor.name])
    needed = sum(tensor.nbytes for tensor in wanted)
    assert needed <= folder.bytes_read <= 1.05 * needed, folder.bytes_read / needed


@pytest.mark.parametrize(
    ("known", "error", "begun_again"),
    [(True, ConnectionRefusedError(), True), (False, ConnectionRefusedError(), False), (False, said("SlowDown"), True)],
)
def test_a_store_that_has_never_answered_is_given_up_soon(monkeypatch, known, error, begun_again):
    attempts = Attempts(lambda: False, known)
    monkeypatch.setattr(remote_faults, "FIRST_PAUSE", 0.01)
    assert attempts.again(error)
    monkeypatch.setattr(remote_faults, "PATIENCE_BEFORE_ANSWER", 0.01)
    assert attempts.again(error) is begun_again
