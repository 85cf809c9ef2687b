"""Pieces in runs are the pieces they stand for, on disk, in memory and to every reader."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.finding import open_checkpoint
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.piece_runs import PiecesByFile, check_cover, pieces_of
from ort_zero.checkpoint.reads.checked_reads import CheckedReader, ReadRequest, overlaps
from ort_zero.checkpoint.records import Source, Tensor
from ort_zero.checkpoint.saves.capture import Model, Shard
from ort_zero.checkpoint.saves.checkpoint_writer import SaveJob, manifest_of, write_rank_files
from ort_zero.checkpoint.saves.manifest_parts import pack
from ort_zero.checkpoint.saves.shard_writer import ShardEntry
from ort_zero.errors import CorruptCheckpointError

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
    extra = dict.fromkeys(("client_state", "lr_scheduler", "loss_scaler", "extra_state"), {})
    return Shard(
        weights=entries["master"],
        moments=entries["exp_avg"] + entries["exp_avg_sq"],
        extra={**extra, "counters": {"global_steps": 3}},
        extra_tensors=[],
        scalars={"step": dict.fromkeys(SHAPES, 3.0)},
    )


def write(path: Path) -> Path:
    """Write a checkpoint of 24 ranks, as they would; return its folder."""
    folder = open_folder(path).child("t")
    folder.make()
    packed = []
    for rank in range(RANKS):
        shard = shard_of(rank)
        model = Model(
            shapes=SHAPES, dtype="F32", aliases={}, frozen=["none"], left_out=[],
            optimizer_class="AdamW", groups=[], step=3,
            zero_stage=3,
        )  # fmt: skip
        job = SaveJob(
            path=str(path), tag="t", save_id="5" * 16, run_id="r", suffix="", save_latest=True, durable=False,
            model=model, shard=shard,
        )  # fmt: skip
        names: list[str] = []
        files, written = write_rank_files(folder, job, rank, RANKS, names)
        for name in names:
            folder.publish(name, job.save_id)
        packed.append(pack(files, written, shard.scalars))
    folder.write(manifest.NAME, manifest.dump(manifest_of(folder, job, packed, all_here=True)), job.save_id)
    return path / "t"


def written_out(tag: Path) -> None:
    """Rewrite the manifest with a row for each piece."""
    table = json.loads((tag / manifest.NAME).read_bytes())
    for entry in table["tensors"]:
        rows = []
        for row in entry["pieces"]:
            file, offset, length, start, checks, count, step = [*row, None, None][:7]
            if count is None:
                rows.append(row)
                continue
            data = base64.b64decode(checks)
            rows += [
                [file + i * step, offset, length, start + i * length // 4, data[8 * i : 8 * i + 8].hex()]
                for i in range(count)
            ]
        entry["pieces"] = rows
    save(tag, table)


def save(tag: Path, table: dict[str, Any]) -> None:
    """Write a manifest that was changed, with its digest made right again."""
    table.pop("xxh3_128", None)
    text = json.dumps(table)[:-1]
    digest = xxhash.xxh3_128(text.encode()).hexdigest()
    (tag / manifest.NAME).write_text(f'{text},\n"xxh3_128": "{digest}"\n}}')


@pytest.fixture(scope="module")
def tag(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copied(tag, tmp_path) -> Path:
    place = tmp_path / "t"
    place.mkdir()
    for file in tag.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def opened(tag: Path) -> Source:
    return open_checkpoint(str(tag))


def test_the_manifest_has_one_row_for_pieces_that_lie_alike(tag):
    table = json.loads((tag / manifest.NAME).read_bytes())
    assert table["version"] == 3
    rows = {(t["kind"], t["name"]): t["pieces"] for t in table["tensors"]}
    # headers of ranks with shorter or fewer parts are shorter, so that their tensors lie elsewhere
    assert all(max(row[5] for row in rows[kind, "a.weight"] if len(row) == 7) >= 12 for kind in KINDS)
    assert {len(row) for row in rows["master", "a.weight"]} == {5, 7}
    assert sum(row[5] if len(row) == 7 else 1 for row in rows["master", "a.weight"]) == RANKS


def test_it_reads_as_the_same_pieces_written_out(tag, copied):
    written_out(copied)
    runs, plain = opened(tag), opened(copied)
    assert runs.tensors == plain.tensors and plain.tensors == runs.tensors
    assert sum(len(t.pieces.runs) < len(t.pieces) for t in runs.tensors) >= 3
    assert all(len(t.pieces.runs) == len(t.pieces) for t in plain.tensors)
    files = [PiecesByFile(source.files.values(), source.tensors) for source in (runs, plain)]
    for name in runs.files:
        assert files[0].of(name) == files[1].of(name)
    assert sum(len(files[0].of(name)) for name in runs.files) == sum(len(t.pieces) for t in runs.tensors)


def test_every_command_reads_both(tag, copied, tmp_path):
    for folder in (tag, copied):
        assert verify(str(folder), progress=False).problems == ()
        aggregate(folder, tmp_path / f"out{folder is tag}", what="weights+optimizer", progress=False)
        model = load_file(tmp_path / f"out{folder is tag}" / "model.safetensors")
        moments = load_file(tmp_path / f"out{folder is tag}" / "optimizer.safetensors")
        for name, shape in SHAPES.items():
            assert torch.equal(model[name], values("master", name).view(shape))
            for kind in KINDS[1:]:
                assert name == "none" or torch.equal(moments[f"{kind}/{name}"], values(kind, name).view(shape))
        written_out(copied)


def test_any_range_is_read_from_the_pieces_that_hold_it(tag):
    source = opened(tag)
    reader = CheckedReader(open_folder(tag), source.files)
    for tensor in source.tensors:
        whole = values("master" if tensor.kind == "weight" else tensor.kind, tensor.name)
        cuts = sorted({0, min(1, len(whole)), len(whole) // 3, len(whole) // 2, max(0, len(whole) - 1), len(whole)})
        for low, high in pairwise(cuts):
            target = torch.zeros(high - low)
            request = ReadRequest(tensor=tensor, start=low, length=high - low, target=target)
            assert sum(count for _, _, count in overlaps(tensor, low, high - low)) == high - low
            reader.read([request])
            assert torch.equal(target, whole[low:high]), (tensor.name, low, high)


def test_a_changed_byte_is_named(copied):
    name = "rank_00020_master.safetensors"
    data = bytearray((copied / name).read_bytes())
    data[-1] ^= 1
    (copied / name).write_bytes(data)
    report = verify(str(copied), progress=False)
    assert len(report.problems) == 1 and name in report.problems[0] and "damaged" in report.problems[0]
    with pytest.raises(CorruptCheckpointError, match=name):
        aggregate(copied, copied.parent / "out", progress=False)


def run_of(table: dict[str, Any]) -> list[Any]:
    entry = next(t for t in table["tensors"] if t["kind"] == "master" and t["name"] == "a.weight")
    return max((row for row in entry["pieces"] if len(row) == 7), key=lambda row: row[5])


def more(text: str) -> str:
    return base64.b64encode(base64.b64decode(text) + bytes(8)).decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: run_of(t).__setitem__(5, run_of(t)[5] - 1), "take .* bytes, not"),
        (lambda t: run_of(t).__setitem__(5, 1 << 62), "take .* bytes, not"),
        (lambda t: run_of(t).__setitem__(5, 0), "1 or more"),
        (lambda t: run_of(t).__setitem__(6, 0), "1 or more"),
        (lambda t: run_of(t).__setitem__(6, 1 << 70), "in no file that is listed"),
        (lambda t: run_of(t).__setitem__(6, True), "1 or more"),
        (lambda t: run_of(t).__setitem__(2, 0), "1 or more"),
        (lambda t: run_of(t).__setitem__(2, 6), "not a multiple of 4"),
        (lambda t: run_of(t).__setitem__(4, "?"), "must be base64"),
        (lambda t: run_of(t).__setitem__(4, 7), "must be base64"),
        (lambda t: run_of(t).__setitem__(1, 1 << 40), "lies outside rank_000"),
        (lambda t: run_of(t).__setitem__(0, -1), "0 or more"),
        (lambda t: run_of(t).__setitem__(3, run_of(t)[3] + 1), "in no file|in two pieces"),
        (lambda t: run_of(t).append(1), "wrong at tensors"),
        (lambda t: run_of(t).pop(), "does not know"),
        (lambda t: run_of(t).__setitem__(slice(4, 6), [more(run_of(t)[4]), run_of(t)[5] + 1]), "in two pieces|hold"),
    ],
)
def test_a_row_that_was_edited_is_refused(copied, change, message):
    table = json.loads((copied / manifest.NAME).read_bytes())
    change(table)
    save(copied, table)
    with pytest.raises(CorruptCheckpointError, match=message):
        opened(copied)


def test_runs_cannot_claim_more_than_their_files_have(copied):
    table = json.loads((copied / manifest.NAME).read_bytes())
    entry = next(t for t in table["tensors"] if t["kind"] == "master" and t["name"] == "a.weight")
    table["tensors"] += [{**entry, "kind": f"copy_{number}"} for number in range(30)]
    save(copied, table)
    with pytest.raises(CorruptCheckpointError, match="the tensors claim"):
        opened(copied)


def test_a_manifest_that_this_version_does_not_know_says_so(copied):
    table = json.loads((copied / manifest.NAME).read_bytes())
    save(copied, {**table, "version": 4})
    with pytest.raises(Exception, match="format version 4"):
        opened(copied)


def test_pieces_are_a_sequence():
    checks = base64.b64encode(bytes(range(80))).decode()
    names = [f"f{number}" for number in range(40)]
    runs = pieces_of([[3, 64, 8, 0, checks, 10, 3], [1, 72, 4, 20, "f" * 16]], names, "F32")
    plain = tuple(runs)
    assert len(runs) == len(plain) == 11 and runs == plain and plain == runs and runs != plain[:-1]
    assert [runs[i] for i in range(-11, 11)] == [plain[i] for i in range(-11, 11)]
    assert runs[2:9:3] == plain[2:9:3] and runs[:] == plain
    assert plain[1].file == "f6" and plain[1].start == 2 and plain[1].check == bytes(range(8, 16)).hex()
    assert check_cover(Tensor(name="x", kind="master", dtype="F32", shape=(21,), pieces=runs)) is None
    for index in (11, -12):
        with pytest.raises(IndexError):
            runs[index]
