"""How tensor-parallel ranks share a tensor: geometry, rules, notes in files from strangers."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from ort_zero.checkpoint.deepspeed import splits
from ort_zero.checkpoint.deepspeed.compare_values import is_constant, same_values
from ort_zero.checkpoint.deepspeed.splits import (
    Block,
    Rule,
    Split,
    SplitNotes,
    first_rows,
    joined,
    model_sizes,
    parse_rules,
    replicated,
    split_along,
    split_by_sizes,
)
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.pieces import check_cover
from ort_zero.checkpoint.records import MASTER, Piece, Tensor
from ort_zero.errors import CheckpointError


class Files:
    """Parts of tensors in files, each cut into pieces at random places."""

    def __init__(self, root: Path):
        self.folder = open_folder(str(root))
        self._root = root
        self._random = random.Random(4)
        self._count = 0

    def part(self, value: np.ndarray) -> Tensor:
        """Return the tensor of `value`, in one file to three."""
        flat = np.ascontiguousarray(value).reshape(-1)
        cuts = sorted({0, flat.size, *(self._random.randrange(flat.size + 1) for _ in range(2))})
        pieces = []
        for start, stop in zip(cuts, cuts[1:]):
            self._count += 1
            name, gap = f"{self._count}.bin", self._random.randrange(9)
            (self._root / name).write_bytes(bytes(gap) + flat[start:stop].tobytes())
            pieces.append(Piece(name, gap, (stop - start) * value.itemsize, start))
        code = {"float32": "F32", "float16": "F16", "uint16": "BF16"}[str(value.dtype)]
        return Tensor(name="t", kind=MASTER, dtype=code, shape=value.shape, pieces=tuple(pieces))

    def read(self, tensor: Tensor) -> np.ndarray:
        """Return the values of a tensor."""
        assert check_cover(tensor) is None, check_cover(tensor)
        data = b"".join(self.folder.read(p.file, p.offset, p.length) for p in tensor.pieces)
        return np.frombuffer(data, np.float32).reshape(tensor.shape)


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "dim", "fused"), [
    ((12,), 0, 1), ((12, 5), 0, 1), ((5, 12), 1, 1), ((3, 24, 2), 1, 2), ((24, 3), 0, 2), ((36, 1), 0, 3),
    ((2, 3, 12), 2, 1),
])  # fmt: skip
def test_parts_are_put_together(files, shape, dim, fused, ranks):
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    cut = [np.array_split(each, ranks, dim) for each in np.split(whole, fused, dim)]
    parts = [np.concatenate([each[rank] for each in cut], dim) for rank in range(ranks)]
    tensors = [files.part(part) for part in parts]
    made = joined(tensors, Rule("*", dim, fused).split([part.shape for part in parts]))
    assert made.shape == shape and np.array_equal(files.read(made), whole)
    assert np.array_equal(files.read(first_rows(made, 1)), whole[:1])


def test_uneven_parts_and_a_rank_without_any(files):
    whole = np.arange(7 * 3, dtype=np.float32).reshape(7, 3)
    parts = [whole[:4], whole[4:4], whole[4:]]
    made = joined([files.part(part) for part in parts], split_along([part.shape for part in parts], 0))
    assert np.array_equal(files.read(made), whole)


@pytest.mark.parametrize(("split", "reason"), [
    (lambda: split_along([(4, 2), (4, 3)], 0), "differ in more than dimension 0"),
    (lambda: split_along([(4,), (4,)], 1), "no dimension 1"),
    (lambda: split_along([(4,), (4,)], 0, [[2, 2], [2, 1]]), "rank 1's part is 4 wide, not 3"),
    (lambda: replicated([(4,), (3,)]), "the ranks have the shapes"),
    (lambda: Rule("*", 0, 3).split([(4, 2), (4, 2)]), "not 3 fused"),
])  # fmt: skip
def test_parts_that_do_not_fit(split, reason):
    with pytest.raises(ValueError, match=reason):
        split()


def block(rank: int, shape: tuple, whole: tuple, part: tuple) -> Block:
    return Block(
        rank=rank, shape=shape, whole_offset=whole[0], whole_strides=whole[1], part_offset=part[0], part_strides=part[1]
    )


HUGE = 1 << 60


@pytest.mark.parametrize("blocks", [
    [block(0, (HUGE,), (0, (1,)), (0, (0,)))],  # repeats one element
    [block(0, (4,), (0, (1,)), (9, (1,)))],  # behind the part
    [block(0, (2,), (0, (1,)), (0, (1,)))],  # fewer than the whole
    [block(0, (4,), (0, (0,)), (0, (1,)))],  # all to one place
    [block(0, (4,), (1 << 70, (1,)), (0, (1,)))],  # behind the whole
])  # fmt: skip
def test_a_map_of_a_stranger_is_refused_at_once(files, blocks):
    part = files.part(np.arange(4, dtype=np.float32))
    shape = (blocks[0].shape[0] if blocks[0].shape[0] > 4 else 4,)
    try:
        made = joined([part], Split(shape, tuple(blocks)))
    except ValueError:
        return
    assert check_cover(made) is not None


def test_many_pieces_are_found_again_when_they_are_used(files, monkeypatch):
    monkeypatch.setattr(splits, "MAX_PIECES_KEPT", 10)
    whole = np.arange(40 * 6, dtype=np.float32).reshape(40, 6)
    parts = [files.part(whole[:, :4]), files.part(whole[:, 4:])]
    made = [joined(parts, split_along([(40, 4), (40, 2)], 1)) for _ in range(splits.TENSORS_KEPT + 2)]
    for tensor in (*made, *made):
        assert np.array_equal(files.read(tensor), whole) and tensor.pieces[0].start == 0
    again = pickle.loads(pickle.dumps(made[0]))  # as ranks exchange it
    assert tuple(again.pieces) == tuple(made[1].pieces) and len(pickle.dumps(made[0])) < 4000


# ---- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", "a=", "=0", "a=-1", "a=0/0", "a=00", "a=1.5", "a=True", "a=0/99999"])
def test_rules_that_cannot_be_understood(text):
    with pytest.raises(CheckpointError, match="--tp-split"):
        parse_rules([text])


@pytest.mark.parametrize("content", ["[1]", "{", '{"a": true}', '{"a": [0]}', '{"a": null}', "[" * 100_000, "\ud800"])
def test_files_of_rules_that_cannot_be_understood(tmp_path, content):
    path = tmp_path / "rules.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match="--tp-split"):
        parse_rules([str(path)])


def test_what_is_no_file_of_rules(tmp_path):
    with pytest.raises(CheckpointError, match="neither a rule nor a file"):
        parse_rules([str(tmp_path)])
    (tmp_path / "large").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="at most"):
        parse_rules([str(tmp_path / "large")])


AFFINE = {
    "logical_shape": [4],
    "ranks": {
        0: {"shard_shape": [2], "pieces": [{"shape": [2], "source": [0, [1]], "dest": [0, [1]], "locations": [0]}]},
        1: {"shard_shape": [2], "pieces": [{"shape": [2], "source": [2, [1]], "dest": [0, [1]], "locations": [1]}]},
    },
}


def affine(**changes) -> dict:
    return {"affine_map": {"version": 1, "params": {"^w$": {**json.loads(json.dumps(AFFINE)), **changes}}}}


def test_a_map_of_deepspeed(files):
    split = SplitNotes(affine()).split("w", [(2,), (2,)])
    parts = [np.array(v, np.float32) for v in ([1, 2], [3, 4])]
    assert files.read(joined([files.part(p) for p in parts], split)).tolist() == [1, 2, 3, 4]
    assert SplitNotes(affine()).split("v", [(2,), (2,)]) is None and SplitNotes("x").split("w", [(2,)]) is None


@pytest.mark.parametrize("changes", [
    {"logical_shape": None}, {"logical_shape": [-4]}, {"logical_shape": [True]}, {"ranks": []}, {"ranks": {"x": {}}},
    {"ranks": {"0": AFFINE["ranks"][0]}}, {"ranks": {"0": {"shard_shape": [3], "pieces": []}, "1": {}}},
    {"ranks": {**AFFINE["ranks"], 1: {"shard_shape": [2], "pieces": [{"shape": [2], "source": 1, "dest": 2}]}}},
    {"ranks": {**AFFINE["ranks"], 1: {"shard_shape": [2], "pieces": [
        {"shape": [2], "source": [2, [1]], "dest": [0, [1]], "locations": [1], "scale": 0.5}]}}},
    {"ranks": {**AFFINE["ranks"], 1: {"shard_shape": [2], "pieces": [
        {"shape": [2], "source": [2, [1, 1]], "dest": [0, [1]], "locations": [1]}]}}},
])  # fmt: skip
def test_a_damaged_map_of_deepspeed(changes):
    with pytest.raises(ValueError, match="map|scaled"):
        SplitNotes(affine(**changes)).split("w", [(2,), (2,)])


@pytest.mark.parametrize(("entry", "widths", "reason"), [
    ({"patterns": ["w"], "shape": [2, -1], "partition_dim": 9}, {}, "cannot be read"),
    ({"patterns": ["w"], "shape": "x", "partition_dim": 0}, {}, "cannot be read"),
    ({"patterns": ["w"], "shape": [[3, 3], -1], "partition_dim": 0}, {}, "how wide each is"),
    ({"patterns": ["w"], "shape": [1 << 60, -1], "partition_dim": 0}, {}, "how wide each is"),
    ({"patterns": ["w"], "shape": [["x"], -1], "partition_dim": 0}, {}, "how wide each is"),
    ({"patterns": ["w"], "shape": [[4, 4], -1], "partition_dim": 0}, {"w": [[4], [4]]}, "another number of ranks"),
    ({"patterns": ["w"], "shape": [[4, 4], -1], "partition_dim": 0}, {"w": [[1, 2], [1, 2]]}, "wide, not"),
])  # fmt: skip
def test_damaged_notes_of_fused_tensors(entry, widths, reason):
    notes = SplitNotes({"parameter_with_sub_params": [entry], "sub_param_shard_widths": widths})
    with pytest.raises(ValueError, match=reason):
        notes.split("w", [(4, 3), (4, 3)])


def test_notes_of_fused_tensors_without_widths(files):
    notes = SplitNotes({"parameter_with_sub_params": [{"patterns": ["w"], "shape": [2, -1], "partition_dim": 0}]})
    whole = np.arange(8, dtype=np.float32)
    parts = [np.concatenate([whole[:4][2 * r : 2 * r + 2], whole[4:][2 * r : 2 * r + 2]]) for r in (0, 1)]
    made = joined([files.part(p.reshape(4, 1)) for p in parts], notes.split("w", [(4, 1), (4, 1)]))
    assert files.read(made).reshape(-1).tolist() == whole.tolist()


def test_sizes_of_a_model_tell_a_split_only_where_one_dimension_fits():
    sizes = model_sizes({"hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2})
    assert sizes == {8, 24, 4}
    assert split_by_sizes("up.weight", [(12, 8)] * 2, sizes).shape == (24, 8)
    assert split_by_sizes("down.weight", [(8, 12)] * 2, sizes).shape == (8, 24)
    assert split_by_sizes("o.weight", [(8, 4)] * 2, sizes) is None  # 8 x 4 may be a whole one
    assert split_by_sizes("gate_up_proj.weight", [(12, 8)] * 2, sizes) is None  # its order is not known
    assert split_by_sizes("x", [(5, 8)] * 2, sizes) is None and split_by_sizes("x", [(12, 8)] * 2, frozenset()) is None
    assert model_sizes([]) == frozenset() and model_sizes({"hidden_size": "8", "text_config": {"d_model": 3}}) == {3}


# ---- values ---------------------------------------------------------------------------------------------------------


def test_values_are_compared_across_dtypes(files):
    masters = np.array([1.0, 1.00390625, -2.5, 3.1415927, 65504.0, np.nan], np.float32)
    bf16 = np.array([0x3F80, 0x3F80, 0xC020, 0x4049, 0x4780, 0x7FC0], np.uint16)
    one = files.part(masters)
    for equal in (masters.copy(), masters.astype(np.float16), bf16):
        assert same_values(files.folder, one, files.part(equal))
    other = bf16.copy()
    other[2] += 1
    for different in (other, masters[:5]):
        assert not same_values(files.folder, one, files.part(different))
    assert is_constant(files.folder, files.part(np.ones((3, 5), np.float32))) and not is_constant(files.folder, one)
