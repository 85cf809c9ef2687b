"""Files that appear under their names complete, or not at all."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

PARTIAL = ".partial"
"""Suffix of the name of a file that is being written; the name begins with a dot."""


def partial_name(name: str, token: str) -> str:
    """Return the name under which an incomplete file lies beside its final place.

    Args:
        name: the final name, which may lead into a folder.
        token: tells this writer from others that may write the same file.
    """
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}.{last}.{token}{PARTIAL}"


@contextmanager
def removed_on_error(path: Path, *, durable: bool = False, buffering: int = -1) -> Iterator[BinaryIO]:
    """Open `path` for writing in the block; if the block raises, the file is removed.

    Args:
        path: the file, which is made or emptied.
        durable: have the bytes on the disk itself at the end, so that they outlive a loss of power.
        buffering: as for :func:`open`; 0 for none.

    Raises:
        OSError: it cannot be written.
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
    """Give a binary file whose content becomes that of `path` when the block ends, and never if it raises.

    Args:
        path: the final place; what is there stays until then.
        temporary: where the file lies meanwhile, on the same file system; by default beside `path`, hidden.
        durable: have the bytes on the disk itself before `path` leads to them.

    Raises:
        OSError: it cannot be written; nothing is left behind.
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
    """Let `data` appear as the content of `path`, in place of what was there.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    with replacing(path, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Let `text` appear as the content of `path` in UTF-8, in place of what was there.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any, **options: Any) -> None:
    """Let `value` appear as the content of `path`, in place of what was there.

    Args:
        path: the file.
        value: what :func:`json.dumps` accepts.
        options: options of :func:`json.dumps`, such as ``indent``.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    write_text(path, json.dumps(value, **options))
