"""Keep bytes that are read only for the checksum of their piece, for the next rank that needs them.

A piece is checked as a whole. When a checkpoint is converted for another world size, the bytes of one piece can belong
to several ranks; without the kept bytes the piece would be read whole for each of these ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ort_zero.checkpoint.files.scratch import Scratch
from ort_zero.checkpoint.records import Piece


@dataclass(frozen=True, slots=True)
class _Kept:
    begin: int
    """First byte in the file."""
    data: torch.Tensor
    """The bytes from `begin` to the end of the piece."""
    scratch: Scratch


class Leftovers:
    """The bytes of pieces that have been read and checked, kept in temporary files.

    Args:
        folder: folder of the temporary files; default: the system's folder for temporary files.
    """

    def __init__(self, folder: str | None = None):
        self._folder = folder
        self._kept: dict[tuple[str, int], _Kept] = {}
        self._users: dict[Scratch, int] = {}
        self._scratch: Scratch | None = None
        self.wanted = True
        """False if no later read will take bytes that are read from now on."""

    def next_file(self) -> None:
        """Put the next bytes into a new file; a file is deleted when all its bytes have been taken."""
        self._scratch = None

    def room(self, piece: Piece, begin: int) -> memoryview | None:
        """Return memory for the bytes of a piece from file position `begin` on; None if they are not wanted.

        The bytes count as kept at once: a caller that cannot fill the memory must give up the conversion.
        """
        size = piece.offset + piece.length - begin
        before = self._kept.get((piece.file, piece.offset))
        if not self.wanted or size <= 0 or (before is not None and before.begin <= begin):
            return None
        if before is not None:
            self._forget(piece)
        if self._scratch is None:
            self._scratch = Scratch(self._folder)
        data = self._scratch.tensor(size, torch.uint8)
        self._kept[piece.file, piece.offset] = _Kept(begin, data, self._scratch)
        self._users[self._scratch] = self._users.get(self._scratch, 0) + 1
        return data.numpy().data

    def take(self, piece: Piece, begin: int, size: int) -> memoryview | None:
        """Return bytes of a piece, None if they are not kept; bytes up to the piece's end are kept no longer."""
        kept = self._kept.get((piece.file, piece.offset))
        if kept is None or begin < kept.begin:
            return None
        if begin + size == piece.offset + piece.length:
            self._forget(piece)
        return kept.data[begin - kept.begin :][:size].numpy().data

    def _forget(self, piece: Piece) -> None:
        scratch = self._kept.pop((piece.file, piece.offset)).scratch
        self._users[scratch] -= 1
        if not self._users[scratch]:
            del self._users[scratch]
            scratch.close()  # its mapped memory stays readable
            if scratch is self._scratch:
                self._scratch = None

    def close(self) -> None:
        """Delete all temporary files."""
        for scratch in self._users:
            scratch.close()
        self._kept.clear()
        self._users.clear()
        self._scratch = None
