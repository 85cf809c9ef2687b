"""Turn the blocks of a sharded tensor into ranges of elements, and check that the blocks cover the tensor once.

The cuts of all blocks divide the tensor into cells, each of which belongs to one block. Nearly always each block is one
cell. The ranges are made when they are accessed: a matrix that is cut along its columns has one for each row and cell.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ort_zero.checkpoint.pieces import LazyPieces
from ort_zero.checkpoint.records import Piece, Shape
from ort_zero.errors import CorruptCheckpointError

_MAX_CELLS = 1 << 22
"""Maximum number of cells of a tensor, of 4 bytes of memory each."""


class Block(NamedTuple):
    """A block of a tensor, whose elements lie one after the other (row-major) in a file unless it has `strides`."""

    offsets: Shape
    sizes: Shape
    file: str
    offset: int
    """Bytes from the start of the file to the block's first element, or to the zip with it."""
    length: int = 0
    """Bytes of the zip."""
    strides: Shape | None = None
    record: tuple[int, int] | None = None
    """Length and CRC-32 of the zip's record with the block, if it has one."""


def shape_of(value: object) -> Shape:
    """Return sizes or offsets read from a file as a tuple; raise ValueError unless they are integers from 0 on."""
    if not isinstance(value, (list, tuple)) or any(type(n) is not int or n < 0 for n in value):
        raise ValueError(f"{value!r} is no shape"[:200])
    return tuple(value)


def pieces_of_blocks(shape: Shape, blocks: Iterable[Block], itemsize: int) -> Sequence[Piece]:
    """Return the ranges of elements of a tensor of `shape`, in the order of the elements."""
    filled = [block for block in blocks if math.prod(block.sizes)]
    for offsets, sizes, *_ in filled:
        has_axes = len(offsets) == len(sizes) == len(shape)
        if not has_axes or any(o + n > size for o, n, size in zip(offsets, sizes, shape)):
            raise CorruptCheckpointError(
                f"its shard of {list(sizes)} at {list(offsets)} lies outside of its shape {list(shape)}"
            )
    return _Cells(shape, filled, itemsize) if math.prod(shape) else ()


class _Cells(LazyPieces):
    """The contiguous ranges of elements of a tensor: the rows of its cells."""

    def __init__(self, shape: Shape, blocks: Sequence[Block], itemsize: int):
        if not shape:
            shape, blocks = (1,), [block._replace(offsets=(0,), sizes=(1,)) for block in blocks]
        self._shape, self._blocks, self._itemsize = shape, blocks, itemsize
        self._cuts = []
        for axis, size in enumerate(shape):
            starts = {block.offsets[axis] for block in blocks}
            ends = {block.offsets[axis] + block.sizes[axis] for block in blocks}
            self._cuts.append(sorted({0, size} | starts | ends))
        self._axis = max((axis for axis, cuts in enumerate(self._cuts) if len(cuts) > 2), default=0)
        """The last axis that is cut: the elements of a cell are together along the axes after it."""
        self._inner = math.prod(shape[self._axis + 1 :])
        self._parts = len(self._cuts[self._axis]) - 1
        self._owners = self._owners_of_cells()

    def _owners_of_cells(self) -> np.ndarray:
        """Return the index of each cell's block, by the cell's index along the axes that are cut."""
        counts = [len(cuts) - 1 for cuts in self._cuts[: self._axis + 1]]
        if math.prod(counts) > _MAX_CELLS:
            raise CorruptCheckpointError(
                f"its {len(self._blocks)} shards form no grid and cut it into {math.prod(counts)} parts"
            )
        owners, shards = np.zeros((2, *counts), np.int32)
        for number, (offsets, sizes, *_) in enumerate(self._blocks):
            ranges = zip(self._cuts, offsets, sizes[: owners.ndim])
            cells = tuple(slice(bisect_left(cuts, o), bisect_left(cuts, o + n)) for cuts, o, n in ranges)
            owners[cells] = number
            shards[cells] += 1
        if (shards != 1).any():
            cell = tuple(np.argwhere(shards != 1)[0])
            where = f"in two shards, one in {self._blocks[owners[cell]].file}" if shards[cell] else "in no shard"
            first = [cuts[number] for cuts, number in zip(self._cuts, cell)]
            start = self._inner * _flat_index(first, self._shape)
            end = start + self._inner * (self._cuts[self._axis][cell[-1] + 1] - first[-1])
            raise CorruptCheckpointError(f"its elements {start} to {end} are {where}")
        return owners

    def __len__(self) -> int:
        return math.prod(self._shape[: self._axis]) * self._parts

    def piece_at(self, index: int) -> Piece:
        row, part = divmod(index, self._parts)
        begin, end = self._cuts[self._axis][part : part + 2]
        first = [begin]
        for size in reversed(self._shape[: self._axis]):
            row, at = divmod(row, size)
            first.insert(0, at)
        cell = [bisect_right(cuts, at) - 1 for cuts, at in zip(self._cuts, first)]
        block = self._blocks[self._owners.item(*cell)]
        in_block = _flat_index([at - offset for at, offset in zip(first, block.offsets)], block.sizes)
        start = _flat_index(first, self._shape) * self._inner
        nbytes = self._inner * self._itemsize
        return Piece(block.file, block.offset + in_block * nbytes, (end - begin) * nbytes, start)


def _flat_index(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the index in the flattened array of `shape`; the array of the first axes, where `index` has fewer."""
    flat = 0
    for at, size in zip(index, shape):
        flat = flat * size + at
    return flat
