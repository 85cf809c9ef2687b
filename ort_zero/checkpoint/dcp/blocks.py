"""Turn the blocks of a sharded tensor into ranges of elements, and check that the blocks cover the tensor once.

Nearly always the blocks form a grid: each axis is cut into parts, and each combination of parts is one block. Then the
ranges are made when they are accessed: a matrix that is cut along its columns has one range for each row and block.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ort_zero.checkpoint.pieces import LazyPieces
from ort_zero.checkpoint.records import Piece, Shape

_MAX_RANGES = 1 << 20
"""Maximum number of ranges of a tensor whose blocks form no grid; about 150 bytes of memory each."""


class Block(NamedTuple):
    """A block of a tensor whose elements lie one after the other (row-major) in a file."""

    offsets: Shape
    sizes: Shape
    file: str
    offset: int
    """Bytes from the start of the file to the block's first element, or to the zip with it."""
    length: int = 0
    """Bytes of the zip."""


def pieces_of_blocks(shape: Shape, blocks: Iterable[Block], itemsize: int) -> Sequence[Piece]:
    """Return the ranges of elements of a tensor of `shape`, in the order of the elements."""
    filled = [block for block in blocks if math.prod(block.sizes)]
    for block in filled:
        if any(o + n > size for o, n, size in zip(block.offsets, block.sizes, shape)):
            raise ValueError(f"its shard {_range(block)} lies outside of its shape {list(shape)}")
    if not math.prod(shape):
        return ()
    grid = _Grid.of(shape, filled, itemsize)
    return grid if grid is not None else _ranges(shape, filled, itemsize)


class _Grid(LazyPieces):
    """The contiguous ranges of elements of a tensor whose blocks form a grid."""

    def __init__(self, shape: Shape, cuts: Sequence[Sequence[int]], blocks: Mapping[Shape, Block], itemsize: int):
        self._cuts, self._blocks, self._itemsize = cuts, blocks, itemsize
        self._axis = max((axis for axis, parts in enumerate(cuts) if len(parts) > 1), default=0)
        """The last axis that is cut: the elements of a block are together along the axes after it."""
        self._shape = shape
        self._inner = math.prod(shape[self._axis + 1 :])
        self._parts = len(cuts[self._axis]) if cuts else 1

    @classmethod
    def of(cls, shape: Shape, blocks: Sequence[Block], itemsize: int) -> _Grid | None:
        """Return the grid that `blocks` form, None if they form none."""
        cuts = [sorted({block.offsets[axis] for block in blocks}) for axis in range(len(shape))]
        by_offsets = {block.offsets: block for block in blocks}
        if not blocks or len(by_offsets) != len(blocks) or len(blocks) != math.prod(map(len, cuts)):
            return None
        for offsets, block in by_offsets.items():
            for axis, start in enumerate(offsets):
                after = bisect_right(cuts[axis], start)
                if start + block.sizes[axis] != (cuts[axis][after] if after < len(cuts[axis]) else shape[axis]):
                    return None
        return cls(shape, cuts, by_offsets, itemsize) if all(cut[0] == 0 for cut in cuts) else None

    def __len__(self) -> int:
        return math.prod(self._shape[: self._axis]) * self._parts

    def piece_at(self, index: int) -> Piece:
        if not self._shape:
            block = self._blocks[()]
            return Piece(block.file, block.offset, self._itemsize, 0)
        row, part = divmod(index, self._parts)
        first = [*_index_of(row, self._shape[: self._axis]), self._cuts[self._axis][part]]
        cuts = [self._cuts[axis][bisect_right(self._cuts[axis], at) - 1] for axis, at in enumerate(first)]
        block = self._blocks[(*cuts, *(0 for _ in self._shape[len(cuts) :]))]
        row_of_block = 0
        for at, cut, size in zip(first[:-1], cuts, block.sizes):
            row_of_block = row_of_block * size + at - cut
        length = block.sizes[self._axis] * self._inner * self._itemsize
        start = (row * self._shape[self._axis] + first[-1]) * self._inner
        return Piece(block.file, block.offset + row_of_block * length, length, start)


def _index_of(number: int, shape: Sequence[int]) -> list[int]:
    index = []
    for size in reversed(shape):
        number, at = divmod(number, size)
        index.append(at)
    return index[::-1]


def _ranges(shape: Shape, blocks: Sequence[Block], itemsize: int) -> tuple[Piece, ...]:
    """Return the ranges of blocks that form no grid."""
    pieces: list[Piece] = []
    for block in blocks:
        axis = max((a for a, n in enumerate(shape) if block.sizes[a] != n), default=0)
        elements = math.prod(block.sizes[axis:])
        rows = itertools.product(*(range(o, o + n) for o, n in zip(block.offsets[:axis], block.sizes[:axis])))
        for number, row in enumerate(rows):
            at = 0
            for index, size in zip((*row, *block.offsets[axis:]), shape):
                at = at * size + index
            length = elements * itemsize
            pieces.append(Piece(block.file, block.offset + number * length, length, at))
        if len(pieces) > _MAX_RANGES:
            raise ValueError(f"its {len(blocks)} shards form no grid and have more than {_MAX_RANGES} ranges")
    pieces.sort(key=lambda piece: piece.start)
    position = 0
    for piece in pieces:
        if piece.start > position:
            raise ValueError(f"its elements {position} to {piece.start} are in no shard")
        if piece.start < position:
            raise ValueError(f"its elements {piece.start} to {position} are in two shards, one in {piece.file}")
        position += piece.length // itemsize
    if position < math.prod(shape):
        raise ValueError(f"its elements {position} to {math.prod(shape)} are in no shard")
    return tuple(pieces)


def _range(block: Block) -> str:
    return str([f"{o}:{o + n}" for o, n in zip(block.offsets, block.sizes)]).replace("'", "")
