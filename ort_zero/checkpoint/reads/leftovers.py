"""Keeps what is read of pieces for their checksum alone, for whoever wants it next.

A piece is checked as a whole. Where a new cut goes through it, its bytes belong to two ranks or more of a checkpoint
that is converted; without this each of them would read all of it.
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
    """The bytes up to the end of the piece."""
    scratch: Scratch


class Leftovers:
    """Bytes of pieces that have been read and checked, in temporary files.

    Args:
        folder: folder of the file system that they lie in; by default the system's for temporary files.
    """

    def __init__(self, folder: str | None = None):
        self._folder = folder
        self._kept: dict[tuple[str, int], _Kept] = {}
        self._users: dict[Scratch, int] = {}
        self._scratch: Scratch | None = None
        self.wanted = True
        """False where nobody will take what is read from now on."""

    def next_file(self) -> None:
        """Put what comes from now on into a file of its own, which goes when all of it has been taken."""
        self._scratch = None

    def room(self, piece: Piece, begin: int) -> memoryview | None:
        """Return room for the bytes of a piece from `begin` on, a position in the file; None if they are not wanted.

        They count as kept at once: whoever gets no right bytes into it must give the conversion up.
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
        """Return bytes of a piece, None if they are not kept. Those up to the end of the piece are given away."""
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
            scratch.close()  # what is mapped of it stays readable
            if scratch is self._scratch:
                self._scratch = None

    def close(self) -> None:
        """Give everything back."""
        for scratch in self._users:
            scratch.close()
        self._kept.clear()
        self._users.clear()
        self._scratch = None
