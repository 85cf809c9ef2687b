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
    """Return the name of an incomplete file, in the folder of the complete file.

    Args:
        name: the final name, which may include folders.
        token: distinguishes this writer from other writers of the same file.
    """
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.{token}{PARTIAL}"


@contextmanager
def removed_on_error(path: Path, *, durable: bool = False, buffering: int = -1) -> Iterator[BinaryIO]:
    """Open `path` for writing in the block, and remove the file if the block raises.

    Args:
        durable: flush the bytes to the disk at the end, so that they survive a loss of power.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        with open(path, "wb", buffering=buffering) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


@contextmanager
def replacing(path: Path, *, temporary: Path | None = None, durable: bool = False) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces `path` when the block ends, unless the block raises.

    Args:
        path: the final place; an existing file stays until the end of the block.
        temporary: place of the incomplete file on the same file system; None for a hidden file beside `path`.
        durable: flush the bytes to the disk before the file gets its final name.

    Raises:
        OSError: the file cannot be written; no incomplete file stays.
    """
    partial = temporary or path.with_name(partial_name(path.name, f"{os.getpid()}-{uuid.uuid4().hex[:8]}"))
    with removed_on_error(partial, durable=durable) as file:
        yield file
    try:
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `data` as the content of `path`, in place of an existing file; raises as :func:`replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 as the content of `path`, in place of an existing file; raises as :func:`replacing`."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, **options: Any) -> None:
    """Write `value` as JSON into `path`, in place of an existing file; raises as :func:`replacing`."""
    write_text(path, json.dumps(value, **options))
