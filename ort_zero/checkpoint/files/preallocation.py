"""Allocate the disk blocks of a file before its bytes are written, where writing then takes less time.

Otherwise ext4 reserves each block of 4 KiB as it is written, and allocates the block later: a third of the CPU time of
a write. On tmpfs allocation makes writing slower, and other file systems were not measured.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

_EXT4 = 0xEF53
"""``f_type`` of ext2, ext3 and ext4, see statfs(2)."""
_MIN_SIZE = 1 << 20
"""Minimum number of bytes of a range to allocate; a smaller range gains no time."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def reserve_blocks(descriptor: int, offset: int, size: int) -> None:
    """Allocate the blocks of a range of a file on ext4, and extend the file to its end; elsewhere do nothing.

    Args:
        descriptor: descriptor of the file, open for writing.
        offset: first byte of the range.
        size: number of bytes.

    Raises:
        OSError: the disk is too full.
    """
    libc = _libc(ctypes.CDLL) if size >= _MIN_SIZE else None
    if libc is None or _type_of_file_system(libc, descriptor) != _EXT4:
        return
    # not os.posix_fallocate, which writes into every block if the file system cannot allocate
    if libc.fallocate(descriptor, 0, offset, size):
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))


@functools.cache
def _libc(load: Callable[..., Any]) -> Any:
    """Return the C library by its loader, None if the system has no ``fallocate`` or other sizes of C types."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    libc = load(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return None
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return libc


def _type_of_file_system(libc: Any, descriptor: int) -> int | None:
    """Return the number of the file system's type, None if it is unknown."""
    record = (ctypes.c_long * 32)()  # struct statfs has 120 bytes and begins with f_type
    return record[0] if libc.fstatfs(descriptor, record) == 0 else None
