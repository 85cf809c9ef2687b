"""The manifest: what is written is read back, runs are the pieces they stand for, and what is wrong is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import sign
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, verify
from ort_zero.checkpoint.files.storage import LocalFolder, open_folder
from ort_zero.checkpoint.finding import find, find_source
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.pieces import overlaps
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, ReadRequest
from ort_zero.checkpoint.records import File, Optimizer, ParamGroup, Piece, Source, Tensor
from ort_zero.checkpoint.saves.checkpoint_writer import Shard, ShardEntry, joined, write_rank_files
from ort_zero.errors import CheckpointError, CorruptCheckpointError

CHECKS = [bytes(8), bytes([1] * 8)]
TENSORS = (
    Tensor(
        name="w",
        kind="master",
        dtype="F32",
        shape=(5, 3),
        pieces=(Piece("a.safetensors", 8, 32, 0, CHECKS[0]), Piece("b.safetensors", 8, 28, 8, CHECKS[1])),
    ),
    Tensor(name="none", kind="weight", dtype="BF16", shape=(0, 4), pieces=()),
)
SOURCE = Source(
    format="ort_zero", root="root", tag="t", step=3, world_size=2, zero_stage=2, dtype="BF16", run_id="r", save_id="s",
    tensors=TENSORS, files={f"{n}.safetensors": File(name=f"{n}.safetensors", size=64, xxh3_128=n * 32) for n in "ab"},
    optimizer=Optimizer(
        class_name="AdamW", groups=(ParamGroup(names=("w",), options={"lr": 0.1}),), scalars={"step": {"w": 3.0}}
    ),
    aliases={"v": "w"}, frozen=frozenset(), config={"config.json": "{}"},
)  # fmt: skip


def edited(change) -> bytes:
    table = json.loads(manifest.dump(SOURCE, {}))
    change(table)
    del table["xxh3_128"]
    return sign(json.dumps(table))


def piece(number: int, place: int, value: Any):
    return lambda table: table["tensors"][0]["pieces"][number].__setitem__(place, value)


def test_round_trip():
    assert manifest.parse(manifest.dump(SOURCE, {"torch": "2"}), "root") == SOURCE


def test_every_changed_bit_is_noticed():
    data = manifest.dump(SOURCE, {})
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        try:
            same = manifest.parse(bytes(changed), "root") == SOURCE
        except CheckpointError:
            continue
        assert same, position  # white space after the digest


FORBIDDEN_CONFIGS = ("/../../../../home/u/.bashrc", "../config.json", "model.safetensors", "pytorch_model.bin",
                     "modeling_x.py", "a/config.json", "", "..", ".spm")  # fmt: skip
WRONG = [
    (lambda t: t["files"][0].update(size=-1), "wrong at files.0.size"),
    (lambda t: t.pop("world_size"), "wrong at world_size"),
    (lambda t: t["tensors"][0].update(shape=[1 << 80]), "wrong at tensors.0.shape"),
    (lambda t: t["tensors"][0].update(shape=[1] * 100), "wrong at tensors.0.shape"),
    (lambda t: t.update(step=1e300), "wrong at step"),
    (lambda t: t["tensors"][0]["pieces"][0].append(1), "wrong at tensors.0.pieces"),
    (lambda t: t["tensors"][0]["pieces"][0].pop(), "wrong at tensors.0.pieces"),
    (lambda t: t["tensors"][0]["pieces"].pop(0), "elements 0 to 8 are in no file"),
    (lambda t: t["tensors"][0]["pieces"].pop(1), "the pieces hold 8 elements, .* has 15"),
    (piece(1, 1, 60), "lies outside b.safetensors"),
    (piece(0, 1, 1 << 62), "lies outside a.safetensors"),
    (piece(1, 0, 9), "malformed .*in no file that is listed"),
    (piece(1, 1, "x"), "malformed .*0 or more"),
    (piece(0, 1, 8.0), "malformed .*0 or more"),
    (piece(0, 1, True), "malformed .*0 or more"),
    (piece(0, 0, -1), "malformed .*0 or more"),
    (piece(0, 4, "../x"), "malformed .*must be base64"),
    (piece(0, 4, 7), "malformed .*must be base64"),
    (piece(0, 5, 2), "malformed .*take 16 bytes, not 8"),
    (piece(0, 5, 1 << 62), "malformed .*take .* bytes, not 8"),
    (piece(0, 5, 0), "malformed .*1 or more"),
    (piece(0, 6, True), "malformed .*1 or more"),
    (piece(0, 2, 6), "not a multiple of 4"),
    (lambda t: t["tensors"].extend({**t["tensors"][0], "name": f"copy{i}"} for i in range(3)),
     "the tensors claim 128 bytes of a.safetensors, which has 64"),
    *[
        (lambda t, name=name: t["config"].update({name: "x"}), "wrong at config.*is no name of a configuration")
        for name in FORBIDDEN_CONFIGS
    ],
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_values_are_named(number):
    change, message = WRONG[number]
    with pytest.raises(CorruptCheckpointError, match=f"path/manifest.json.*{message}"):
        manifest.parse(edited(change), "path")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": "other"}', b"\xff\xfe", b'{"a": ' + b"[" * 200_000])
def test_what_is_no_manifest_says_so(data):
    with pytest.raises(CorruptCheckpointError, match="m/manifest.json is not a manifest of ort_zero"):
        manifest.parse(data, "m")


@pytest.mark.parametrize("name", ["manifest.json", "latest"])
def test_files_that_are_far_too_large_are_refused_before_they_are_read(tmp_path, name):
    (tmp_path / "latest").write_text("step1")
    (tmp_path / "step1").mkdir()
    with open(tmp_path / ("step1" if name == "manifest.json" else "") / name, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptCheckpointError, match=f"{name} has 1099511627776 bytes, more than"):
        manifest.read(find(str(tmp_path)).folder)


# -- runs -------------------------------------------------------------------------------------------------------------

RANKS = 24
SHAPES = {"a.weight": (48, 30), "a.bias": (31,), "b.weight": (7, 11), "few": (3,), "none": (0, 4)}
"""Sizes that 24 ranks can share equally, that leave a shorter part, and that leave some ranks without any."""
KINDS = ("master", "exp_avg", "exp_avg_sq")


def values(kind: str, name: str) -> torch.Tensor:
    count = torch.Size(SHAPES[name]).numel()
    return torch.arange(count, dtype=torch.float32) + 1000 * KINDS.index(kind) + 10_000 * list(SHAPES).index(name)


def shard_of(rank: int) -> Shard:
    entries: dict[str, list[ShardEntry]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for name in SHAPES:
            whole = values(kind, name)
            part = -(-len(whole) // RANKS)
            low, high = min(rank * part, len(whole)), min((rank + 1) * part, len(whole))
            if low < high:
                entries[kind].append(ShardEntry(name=name, kind=kind, start=low, tensor=whole[low:high]))
    moments = entries["exp_avg"] + entries["exp_avg_sq"]
    return Shard(weights=entries["master"], moments=moments, extra={}, extra_tensors=[], scalars={})


@pytest.fixture(scope="module")
def tag(tmp_path_factory) -> Path:
    """The folder of a checkpoint of 24 ranks."""
    path = tmp_path_factory.mktemp("runs") / "t"
    folder = open_folder(path)
    folder.make()
    about = Source(
        format="ort_zero", root=folder.url, tag="t", step=3, world_size=0, zero_stage=3, tensors=(), files={},
        aliases={}, frozen=frozenset({"none"}), dtype="F32", run_id="r", save_id="5" * 16,
        optimizer=Optimizer(class_name="AdamW", groups=(), scalars={}),
    )  # fmt: skip
    packed = []
    for rank in range(RANKS):
        names: list[str] = []
        part = write_rank_files(folder, about, shard_of(rank), rank, RANKS, names)
        for name in names:
            folder.publish(name, about.save_id)
        packed.append(part.packed())
    folder.write(manifest.NAME, manifest.dump(joined(folder, about, SHAPES, packed, all_here=True), {}), about.save_id)
    return path


def test_pieces_that_lie_alike_are_one_row_that_every_command_reads(tag, tmp_path):
    (weight,) = [tensor for tensor in find_source(str(tag)).tensors if tensor.name == "a.weight"][:1]
    # headers of ranks with shorter or fewer parts are shorter, so that their tensors lie elsewhere
    assert len(weight.pieces) == RANKS and max(run.pieces for run in weight.pieces.runs) >= 12
    assert verify(str(tag), progress=False).problems == ()
    aggregate(tag, tmp_path / "out", what="weights+optimizer", progress=False)
    model = load_file(tmp_path / "out" / "model.safetensors")
    moments = load_file(tmp_path / "out" / "optimizer.safetensors")
    for name, shape in SHAPES.items():
        assert torch.equal(model[name], values("master", name).view(shape))
        for kind in KINDS[1:]:
            assert name == "none" or torch.equal(moments[f"{kind}/{name}"], values(kind, name).view(shape))


@pytest.mark.parametrize("block", [16, LocalFolder.block])
def test_any_range_is_read_from_the_pieces_that_hold_it(tag, monkeypatch, block):
    monkeypatch.setattr(LocalFolder, "block", block)
    source = find_source(str(tag))
    reader = CheckedReader(open_folder(tag), source.files)
    for tensor in source.tensors:
        whole = values("master" if tensor.kind == "weight" else tensor.kind, tensor.name)
        cuts = sorted({0, min(1, len(whole)), len(whole) // 3, len(whole) // 2, max(0, len(whole) - 1), len(whole)})
        for low, high in pairwise(cuts):
            target = torch.zeros(high - low)
            assert sum(count for _, _, count in overlaps(tensor, low, high - low)) == high - low
            reader.read([ReadRequest(tensor, target, low)])
            assert torch.equal(target, whole[low:high]), (tensor.name, low, high)
