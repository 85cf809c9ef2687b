"""Describe how tensor-parallel ranks share a tensor as blocks of elements, and join the ranks' parts."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.pieces import LazyPieces
from ort_zero.checkpoint.records import Piece, Tensor
from ort_zero.errors import CheckpointError

MAX_PIECES_KEPT = 10_000
"""Maximum number of pieces of a tensor that stay in memory for its whole lifetime."""
TENSORS_KEPT = 32
"""Number of recently used tensors with more pieces that stay in memory; more than the number of working threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A box of elements of the whole tensor that one rank holds."""

    rank: int
    shape: tuple[int, ...]
    whole_offset: int
    """Index of the block's first element in the flattened whole tensor."""
    whole_strides: tuple[int, ...]
    """Distance of neighbours along each axis in the whole tensor, in elements."""
    part_offset: int
    """Index of the block's first element in the rank's flattened part."""
    part_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield (index in the whole, index in the part, elements) of each run of elements contiguous in both."""
        length, axis = 1, len(self.shape)
        while axis and (
            self.shape[axis - 1] == 1 or self.whole_strides[axis - 1] == self.part_strides[axis - 1] == length
        ):
            axis -= 1
            length *= self.shape[axis]
        if not self.elements:
            return
        for index in itertools.product(*map(range, self.shape[:axis])):
            whole = self.whole_offset + sum(i * s for i, s in zip(index, self.whole_strides))
            part = self.part_offset + sum(i * s for i, s in zip(index, self.part_strides))
            yield whole, part, length


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a tensor over the ranks."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    blocks: tuple[Block, ...]
    replicated: tuple[tuple[Block, Block], ...] = ()
    """Pairs of blocks of two ranks with the same elements; the second block of a pair is not in `blocks`."""


def split_along(shapes: Sequence[tuple[int, ...]], dim: int, widths: Sequence[Sequence[int]] | None = None) -> Split:
    """Return the split of a tensor whose parts are concatenated along one dimension.

    Args:
        widths: for a tensor of several fused tensors: the width of each on each rank along `dim`, in elements. By
            default nothing is fused.

    Raises:
        ValueError: the parts do not fit together.
    """
    if not all(len(shape) == len(shapes[0]) and dim < len(shape) for shape in shapes):
        raise ValueError(f"parts of the shapes {[list(s) for s in shapes]} have no dimension {dim} in common")
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) != 1:
        raise ValueError(f"parts of the shapes {[list(s) for s in shapes]} differ in more than dimension {dim}")
    if widths is None:
        widths = [[shape[dim] for shape in shapes]]
    for rank, shape in enumerate(shapes):
        if sum(row[rank] for row in widths) != shape[dim]:
            raise ValueError(f"rank {rank}'s part is {shape[dim]} wide, not {sum(row[rank] for row in widths)}")
    total = sum(shape[dim] for shape in shapes)
    whole = (*shapes[0][:dim], total, *shapes[0][dim + 1 :])
    blocks, position, taken = [], 0, [0] * len(shapes)
    inner = math.prod(whole[dim + 1 :])
    for row in widths:
        for rank, width in enumerate(row):
            shape = shapes[rank]
            blocks.append(
                Block(
                    rank=rank,
                    shape=(*shape[:dim], width, *shape[dim + 1 :]),
                    whole_offset=position * inner,
                    whole_strides=row_major(whole),
                    part_offset=taken[rank] * inner,
                    part_strides=row_major(shape),
                )
            )
            position += width
            taken[rank] += width
    return Split(whole, tuple(block for block in blocks if block.elements))


def replicated(shapes: Sequence[tuple[int, ...]]) -> Split:
    """Return the split of a tensor that is whole on every rank.

    Raises:
        ValueError: the shapes differ.
    """
    if len(set(shapes)) != 1:
        raise ValueError(f"the ranks have the shapes {[list(s) for s in shapes]}")
    strides = row_major(shapes[0])
    copies = [
        Block(rank=n, shape=shapes[0], whole_offset=0, whole_strides=strides, part_offset=0, part_strides=strides)
        for n in range(len(shapes))
    ]
    return Split(shapes[0], (copies[0],), tuple((copies[0], other) for other in copies[1:]))


def joined(parts: Sequence[Tensor], split: Split) -> Tensor:
    """Return the whole tensor, joined from the ranks' parts.

    Raises:
        CheckpointError: a part is stored in another order than row by row.
        ValueError: the split does not fit the parts.
    """
    for part in parts:
        if part.strides is not None:
            raise CheckpointError(
                f"{part.pieces[0].file}: a part of {part.name} is stored with the strides {list(part.strides)}, which "
                "ort_zero does not join"
            )
    if sum(block.elements for block in split.blocks) != math.prod(split.shape):
        raise ValueError(f"the parts have not as many elements as the shape {list(split.shape)}")
    for rank, part in enumerate(parts):  # a block may repeat elements, and so have more elements than the files
        if sum(block.elements for block in split.blocks if block.rank == rank) > part.elements:
            raise ValueError(f"rank {rank}'s part of the shape {list(part.shape)} is too small")
    pieces: Sequence[Piece] = _pieces(parts, split)
    if len(pieces) > MAX_PIECES_KEPT:
        pieces = PiecesOnDemand(tuple(parts), split)
    return replace(parts[0], shape=split.shape, pieces=pieces)


def _pieces(parts: Sequence[Tensor], split: Split) -> tuple[Piece, ...]:
    """Return the pieces of the whole tensor, in order."""
    size = itemsize(parts[0].dtype)
    starts = [[piece.start for piece in part.pieces] for part in parts]
    pieces: list[Piece] = []
    for block in split.blocks:
        part = parts[block.rank]
        for whole, local, length in block.runs():
            pieces.extend(_cut(part, starts[block.rank], size, local, length, whole))
    pieces.sort(key=lambda piece: piece.start)
    return tuple(pieces)


class PiecesOnDemand(LazyPieces):
    """The pieces of a tensor whose rows are cut over the ranks, computed again when they are used.

    A matrix with 8192 rows on 8 ranks has 65536 pieces, a large model hundreds of these matrices. Only the pieces of
    the :data:`TENSORS_KEPT` tensors used last stay in memory. Thread-safe.
    """

    def __init__(self, parts: tuple[Tensor, ...], split: Split):
        self.parts = parts
        self.split = split

    def __iter__(self) -> Iterator[Piece]:
        return iter(_recent_pieces(self))

    def __len__(self) -> int:
        return len(_recent_pieces(self))

    def piece_at(self, index: int) -> Piece:
        """Return the piece at `index`, from 0 on."""
        return _recent_pieces(self)[index]


@lru_cache(maxsize=TENSORS_KEPT)
def _recent_pieces(pieces: PiecesOnDemand) -> tuple[Piece, ...]:
    return _pieces(pieces.parts, pieces.split)


def block_of(part: Tensor, block: Block) -> Tensor:
    """Return one block of a rank's part as a separate tensor, for comparisons."""
    whole = row_major(block.shape)
    return joined([part], Split(block.shape, (replace(block, rank=0, whole_offset=0, whole_strides=whole),)))


def first_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return the first `rows` rows of a row-major tensor, along its first dimension."""
    shape = (rows, *tensor.shape[1:])
    end, size = math.prod(shape), itemsize(tensor.dtype)
    pieces = tuple(
        piece._replace(length=min(piece.length, (end - piece.start) * size))
        for piece in tensor.pieces
        if piece.start < end
    )
    return replace(tensor, shape=shape, pieces=pieces)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor without gaps, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _cut(part: Tensor, starts: list[int], size: int, begin: int, length: int, first: int) -> Iterator[Piece]:
    """Yield the pieces of a part's `length` elements from `begin` on; `first` is their index in the whole tensor."""
    if begin < 0 or length < 0 or begin + length > part.elements:
        raise ValueError(f"elements {begin} to {begin + length} are not in a part of the shape {list(part.shape)}")
    end, index = begin + length, bisect_right(starts, begin) - 1
    while begin < end:
        piece = part.pieces[index]
        stop = min(end, piece.start + piece.length // size)
        offset = piece.offset + (begin - piece.start) * size
        yield Piece(piece.file, offset, (stop - begin) * size, first)
        first, begin, index = first + stop - begin, stop, index + 1
