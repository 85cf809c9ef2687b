"""Upload files to S3 in parts, several parts at a time; s3fs sends one part after the other, all of one size."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from ort_zero.checkpoint.files.folders import CHUNK

AT_ONCE = 4
"""Number of parts of an upload that are sent at a time, with their bytes in memory."""
MAX_PARTS = 10_000
"""Maximum number of parts of an upload that S3 takes."""
_SECONDS_TO_END = 10
"""Seconds to end a failed upload; the next run ends the uploads that remain."""


class S3Upload(io.RawIOBase):
    """A stream into one object, which appears when :meth:`finish` is called.

    Args:
        fs: an ``s3fs.S3FileSystem``.
        path: bucket and key.
        call: calls a function, and calls it again after an error that may pass.
        size: number of bytes to be written, 0 if unknown.
    """

    def __init__(self, fs: Any, path: str, call: Callable[[Callable[[], Any]], Any], size: int = 0):
        super().__init__()
        self._fs, self._path, self._call = fs, path, call
        self._bucket, _, self._key = path.partition("/")
        self._part = max(CHUNK, -(-size // (MAX_PARTS // 2) // CHUNK) * CHUNK)
        self._grows = not size and not fs.fixed_upload_size
        self._waiting = bytearray()
        self._id: str | None = None
        self._under_way: deque[tuple[int, Future[Any]]] = deque()
        self._done: list[dict[str, Any]] = []
        self._begun = 0
        self.written = 0
        """Number of bytes written so far."""

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.written

    def write(self, data: Any) -> int:
        """Add bytes to the upload; send each full part."""
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            taken = view[position : position + self._part - len(self._waiting)]
            self._waiting += taken
            position += len(taken)
            if len(self._waiting) == self._part:
                self._send()
        self.written += len(view)
        return len(view)

    def finish(self) -> None:
        """Send the remaining bytes, and complete the upload: the object appears."""
        if self._id is None:
            content = self._waiting
            self._call(lambda: self._s3("put_object", Body=bytes(content)))
            return
        if self._waiting:
            self._send()
        while self._under_way:
            self._settle_one()
        parts = {"Parts": self._done}
        try:
            self._call(lambda: self._s3("complete_multipart_upload", UploadId=self._id, MultipartUpload=parts))
        except FileNotFoundError:
            # the store completed the upload and its answer was lost, so that a second completion finds no upload
            self._fs.invalidate_cache(self._path)
            if self._fs.info(self._path)["size"] != self.written:
                raise

    def abort(self) -> None:
        """End the upload, so that the store keeps none of its parts, if the store answers."""
        if self._id is None:
            return
        # the store would keep a part that arrives after the end
        wait((future for _, future in self._under_way), timeout=_SECONDS_TO_END)
        with suppress(Exception):  # the first error says more
            self._fs.abort_mpu(self._bucket, self._key, self._id, timeout=_SECONDS_TO_END)

    def _send(self) -> None:
        """Begin to send the waiting bytes as the next part."""
        if self._id is None:
            self._id = self._call(lambda: self._s3("create_multipart_upload"))["UploadId"]
        if len(self._under_way) >= AT_ONCE:
            self._settle_one()
        self._begun += 1
        number, content, self._waiting = self._begun, bytes(self._waiting), bytearray()

        def upload() -> Any:
            return self._call(lambda: self._s3("upload_part", PartNumber=number, UploadId=self._id, Body=content))

        self._under_way.append((number, _in_thread(upload)))
        if self._grows and self._begun % (MAX_PARTS // 10) == 0:
            self._part *= 2

    def _settle_one(self) -> None:
        """Wait for the oldest part that is being sent."""
        number, future = self._under_way[0]
        answer = future.result()
        self._under_way.popleft()
        tags = {key: answer[key] for key in ("ETag", "ChecksumSHA256") if key in answer}
        self._done.append({"PartNumber": number, **tags})

    def _s3(self, method: str, **options: Any) -> Any:
        return self._fs.call_s3(method, Bucket=self._bucket, Key=self._key, **options)


def _in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call `function` in a new thread; return its future result.

    Not a thread of a pool: a background save continues while the interpreter exits, when pools take no more calls.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ort_zero upload", daemon=True).start()
    return future
