"""Decide how tensor-parallel ranks share a tensor: user's rules, DeepSpeed's notes, sizes in the configuration."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_zero.checkpoint.deepspeed.split_geometry import Block, Split, replicated, split_along
from ort_zero.checkpoint.restricted_pickle.values import OpaqueObject
from ort_zero.errors import CheckpointError

Shapes = Sequence[tuple[int, ...]]
"""Shape of each rank's part of one tensor."""
SYNTAX = 'PATTERN=DIM, PATTERN=DIM/FUSED or PATTERN=replicated, for example "*.o_proj.weight=1", "*.qkv.weight=0/3"'
"""Syntax of one rule of ``--tp-split``, for messages."""
_RULE = re.compile(r"(?P<dim>\d)(?:/(?P<fused>[1-9]\d{0,3}))?|(?P<replicated>replicated)")
_MAX_FILE_BYTES = 1 << 20
_FUSED = re.compile(r"qkv|query_key_value|c_attn|gate_up|w_?pack|in_proj|kv_proj|dense_h_to_4h", re.IGNORECASE)
"""Matches names of projections that are often fused: their shape does not tell the order of the fused tensors."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A user's rule on how the ranks share the tensors with matching names."""

    pattern: str
    """Shell pattern of the names."""
    dim: int | None
    """Dimension along which the ranks' parts are concatenated; None if every rank has the whole tensor."""
    fused: int = 1
    """Number of equal tensors that are fused into one along `dim`; each of them is split over the ranks."""

    def split(self, shapes: Shapes) -> Split:
        """Return the split of a tensor with parts of these shapes.

        Raises:
            ValueError: the rule does not fit the shapes.
        """
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
    """Return the first rule that matches a name."""
    return next((rule for rule in rules if fnmatch.fnmatchcase(name, rule.pattern)), None)


# ---- notes of DeepSpeed ---------------------------------------------------------------------------------------------


class SplitNotes:
    """DeepSpeed's notes in a checkpoint on how its tensors are split (``universal_checkpoint_info``).

    Args:
        info: the value in the file of module states; it is ignored unless it is a dictionary.
    """

    def __init__(self, info: Any):
        self._info: Mapping[str, Any] = info if isinstance(info, dict) else {}

    def __bool__(self) -> bool:
        return bool(self._info)

    def split(self, name: str, shapes: Shapes) -> Split | None:
        """Return the split of a tensor, None if the notes do not name it.

        Raises:
            ValueError: the notes do not fit the parts, or cannot be followed.
        """
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
        """Return the dictionary under a key; an empty one for anything else."""
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
    """Return the split that an entry of DeepSpeed's ``affine_map`` describes."""
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
