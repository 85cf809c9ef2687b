"""Write files that appear under their names complete, or not at all."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial"
"""Suffix of the name of an incomplete file; the name begins with a dot."""


def partial_name(name: str, token: str) -> str:
    """Return the name of an incomplete file beside `name`; `token` distinguishes the writers of one file."""
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.{token}{PARTIAL}"


@contextmanager
def removed_on_error(path: Path, *, durable: bool) -> Iterator[BinaryIO]:
    """Open `path` for unbuffered writing in the block, and remove the file if the block raises.

    Args:
        durable: flush the bytes to the disk at the end, so that they survive a loss of power.
    """
    try:
        with open(path, "wb", buffering=0) as file:
            yield file
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` as the content of `path`, in place of an existing file, which stays until all is written."""
    partial = path.with_name(partial_name(path.name, f"{os.getpid()}-{uuid.uuid4().hex[:8]}"))
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 as :func:`write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, **options: Any) -> None:
    """Write `value` as JSON as :func:`write_bytes`."""
    write_text(path, json.dumps(value, **options))
