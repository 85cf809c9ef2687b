"""Open a shard: a range of a file that is a whole zip of ``torch.save``."""

from __future__ import annotations

import io
from typing import IO, Any

from ort_zero.checkpoint.dcp.blocks import Block
from ort_zero.checkpoint.dcp.metadata import Entry, Shard
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor
from ort_zero.errors import CheckpointError, CorruptCheckpointError

_SMALL = 1 << 20
"""Maximum size in bytes of a section that is read at once."""


class Section(Folder):
    """A range of a file, as if it were a file of its own.

    Args:
        folder: folder of the file.
        shard: the range.
    """

    def __init__(self, folder: Folder, shard: Shard):
        super().__init__(folder.url)
        self._folder, self._shard = folder, shard
        self._whole: bytes | None = None

    def path(self, name: str = "") -> str:
        """Return the path of the file and the range, for messages."""
        end = self._shard.offset + self._shard.length
        return f"{self._folder.path(self._shard.file)} (bytes {self._shard.offset} to {end})"

    def size(self, name: str) -> int | None:
        """Return the number of bytes of the range, None if there is no such file.

        Raises:
            CorruptCheckpointError: the file ends before the range.
        """
        size = self._folder.size(self._shard.file)
        if size is not None and size < self._shard.offset + self._shard.length:
            raise CorruptCheckpointError(f"{self.path()} is truncated: the file has {size} bytes")
        return None if size is None else self._shard.length

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of the range on."""
        if self._shard.length > _SMALL:
            self._folder.read_into(self._shard.file, self._shard.offset + offset, buffer)
            return
        if self._whole is None:
            self._whole = self._folder.read(self._shard.file, self._shard.offset, self._shard.length)
        buffer[:] = self._whole[offset : offset + len(buffer)]

    def open(self, name: str) -> IO[bytes]:
        """Open the range for reading, seekable."""
        return io.BufferedReader(_Stream(self, self._shard.length))


class _Stream(io.RawIOBase):
    """A seekable stream of a section."""

    def __init__(self, section: Section, size: int):
        self._section, self._size, self._at = section, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        self._section.read_into("", self._at, memoryview(buffer)[:count])
        self._at += count
        return count


def block_of(entry: Entry, shard: Shard, content: Any) -> tuple[Block, tuple[int, ...] | None]:
    """Return the place of a shard's elements in its file, and the strides if the elements are not row-major.

    Raises:
        CorruptCheckpointError: the shard holds another tensor than the metadata say.
        CheckpointError: a shard of several is not row-major.
    """
    if not isinstance(content, StoredTensor):
        raise CorruptCheckpointError(f"{shard.file}: the shard of {entry.key} at byte {shard.offset} is no tensor")
    if (content.dtype, content.shape) != (entry.dtype, shard.sizes):
        raise CorruptCheckpointError(
            f"{shard.file}: the shard of {entry.key} is {content.dtype} of the shape {list(content.shape)}, "
            f"the metadata say {entry.dtype} of {list(shard.sizes)}"
        )
    strides = None if content.is_row_major else content.strides
    if strides is not None and len(entry.shards) > 1:
        raise CheckpointError(
            f"{shard.file}: a shard of {entry.key} has the strides {list(strides)}; ort_zero reads shards whose rows "
            "lie one after the other: call contiguous() on the parameter before the save"
        )
    return Block(shard.offsets, shard.sizes, shard.file, shard.offset + content.offset), strides
