"""Read ranges of stored tensors: check their bytes, copy them into memory of any floating-point dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.storage import CHUNK, Folder
from ort_zero.checkpoint.piece_runs import index_at
from ort_zero.checkpoint.records import Piece, Tensor
from ort_zero.errors import CorruptCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A range of a stored tensor, and the memory into which it is read."""

    tensor: Tensor
    start: int
    """First element in the flattened tensor."""
    length: int
    """Number of elements."""
    target: torch.Tensor | None
    """1-D, of `length` elements; None if the bytes are only checked."""


def overlaps(request: ReadRequest) -> Iterator[tuple[Piece, int, int]]:
    """Yield (piece, first element in the piece, number of elements) for each piece that overlaps the range."""
    size = dtypes.itemsize(request.tensor.dtype)
    end = request.start + request.length
    pieces = request.tensor.pieces
    for number in range(index_at(pieces, request.start), len(pieces)):
        piece = pieces[number]
        if piece.start >= end:
            break
        first, last = max(piece.start, request.start), min(piece.start + piece.length // size, end)
        if first < last:
            yield piece, first - piece.start, last - first


def check_range(folder: Folder, request: ReadRequest) -> None:
    """Read all pieces that `request` touches, and compare their bytes with the checksums.

    Raises:
        CorruptCheckpointError: a checksum differs, or a file ends early.
    """
    buffer = memoryview(bytearray(min(CHUNK, request.tensor.nbytes)))
    for piece, _, _ in overlaps(request):
        digest = xxhash.xxh3_64()
        for position in range(0, piece.length, CHUNK):
            part = buffer[: min(CHUNK, piece.length - position)]
            folder.read_into(piece.file, piece.offset + position, part)
            digest.update(part)
        if piece.check is not None and digest.hexdigest() != piece.check:
            raise CorruptCheckpointError(
                f"{folder.path(piece.file)} is damaged: the bytes of {request.tensor.kind} of {request.tensor.name} "
                "do not match their checksum (ort-zero verify lists everything that is wrong)"
            )


def read_range(folder: Folder, request: ReadRequest) -> None:
    """Read the range into its target, cast to the target's dtype."""
    assert request.target is not None, "the request needs a target"
    size = dtypes.itemsize(request.tensor.dtype)
    dtype = dtypes.torch_dtype(request.tensor.dtype)
    step = CHUNK // size
    buffer = bytearray(min(CHUNK, request.length * size))
    for piece, first, length in overlaps(request):
        for done in range(0, length, step):
            count = min(step, length - done)
            part = memoryview(buffer)[: count * size]
            folder.read_into(piece.file, piece.offset + (first + done) * size, part)
            begin = piece.start + first + done - request.start
            request.target.narrow(0, begin, count).copy_(torch.frombuffer(part, dtype=dtype))
