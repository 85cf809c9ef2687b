"""Decide how tensor-parallel ranks share a tensor, and join the ranks' parts.

A split is a set of blocks of elements. User's rules, DeepSpeed's notes or the sizes in the configuration tell it.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ort_zero.checkpoint.files.dtypes import itemsize
from ort_zero.checkpoint.pieces import LazyPieces
from ort_zero.checkpoint.records import Piece, Shape, Tensor
from ort_zero.checkpoint.restricted_pickle.values import OpaqueObject
from ort_zero.errors import CheckpointError

MAX_PIECES_KEPT = 10_000
"""Maximum number of pieces of a tensor that stay in memory for its whole lifetime."""
TENSORS_KEPT = 32
"""Number of recently used tensors with more pieces that stay in memory; more than the number of working threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A box of elements of the whole tensor that one rank holds."""

    rank: int
    shape: Shape
    whole_offset: int
    """Index of the block's first element in the flattened whole tensor."""
    whole_strides: Shape
    """Distance of neighbours along each axis in the whole tensor, in elements."""
    part_offset: int
    """Index of the block's first element in the rank's flattened part."""
    part_strides: Shape

    @property
    def elements(self) -> int:
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

    shape: Shape
    blocks: tuple[Block, ...]
    replicated: tuple[tuple[Block, Block], ...] = ()
    """Pairs of blocks of two ranks with the same elements; the second block of a pair is not in `blocks`."""


def split_along(shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]] | None = None) -> Split:
    """Return the split of a tensor whose parts are concatenated along one dimension; ValueError if they do not fit.

    `widths` are of several fused tensors: the width of each on each rank along `dim`, in elements.
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


def replicated(shapes: Sequence[Shape]) -> Split:
    """Return the split of a tensor that is whole on every rank; raise ValueError if the shapes differ."""
    if len(set(shapes)) != 1:
        raise ValueError(f"the ranks have the shapes {[list(s) for s in shapes]}")
    strides = row_major(shapes[0])
    copies = [
        Block(rank=n, shape=shapes[0], whole_offset=0, whole_strides=strides, part_offset=0, part_strides=strides)
        for n in range(len(shapes))
    ]
    return Split(shapes[0], (copies[0],), tuple((copies[0], other) for other in copies[1:]))


def joined(parts: Sequence[Tensor], split: Split) -> Tensor:
    """Return the whole tensor, joined from the ranks' parts; raise ValueError if the split does not fit them."""
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


def row_major(shape: Sequence[int]) -> Shape:
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


Shapes = Sequence[Shape]
SYNTAX = 'PATTERN=DIM, PATTERN=DIM/FUSED or PATTERN=replicated, for example "*.o_proj.weight=1", "*.qkv.weight=0/3"'
_RULE = re.compile(r"(?P<dim>\d)(?:/(?P<fused>[1-9]\d{0,3}))?|(?P<replicated>replicated)")
_MAX_FILE_BYTES = 1 << 20
_FUSED = re.compile(r"qkv|query_key_value|c_attn|gate_up|w_?pack|in_proj|kv_proj|dense_h_to_4h", re.IGNORECASE)
"""Matches names of projections that are often fused: their shape does not tell the order of the fused tensors."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A user's rule on how the ranks share the tensors with matching names."""

    pattern: str
    dim: int | None
    """Dimension along which the ranks' parts are concatenated; None if every rank has the whole tensor."""
    fused: int = 1
    """Number of equal tensors that are fused into one along `dim`; each of them is split over the ranks."""

    def split(self, shapes: Shapes) -> Split:
        """Return the split of a tensor with parts of these shapes; raise ValueError if the rule does not fit."""
        if self.dim is None:
            return replicated(shapes)
        widths = None
        if self.fused > 1:
            if any(len(s) <= self.dim or s[self.dim] % self.fused for s in shapes):
                raise ValueError(f"parts of the shapes {[list(s) for s in shapes]} are not {self.fused} fused tensors")
            widths = [[shape[self.dim] // self.fused for shape in shapes]] * self.fused
        return split_along(shapes, self.dim, widths)


def parse_rules(texts: Sequence[str]) -> tuple[Rule, ...]:
    """Return the rules of ``--tp-split``: each text is one rule, or a JSON file of rules.

    A file holds an object: {"*.o_proj.weight": 1, "*.qkv.weight": "0/3", "*.norm.weight": "replicated"}. The first
    rule that matches counts.
    """
    rules = []
    for text in texts:
        pattern, separator, split = text.rpartition("=")
        pairs = {pattern: split} if separator else _rules_in_file(text)
        for name, value in pairs.items():
            match = _RULE.fullmatch(str(value).strip())
            if not name or match is None or isinstance(value, bool):
                raise CheckpointError(f"--tp-split: {name!r}: {value!r} is no rule; write {SYNTAX}")
            dim = None if match["replicated"] else int(match["dim"])
            rules.append(Rule(name.strip(), dim, int(match["fused"] or 1)))
    return tuple(rules)


def _rules_in_file(path: str) -> dict[str, Any]:
    try:
        if not os.path.isfile(path):
            raise CheckpointError(f"--tp-split {path!r} is neither a rule nor a file; write {SYNTAX}")
        if os.path.getsize(path) > _MAX_FILE_BYTES:
            raise CheckpointError(f"--tp-split {path}: a file of rules has at most {_MAX_FILE_BYTES} bytes")
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"--tp-split {path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"--tp-split {path} must hold an object with a rule for each pattern of names")
    return value


def rule_for(rules: Sequence[Rule], name: str) -> Rule | None:
    return next((rule for rule in rules if fnmatch.fnmatchcase(name, rule.pattern)), None)


# ---- notes of DeepSpeed ---------------------------------------------------------------------------------------------


class SplitNotes:
    """DeepSpeed's notes in a checkpoint on how its tensors are split (``universal_checkpoint_info``)."""

    def __init__(self, info: Any):
        self._info: Mapping[str, Any] = info if isinstance(info, dict) else {}

    def split(self, name: str, shapes: Shapes) -> Split | None:
        """Return the split of a tensor, None if the notes do not name it; raise ValueError if they do not fit."""
        reasons = self._table("autotp_unsupported_parameter_patterns", self._info)
        reason = _first(reasons, name)
        if reason is not None:
            raise ValueError(f"DeepSpeed cannot tell how it is split: {reasons[reason]}")
        params = self._table("params", self._table("affine_map", self._info))
        pattern = _first(params, name)
        if pattern is not None:
            return _affine(params[pattern], shapes)
        if self._matches("tp_replicated_parameter_patterns", name):
            return replicated(shapes)
        if self._matches("parameter_to_average_patterns", name):
            return replicated(shapes)  # the ranks' values must be equal, since no file has their average
        if self._matches("parameter_with_2_sub_params_cat_dim_0", name):
            return Rule(name, 0, 2).split(shapes)
        fused = self._fused(name, shapes)
        if fused is not None:
            return fused
        if self._matches("parameter_with_row_parallelism_patterns", name):
            return split_along(shapes, 1)
        return None

    def splits_others_along_0(self) -> bool:
        """Return True if, by these notes, all tensors without a note are split along dimension 0."""
        return bool(self._info.get("parameter_with_row_parallelism_patterns"))

    def rows_of_vocabulary(self, name: str) -> int | None:
        """Return the number of rows without padding of a tensor over the vocabulary; None for other tensors."""
        rows = self._info.get("original_vocab_size")
        if isinstance(rows, int) and rows > 0 and self._matches("vocabulary_parameter_patterns", name):
            return rows
        return None

    @staticmethod
    def _table(key: str, info: Mapping[str, Any]) -> Mapping[str, Any]:
        value = info.get(key)
        return value if isinstance(value, dict) else {}

    def _matches(self, key: str, name: str) -> bool:
        return _first(self._info.get(key), name) is not None

    def _fused(self, name: str, shapes: Shapes) -> Split | None:
        entries = self._info.get("parameter_with_sub_params")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, OpaqueObject):
                entry = entry.state
            if not isinstance(entry, dict):
                continue
            pattern = _first(entry.get("patterns"), name)
            if pattern is None:
                continue
            dim, shape = entry.get("partition_dim"), entry.get("shape")
            widths = self._info.get("sub_param_shard_widths")
            rows = widths.get(pattern) if isinstance(widths, dict) else None
            if not isinstance(dim, int) or not isinstance(shape, (list, tuple)) or not 0 <= dim < len(shape):
                raise ValueError("the note of its fused tensors cannot be read")
            if rows is None:
                total = sum(s[dim] if dim < len(s) else 0 for s in shapes)
                spec = shape[dim]
                if isinstance(spec, int) and 0 < spec <= total:  # the number of fused tensors of equal width
                    spec = [total // spec] * spec
                sizes = spec if isinstance(spec, (list, tuple)) else ()
                whole = bool(sizes) and all(type(size) is int and size % len(shapes) == 0 for size in sizes)
                if not whole or sum(sizes) != total:
                    raise ValueError("the note of its fused tensors does not say how wide each is on each rank")
                rows = [[size // len(shapes)] * len(shapes) for size in sizes]
            if not all(isinstance(row, (list, tuple)) and len(row) == len(shapes) for row in rows):
                raise ValueError("the note of its fused tensors is of another number of ranks")
            return split_along(shapes, dim, rows)
        return None


def _first(patterns: Any, name: str) -> str | None:
    """Return the first regular expression that matches the beginning of a name, as DeepSpeed matches them."""
    for pattern in patterns if isinstance(patterns, (list, tuple, dict)) else ():
        if isinstance(pattern, str) and _matches(pattern, name):
            return pattern
    return None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _affine(entry: Any, shapes: Shapes) -> Split:
    try:
        whole = tuple(_number(n) for n in entry["logical_shape"])
        by_rank = {str(rank): value for rank, value in entry["ranks"].items()}
        if set(by_rank) != {str(rank) for rank in range(len(shapes))}:
            raise ValueError(f"its map is of the ranks {sorted(by_rank)}, the files are of {len(shapes)}")
        first: dict[tuple, Block] = {}
        blocks, same = [], []
        for rank in range(len(shapes)):
            if tuple(by_rank[str(rank)]["shard_shape"]) != tuple(shapes[rank]):
                raise ValueError(f"its map gives rank {rank} the shape {list(by_rank[str(rank)]['shard_shape'])}")
            for piece in by_rank[str(rank)]["pieces"]:
                if piece.get("scale", 1.0) != 1.0:
                    raise ValueError("its parts are scaled")
                block = _block(rank, piece)
                place = (block.shape, block.whole_offset, block.whole_strides)
                if place in first and len(piece["locations"]) > 1:
                    same.append((first[place], block))
                elif block.elements:
                    first[place] = block
                    blocks.append(block)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"its map cannot be read ({type(error).__name__}: {error})") from None
    return Split(whole, tuple(blocks), tuple(same))


def _block(rank: int, piece: Mapping[str, Any]) -> Block:
    (whole_offset, whole_strides), (part_offset, part_strides) = piece["source"], piece["dest"]
    shape = tuple(_number(n) for n in piece["shape"])
    if not len(shape) == len(whole_strides) == len(part_strides):
        raise ValueError("its map has strides of another number of dimensions")
    return Block(
        rank=rank,
        shape=shape,
        whole_offset=_number(whole_offset),
        whole_strides=tuple(_number(n) for n in whole_strides),
        part_offset=_number(part_offset),
        part_strides=tuple(_number(n) for n in part_strides),
    )


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"its map holds {value!r} where a number is needed")
    return value


# ---- sizes in the model's configuration -----------------------------------------------------------------------------


def model_sizes(config: Any) -> frozenset[int]:
    """Return the sizes of dimensions of a model's weights, in elements, that its ``config.json`` tells."""
    if not isinstance(config, dict):
        return frozenset()
    config = {**config, **(config["text_config"] if isinstance(config.get("text_config"), dict) else {})}

    def size(*keys: str) -> int:
        return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), 0)

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "num_heads")
    head = size("head_dim") or (hidden // heads if heads else 0)
    sizes = {
        hidden,
        size("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
        size("vocab_size"),
        size("max_position_embeddings", "n_positions"),
        heads * head,
        size("num_key_value_heads") * head,
    }
    return frozenset(sizes - {0})


def split_by_sizes(name: str, shapes: Shapes, sizes: frozenset[int]) -> Split | None:
    """Return the only split after which all dimensions are in `sizes`; None if no split or several splits fit."""
    if len(set(shapes)) != 1 or _FUSED.search(name) or not sizes:
        return None
    shape, ranks = shapes[0], len(shapes)
    whole = [tuple(n * ranks if at == dim else n for at, n in enumerate(shape)) for dim in range(len(shape))]
    dims = [dim for dim, one in enumerate(whole) if all(n in sizes for n in one)]
    if len(dims) != 1 or all(n in sizes for n in shape):
        return None
    return split_along(shapes, dims[0])
