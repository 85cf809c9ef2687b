"""Shards of torch's distributed checkpoints: blocks become ranges of elements, keys get their meaning. No torch."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ort_zero.checkpoint.dcp.blocks import Block, pieces_of_blocks
from ort_zero.checkpoint.dcp.names import OPTION, OTHER, STATE, WEIGHT, Meaning, meanings
from ort_zero.errors import CorruptCheckpointError


def block(tensor: np.ndarray, files: dict[str, bytes], begin: tuple[int, ...], end: tuple[int, ...]) -> Block:
    """Store a block of `tensor` in a file of its own, after some other bytes; return its record."""
    name = f"file{len(files)}"
    files[name] = b"\xff" * 7 + tensor[tuple(map(slice, begin, end))].tobytes()
    return Block(begin, tuple(e - b for b, e in zip(begin, end)), name, 7)


def grid(tensor: np.ndarray, files: dict[str, bytes], cuts: list[list[int]]) -> list[Block]:
    """Store the blocks between all cuts."""
    parts = [list(itertools.pairwise([0, *inner, size])) for inner, size in zip(cuts, tensor.shape)]
    return [block(tensor, files, *map(tuple, zip(*part))) if part else block(tensor, files, (), ())
            for part in itertools.product(*parts)]  # fmt: skip


def joined(tensor: np.ndarray, blocks: list[Block], files: dict[str, bytes]) -> np.ndarray:
    """Return the tensor that the pieces of the blocks make up."""
    flat = np.zeros(tensor.size, tensor.dtype)
    pieces = pieces_of_blocks(tensor.shape, blocks, tensor.itemsize)
    assert [piece.start for piece in pieces] == sorted(piece.start for piece in pieces)
    assert list(pieces) == [pieces[i] for i in range(len(pieces))] and pieces[:2] == tuple(pieces)[:2]
    for piece in pieces:
        values = np.frombuffer(files[piece.file][piece.offset : piece.offset + piece.length], tensor.dtype)
        flat[piece.start : piece.start + len(values)] = values
    return flat.reshape(tensor.shape)


@pytest.mark.parametrize(("shape", "cuts"), [
    ((), []), ((7,), [[]]), ((7,), [[3, 4]]), ((6, 5), [[2, 4], []]), ((6, 5), [[], [1, 4]]), ((6, 5), [[4], [2]]),
    ((3, 4, 5), [[1], [2], []]), ((3, 4, 5), [[], [1, 3], [4]]), ((2, 3, 4, 2), [[1], [], [1], []]),
    ((4, 0, 3), [[2], [], []]),
])  # fmt: skip
def test_a_grid_of_blocks_is_the_tensor(shape, cuts):
    tensor = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    files: dict[str, bytes] = {}
    blocks = grid(tensor, files, cuts)
    random.Random(0).shuffle(blocks)
    empty = Block(shape, (0,) * len(shape), "none", 0)  # as an uneven split leaves on the last ranks
    np.testing.assert_array_equal(joined(tensor, [*blocks, *([empty] if shape else [])], files), tensor)


def test_a_grid_makes_its_ranges_when_they_are_accessed():
    pieces = pieces_of_blocks((1 << 20, 8), [Block((0, 4 * i), (1 << 20, 4), f"{i}", 0) for i in (0, 1)], 4)
    assert len(pieces) == 1 << 21
    assert pieces[-1] == ("1", ((1 << 20) - 1) * 16, 16, (1 << 23) - 4, None)


def test_blocks_that_form_no_grid_are_the_tensor():
    tensor, files = np.arange(20, dtype=np.int32).reshape(4, 5), {}
    blocks = [
        block(tensor, files, (0, 0), (2, 3)),
        block(tensor, files, (0, 3), (4, 5)),
        block(tensor, files, (2, 0), (3, 3)),
        block(tensor, files, (3, 0), (4, 3)),
    ]
    np.testing.assert_array_equal(joined(tensor, blocks, files), tensor)


@pytest.mark.parametrize(("blocks", "says"), [
    ([((0, 0), (2, 3))], "elements 6 to 12 are in no shard"),
    ([((0, 0), (2, 3)), ((3, 0), (1, 3))], "elements 6 to 9 are in no shard"),
    ([((1, 0), (3, 3))], "elements 0 to 3 are in no shard"),
    ([((0, 0), (3, 3)), ((2, 0), (2, 3))], "elements 6 to 9 are in two shards, one in f"),
    ([((0, 0), (4, 3)), ((0, 0), (4, 3))], "in two shards"),
    ([((0, 0), (5, 3))], "outside of its shape"),
    ([], "elements 0 to 12 are in no shard"),
])  # fmt: skip
def test_holes_and_overlaps_are_named(blocks, says):
    with pytest.raises(CorruptCheckpointError, match=says):
        pieces_of_blocks((4, 3), [Block(offsets, sizes, "f", 0) for offsets, sizes in blocks], 4)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        # get_state_dict
        ([("model", "a.weight"), ("optim", "state", "a.weight", "exp_avg"), ("optim", "param_groups", 0, "lr")],
         [(WEIGHT, "a.weight"), (STATE, "a.weight", "exp_avg"), (OPTION, 0, "lr")]),
        # torch's recipe: one Stateful named app
        ([("app", "model", "a.weight"), ("app", "optim", "state", "a.weight", "step"), ("epoch",)],
         [(WEIGHT, "a.weight"), (STATE, "a.weight", "step"), (OTHER, "epoch")]),
        # torchtitan: weights on top, a flattened optimizer
        ([("a.weight",), ("optimizer", "state.a.weight.exp_avg"), ("optimizer.param_groups.a.weight.lr",),
          ("train_state",), ("dataloader.0",)],
         [(WEIGHT, "a.weight"), (STATE, "a.weight", "exp_avg"), (OPTION, "a.weight", "lr"), (OTHER, "train_state"),
          (OTHER, "dataloader.0")]),
        # Lightning, optimizer by number
        ([("state_dict", "net.a"), ("optimizer_0", "state", 3, "exp_avg")],
         [(WEIGHT, "net.a"), (STATE, 3, "exp_avg")]),
        # an optimizer under a key of its own
        ([("net_g", "a"), ("opt_g", "state", "a", "exp_avg"), ("opt_g", "param_groups", 0, "lr")],
         [(WEIGHT, "net_g.a"), (STATE, "a", "exp_avg"), (OPTION, 0, "lr")]),
        # Megatron
        ([("optimizer.state.exp_avg.a.weight",), ("a.b",)], [(STATE, "a.weight", "exp_avg"), (WEIGHT, "a.b")]),
        # wrappers, and DDP's prefix on every name
        ([("model", "module._orig_mod.a._fsdp_wrapped_module.weight"), ("model", "module.b")],
         [(WEIGHT, "a.weight"), (WEIGHT, "b")]),
        ([("model.embed.weight",), ("lm_head.weight",)], [(WEIGHT, "model.embed.weight"), (WEIGHT, "lm_head.weight")]),
    ],
)  # fmt: skip
def test_keys_have_their_meaning(paths, expected):
    assert [meaning._replace(optimizer="") for meaning in meanings(paths)] == [Meaning(*each) for each in expected]
