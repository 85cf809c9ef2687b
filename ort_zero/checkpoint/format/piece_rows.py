"""Convert the pieces of a tensor to rows of ``manifest.json`` and back: one row per piece, or per run of pieces."""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ort_zero.checkpoint.piece_runs import CHECK_BYTES, PieceRun, PieceRuns
from ort_zero.checkpoint.records import File, Piece, Tensor

MIN_PIECES_PER_RUN = 8
"""Minimum number of pieces that one row stands for; fewer pieces get a row each."""
_CHECK = re.compile("[0-9a-f]{16}")
_PLAIN, _RUN = 5, 7
"""Number of values in a row for one piece, and in a row for several pieces."""


def rows_of(pieces: Sequence[Piece], index: Mapping[str, int]) -> list[list[Any]]:
    """Return the manifest's rows for the pieces of one tensor.

    Args:
        pieces: pieces of the tensor.
        index: index in the manifest's file list by file name.
    """
    if not isinstance(pieces, PieceRuns):
        return [[index[p.file], p.offset, p.length, p.start, p.check] for p in pieces]
    rows: list[list[Any]] = []
    for run in pieces.runs:
        if run.pieces >= MIN_PIECES_PER_RUN:
            checks = base64.b64encode(run.checks).decode()
            rows.append([run.file, run.offset, run.length, run.start, checks, run.pieces, run.step])
        else:
            rows += rows_of([pieces.piece(run, number) for number in range(run.pieces)], index)
    return rows


def pieces_of(rows: Sequence[list[Any]], names: Sequence[str], dtype: str) -> Sequence[Piece]:
    """Return the pieces of one tensor from its rows, in the order of their first elements.

    Args:
        rows: rows of the tensor.
        names: names of the files that the manifest lists.
        dtype: dtype of the tensor, as its code in safetensors.

    Raises:
        TypeError: a row has another form.
        IndexError: a row names a file that is not listed.
    """
    if all(len(row) == _PLAIN for row in rows):
        return tuple(sorted((_piece(names, *row) for row in rows), key=lambda piece: piece.start))
    if any(len(row) not in (_PLAIN, _RUN) for row in rows):
        raise TypeError(f"a row has {max(map(len, rows))} values, which this version of the format does not know")
    return PieceRuns(names, sorted((_run(names, *row) for row in rows), key=lambda run: run.start), dtype)


def _piece(names: Sequence[str], file: Any, offset: Any, length: Any, start: Any, check: Any) -> Piece:
    """Return the piece of a row; raise like :func:`pieces_of`."""
    _refuse_other_numbers(file, offset, length, start)
    if check is not None and not (isinstance(check, str) and _CHECK.fullmatch(check)):
        raise TypeError("the checksum must be 16 hex digits")
    return Piece(names[file], offset, length, start, check)


def _run(
    names: Sequence[str],
    file: Any,
    offset: Any,
    length: Any,
    start: Any,
    checks: Any,
    count: Any = None,
    step: Any = 1,
) -> PieceRun:
    """Return the run of a row; without `count` it has one piece; raise like :func:`pieces_of`."""
    _refuse_other_numbers(file, offset, length, start)
    if count is None:
        if not (isinstance(checks, str) and _CHECK.fullmatch(checks)):
            raise TypeError("the checksum must be 16 hex digits")
        data, count = bytes.fromhex(checks), 1
    else:
        if any(type(number) is not int or number < 1 for number in (length, count, step)):
            raise TypeError("length, number of pieces and step must be whole numbers, 1 or more")
        data = _from_base64(checks)
    if len(data) != count * CHECK_BYTES:
        raise TypeError(f"the checksums of {count} pieces take {count * CHECK_BYTES} bytes, not {len(data)}")
    if file + (count - 1) * step >= len(names):
        raise IndexError(f"the last of {count} pieces is in no file that is listed")
    return PieceRun(file, offset, length, start, data, count, step)


def _from_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "!", validate=True)
    except (ValueError, binascii.Error):
        raise TypeError("the checksums of several pieces must be base64") from None


def _refuse_other_numbers(*numbers: Any) -> None:
    if any(type(number) is not int or number < 0 for number in numbers):
        raise TypeError("file, offset, length and first element must be whole numbers, 0 or more")


class Extents:
    """The number of bytes that tensors claim of each file, compared with the sizes of the files.

    Args:
        files: the files of a checkpoint, in the order of the manifest: runs refer to files by index.
    """

    def __init__(self, files: Iterable[File]):
        self._files = list(files)
        self._sizes = {file.name: file.size for file in self._files}
        self._shortest: dict[range, File] = {}
        self._claimed: Counter[str] = Counter()
        self._claimed_by_runs: Counter[range] = Counter()
        """Bytes that runs claim of each file in a range of file indices."""

    def claim(self, tensor: Tensor) -> str | None:
        """Count the bytes of a tensor's pieces; return a message if a piece lies outside its file, else None."""
        if not isinstance(tensor.pieces, PieceRuns):
            for piece in tensor.pieces:
                if piece.offset + piece.length > self._sizes[piece.file]:
                    return f"a piece lies outside {piece.file}"
                self._claimed[piece.file] += piece.length
            return None
        for run in tensor.pieces.runs:
            files = run.files()
            if files not in self._shortest:
                self._shortest[files] = min((self._files[number] for number in files), key=lambda file: file.size)
            if run.offset + run.length > self._shortest[files].size:
                return f"a piece lies outside {self._shortest[files].name}"
            self._claimed_by_runs[files] += run.length
        return None

    def claimed_too_much(self) -> str | None:
        """Return a message that names a file with fewer bytes than the tensors claim, None if there is no such file.

        Without this check a small file could be read again and again into an output of any size.
        """
        claimed = Counter(self._claimed)
        for files, length in self._claimed_by_runs.items():
            for number in files:
                claimed[self._files[number].name] += length
        for name, length in claimed.items():
            if length > self._sizes[name]:
                return f"the tensors claim {length} bytes of {name}, which has {self._sizes[name]}"
        return None
