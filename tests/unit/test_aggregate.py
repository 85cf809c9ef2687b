"""Aggregation: the bytes that come out, what is refused, and what is left after a failure."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_files
import pytest
import torch
from checkpoint_files import SAVED_ELSEWHERE, some_tensors, write
from damage import flipped
from safetensors import safe_open
from safetensors.torch import load_file

from ort_zero.checkpoint.aggregation import streaming
from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.files import storage
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.reads import checked_reads
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT, File, Piece, Tensor
from ort_zero.cli.main import main
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError, CorruptCheckpointError

WEIGHTS = {name: value for (kind, name), value in some_tensors().items() if kind in SAVED_ELSEWHERE}


@pytest.fixture
def shards(tmp_path):
    """A folder with a checkpoint, apart from where tests write."""
    write(tmp_path / "run" / "global_step7")
    (tmp_path / "run" / "latest").write_text("global_step7")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Makes tensors of the tests span several windows, and files several jobs."""
    monkeypatch.setattr(streaming, "CHUNK", 64)
    monkeypatch.setattr(streaming, "_MIN_JOB", 64)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[n].dtype == wanted[n].dtype and found[n].shape == wanted[n].shape
        and checkpoint_files.raw(found[n]) == checkpoint_files.raw(wanted[n])
        for n in wanted
    )  # fmt: skip


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path)) if path.exists() else []


def test_one_file_has_every_weight_bit_for_bit(shards, tmp_path):
    report = aggregate(shards, tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), WEIGHTS)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "emb.weight"}
    assert names(tmp_path / "out") == ["config.json", "model.safetensors"]
    assert report.tag == "global_step7" and report.step == 7 and report.verified and not report.warnings
    assert report.files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert report.tensors == len(WEIGHTS) and report.parameters == 13 * 7 + 45 + 5 + 1 + 33


def test_only_the_bytes_of_weights_are_read(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(checked_reads, "_MAX_GAP", 0)
    report = aggregate(shards, tmp_path / "out")
    assert report.bytes_read == sum(len(checkpoint_files.raw(value)) for value in WEIGHTS.values())


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_with_an_index_and_the_optimizer(shards, tmp_path, workers):
    out = tmp_path / "out"
    report = aggregate(shards, out, what="weights+optimizer", max_shard_size=300, workers=workers)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(WEIGHTS)
    found = {}
    for name in set(index["weight_map"].values()):
        found.update(load_file(out / name))
    assert same(found, WEIGHTS)
    index = json.loads((out / "optimizer.safetensors.index.json").read_text())
    moments = {}
    for name in set(index["weight_map"].values()):
        moments.update(load_file(out / name))
    assert same(moments, {f"{k}/{n}": v for (k, n), v in some_tensors().items() if k.startswith("exp_avg")})
    assert json.loads((out / "optimizer.json").read_text())["scalars"]["step"]["a.bias"] == 7.0
    assert set(report.files) == set(names(out))
    assert all((out / name).stat().st_size == size for name, size in report.files.items())


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_an_optimizer_before_its_first_step_has_a_file_without_tensors(tmp_path, format):
    write(tmp_path / "c", {(MASTER, "w"): torch.ones(3), (BUFFER, "b"): torch.ones(0, 2)})
    aggregate(tmp_path / "c", tmp_path / "out", what="weights+optimizer", format=format)
    assert load_file(tmp_path / "out" / "optimizer.safetensors") == {}


@pytest.mark.parametrize("choice", ["fp32", "fp16", "bf16"])
def test_dtype_is_a_cast_of_floats_only(shards, tmp_path, choice):
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[choice]
    aggregate(shards, tmp_path / "out", dtype=choice)
    wanted = {n: v.to(dtype) if v.is_floating_point() else v for n, v in WEIGHTS.items()}
    assert same(load_file(tmp_path / "out" / "model.safetensors"), wanted)


@pytest.mark.parametrize("limit", ["5GB", 300])
def test_torch_format_ties_aliases(shards, tmp_path, limit):
    out = tmp_path / "out"
    report = aggregate(shards, out, format="torch", max_shard_size=limit, what="weights+optimizer")
    found = {}
    for path in sorted(out.glob("pytorch_model*.bin")):
        found.update(torch.load(path, weights_only=True))
    assert found["head.weight"].data_ptr() == found["emb.weight"].data_ptr()
    assert same(found, {**WEIGHTS, "head.weight": WEIGHTS["emb.weight"]})
    assert set(report.files) == set(names(out)) and any(n.startswith("optimizer") for n in names(out))
    assert all((out / name).stat().st_size == size for name, size in report.files.items())
    assert (out / "pytorch_model.bin.index.json").exists() == (limit == 300)


def test_a_tensor_that_is_not_row_major_is_written_row_major(tmp_path):
    whole = torch.randn(40, 6)
    write(tmp_path / "c", {(MASTER, "w"): whole.clone()}, ranks=1)
    (tmp_path / "c" / "rank_00000_master.safetensors").unlink()
    data = b"xxxx" + checkpoint_files.raw(whole)
    (tmp_path / "c" / "f").write_bytes(data)
    piece = Piece("f", 4, len(data) - 4, 0)
    tensor = Tensor(name="w", kind=MASTER, dtype="F32", shape=(6, 40), strides=(1, 6), pieces=(piece,))
    plan = _plan_of(tensor)
    for dtype in ("keep", "bf16"):
        plan = _plan_of(tensor, dtype)
        _stream(tmp_path, plan, {"f": File(name="f", size=len(data))})
        found = load_file(tmp_path / "out" / ".model.safetensors.t.partial")
        open_folder(tmp_path / "out").discard("model.safetensors", "t")
        assert same(found, {"w": whole.T.contiguous().to(torch.float32 if dtype == "keep" else torch.bfloat16)})


def _plan_of(tensor: Tensor, dtype: str = "keep"):
    from ort_zero.checkpoint.aggregation.aggregation_plan import make_plan
    from ort_zero.checkpoint.records import Source

    source = Source(format="x", root="c", tag="t", step=None, world_size=1, zero_stage=0, tensors=(tensor,), files={},
                    aliases={}, frozen=frozenset(), optimizer=None)  # fmt: skip
    return make_plan(source, dtype=dtype)


def _stream(tmp_path, plan, files) -> streaming.Streamer:
    out = open_folder(tmp_path / "out")
    out.make()
    streamer = streaming.Streamer(open_folder(tmp_path / "c"), files, out, "t")
    streamer.write(plan.files, 1)
    return streamer


@pytest.mark.parametrize("damage", [None, 4, 80, 415])
def test_records_are_checked_without_reading_a_byte_twice(tmp_path, damage):
    import zlib

    data = bytearray(torch.arange(104, dtype=torch.int32).numpy().tobytes())
    files = {"f": File(name="f", size=416, records=((0, 16, zlib.crc32(data[:16])), (16, 400, zlib.crc32(data[16:]))))}
    pieces = (Piece("f", 0, 16, 0), Piece("f", 32, 80, 4), Piece("f", 120, 200, 24))
    tensor = Tensor(name="w", kind=MASTER, dtype="I32", shape=(74,), pieces=pieces)
    if damage is not None:
        data[damage] ^= 1
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "f").write_bytes(data)
    parts = _stream(tmp_path, _plan_of(tensor), files).parts
    read = sum(part.length for part in parts)
    assert 296 <= read <= 416 and {part.record for part in parts} == {0, 16}
    source = open_folder(tmp_path / "c")

    def check(more=()):
        for record in files["f"].records:
            checked_reads.check_record(
                source, files["f"], record, [p for p in [*parts, *more] if p.record == record[0]]
            )

    if damage is None:
        check()
        assert source.bytes_read == 416 - read
        check(more=[parts[0], parts[-1]._replace(offset=parts[-1].offset + 4)])  # overlaps change nothing
    else:
        with pytest.raises(CorruptCheckpointError, match="f is damaged: bytes .* CRC-32"):
            check()


@pytest.mark.parametrize("rank", range(3))
def test_a_flipped_bit_names_file_and_parameter(shards, tmp_path, rank):
    path = shards / "global_step7" / f"rank_{rank:05d}_master.safetensors"
    flipped(path.name, -1)(path.parent)
    with pytest.raises(CorruptCheckpointError, match=f"{path.name} is damaged: the bytes of .* of "):
        aggregate(shards, tmp_path / "out")
    assert names(tmp_path / "out") == []
    assert main(["aggregate", str(shards), str(tmp_path / "out")]) == 1
    aggregate(shards, tmp_path / "out", verify=False)


def test_a_missing_or_short_shard_is_named(shards, tmp_path):
    path = shards / "global_step7" / "rank_00002_master.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptCheckpointError, match="rank_00002_master.safetensors is truncated"):
        aggregate(shards, tmp_path / "out")
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match="rank_00002_master.safetensors is missing"):
        aggregate(shards, tmp_path / "out")
    assert names(tmp_path / "out") == []


def test_objects_that_are_missing_or_short_are_damage():
    folder = open_folder("memory://short")
    folder.write("x", b"0123456789", "t")
    with pytest.raises(CorruptCheckpointError, match="short/x is truncated: it ends at byte 10, bytes up to 12 are"):
        folder.read("x", 8, 4)
    with pytest.raises(CorruptCheckpointError, match="short/y is missing"):
        folder.read("y", 0, 1)


class FailingStream:
    """A stream of which one write fails, counted over the writes of all streams."""

    def __init__(self, stream: Any, calls: Iterator[int], number: int, error: BaseException):
        self._stream, self._calls, self._number, self._error = stream, calls, number, error

    def write(self, data: Any) -> Any:
        if next(self._calls) == self._number:
            raise self._error
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def fail_a_write(monkeypatch, kind: type[Folder], error: BaseException, number: int) -> Iterator[int]:
    """Let a write into a file of weights fail, as the system or the store reports it; return the counter of writes."""
    calls = itertools.count()

    def failing(method):
        @contextlib.contextmanager
        def opened(self, name, *args, **options):
            with method(self, name, *args, **options) as stream:
                yield FailingStream(stream, calls, number, error) if "model" in name else stream

        return opened

    for name in ("writing", "writing_from"):
        monkeypatch.setattr(kind, name, failing(getattr(kind, name)))
    return calls


def _raises(error: BaseException):
    def fail(*args, **kwargs):
        raise error

    return fail


def test_a_destination_that_is_not_empty_is_refused_unless_overwritten(shards, tmp_path):
    out = tmp_path / "out"
    aggregate(shards, out, max_shard_size=300, what="weights+optimizer")
    (out / "notes.txt").write_text("mine")
    before = names(out)
    with pytest.raises(CheckpointError, match="is not empty .*--overwrite"):
        aggregate(shards, out)
    assert names(out) == before
    aggregate(shards, out, overwrite=True)
    assert names(out) == ["config.json", "model.safetensors", "notes.txt"]
    (out / "adapter_model.safetensors").write_text("mine")
    before = names(out)
    with pytest.raises(CheckpointError, match="another model, model.safetensors, which could be loaded in place"):
        aggregate(shards, out, overwrite=True, format="torch")
    assert names(out) == before
    (out / "model.safetensors").unlink()
    aggregate(shards, out, overwrite=True, format="torch", max_shard_size=200)
    aggregate(shards, out, overwrite=True, format="torch", max_shard_size=300)
    table = json.loads((out / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert set(names(out)) == {"adapter_model.safetensors", "config.json", "notes.txt", "pytorch_model.bin.index.json",
                               *table.values()}  # fmt: skip


@pytest.mark.parametrize("step", ["write", "publish", "remove"])
def test_no_mixture_of_two_outputs_loads_wherever_publishing_ends(tmp_path, monkeypatch, step):
    old, new, out = tmp_path / "old", tmp_path / "new", tmp_path / "out"
    values = {name: {(MASTER, f"w{i}"): torch.full((50,), value + i) for i in range(4)} for name, value in
              (("old", 0.0), ("new", 100.0))}  # fmt: skip
    write(old, values["old"], config={})
    write(new, values["new"], config={})
    aggregate(old, out, max_shard_size=400)
    original, left = getattr(LocalFolder, step), 0

    def failing(self, *args, **kwargs):
        nonlocal left
        if self.url == str(out):
            left -= 1
            if left < 0:
                raise CheckpointError("gone")
        return original(self, *args, **kwargs)

    ends = set()
    monkeypatch.setattr(LocalFolder, step, failing)
    for moment in range(6):
        left = moment
        with contextlib.suppress(CheckpointError):
            aggregate(new if moment % 2 == 0 else old, out, max_shard_size=400, overwrite=True)
        if not (out / "model.safetensors.index.json").exists():
            continue  # nothing loads
        table = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
        loaded = {key: load_file(out / name)[key] for key, name in table.items()}
        found = [name for name, own in values.items() if same(loaded, {key: value for (_, key), value in own.items()})]
        assert len(found) == 1, (moment, table)
        ends |= set(found)
    assert "old" in ends
    left = 99
    aggregate(new, out, max_shard_size=400, overwrite=True)
    assert len(names(out)) == 3 and (out / "model-00001-of-00002.safetensors").exists()


def test_another_checkpoint_is_no_destination(shards):
    write(shards / "global_step8")
    before = names(shards / "global_step8")
    with pytest.raises(CheckpointError, match="global_step8 is itself a checkpoint"):
        aggregate(shards, shards / "global_step8", overwrite=True)
    assert names(shards / "global_step8") == before


@pytest.mark.parametrize("inner", [".", "deeper/out"])
def test_a_destination_in_the_checkpoint_is_refused(shards, inner):
    with pytest.raises(CheckpointError, match="lies in the checkpoint"):
        aggregate(shards, shards / "global_step7" / inner, overwrite=True)


def test_the_destination_may_be_the_folder_of_checkpoints(shards):
    aggregate(shards, shards, overwrite=True)
    assert names(shards) == ["config.json", "global_step7", "latest", "model.safetensors"]


@pytest.mark.parametrize("place", ["file", "/proc/nowhere"])
def test_a_destination_that_cannot_be_written_is_named(shards, tmp_path, capsys, place):
    (tmp_path / "file").write_text("x")
    assert main(["aggregate", str(shards), str(tmp_path / place)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(tmp_path / place) in err and "cannot" in err


@pytest.mark.parametrize("number", [0, 2])
def test_a_full_disk_is_named_and_leaves_nothing(shards, tmp_path, monkeypatch, capsys, number):
    fail_a_write(monkeypatch, LocalFolder, OSError(28, "No space left on device"), number)
    assert main(["aggregate", str(shards), str(tmp_path / "out")]) == 2
    assert "out/model.safetensors: No space left on device" in capsys.readouterr().err
    assert names(tmp_path / "out") == []


def test_a_source_that_cannot_be_read_is_named(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(storage.os, "preadv", _raises(OSError(5, "Input/output error")))
    monkeypatch.setattr("ort_zero.checkpoint.format.manifest.read", lambda folder: _manifest(folder))
    with pytest.raises(CheckpointError, match="cannot read .*_master.safetensors: Input/output error"):
        aggregate(shards, tmp_path / "out", tag="global_step7")


def _manifest(folder):
    from ort_zero.checkpoint.format import manifest

    return manifest.parse(Path(folder.path(manifest.NAME)).read_bytes(), folder.url)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("moment", ["streaming", "main thread"])
def test_an_interrupt_leaves_what_was_there(shards, tmp_path, monkeypatch, format, moment):
    out = tmp_path / "out"
    aggregate(shards, out, max_shard_size=400, format=format)
    before = {name: (out / name).read_bytes() for name in names(out)}
    if moment == "streaming":
        fail_a_write(monkeypatch, LocalFolder, KeyboardInterrupt(), 5)
    else:
        monkeypatch.setattr(streaming, "wait", _raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        aggregate(shards, out, max_shard_size=200, overwrite=True, format=format)
    assert {name: (out / name).read_bytes() for name in names(out)} == before


def test_dry_run_writes_nothing_and_says_what_it_would(shards, tmp_path):
    plan = aggregate(shards, tmp_path / "out", dry_run=True, max_shard_size=300)
    assert not (tmp_path / "out").exists() and plan.bytes_read == 0 and plan.dry_run and not plan.verified
    done = aggregate(shards, tmp_path / "out", max_shard_size=300)
    assert plan.files == done.files and plan.bytes == done.bytes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_values_that_are_not_finite_are_named(tmp_path, value, dtype):
    tensors = some_tensors()
    tensors[MASTER, "a.weight"].view(-1)[31] = value
    tensors[WEIGHT, "ice.weight"][2, 5] = value
    tensors["exp_avg", "a.bias"][0] = value
    write(tmp_path / "c", tensors)
    report = aggregate(tmp_path / "c", tmp_path / "out", dtype=dtype)
    assert report.warnings == ("NaN or inf in a.weight, ice.weight",)
    with pytest.raises(CheckpointError, match="NaN or inf in a.weight, ice.weight; refused by --strict"):
        aggregate(tmp_path / "c", tmp_path / "strict", dtype=dtype, strict=True)
    assert names(tmp_path / "strict") == []


def test_large_values_are_fine_unless_the_dtype_cannot_hold_them(tmp_path):
    write(tmp_path / "c", {(MASTER, "w"): torch.full((8,), 3e38), (MASTER, "v"): torch.ones(3)})
    assert aggregate(tmp_path / "c", tmp_path / "keep").warnings == ()
    report = aggregate(tmp_path / "c", tmp_path / "half", dtype="fp16")
    assert report.warnings == ("values too large for the dtype became inf in w",)


def test_a_name_clash_is_refused(tmp_path):
    write(tmp_path / "c", {(MASTER, "w"): torch.ones(3), (BUFFER, "w"): torch.ones(3)})
    with pytest.raises(CheckpointError, match="name clash in .*: a parameter and a buffer are named 'w'"):
        aggregate(tmp_path / "c", tmp_path / "out")


@pytest.mark.parametrize(("choice", "name"), [("keep", "float32"), ("bf16", "bfloat16")])
def test_config_names_the_dtype_that_was_written(tmp_path, choice, name):
    """transformers loads in the dtype of config.json: one that says otherwise would change the weights."""
    write(tmp_path / "src", config={"config.json": json.dumps({"torch_dtype": "float16", "hidden_size": 7})})
    aggregate(tmp_path / "src", tmp_path / "out", dtype=choice)
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert table == {"hidden_size": 7, "dtype": name}


def test_config_files_are_found_beside_the_checkpoint_and_in_the_folder_of_its_run(tmp_path):
    run = tmp_path / "checkpoint-7"
    write(run / "global_step7", config={})
    report = aggregate(run, tmp_path / "none", tag="global_step7")
    assert "config.json" in report.warnings[0] and names(tmp_path / "none") == ["model.safetensors"]
    for folder in (tmp_path, run):
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "in": folder.name}))
        (folder / "tokenizer.json").write_text(json.dumps({"model": folder.name}))
        (folder / "source.spm").write_text("pieces")
    report = aggregate(run, tmp_path / "out", tag="global_step7")
    assert report.warnings == () and set(report.copied.values()) == {str(run)}
    assert report.copied.keys() == {"config.json", "tokenizer.json", "source.spm"}
    found = {n: json.loads((tmp_path / "out" / n).read_text()) for n in ("config.json", "tokenizer.json")}
    assert found == {
        "config.json": {"model_type": "gpt2", "in": run.name, "dtype": "float32"},
        "tokenizer.json": {"model": run.name},
    }


def test_files_of_other_programs_near_a_checkpoint_are_not_copied(tmp_path, capsys):
    """``config.json`` and ``vocab.txt`` are names that everybody uses; what lies above may hold a password."""
    step = tmp_path / "run" / "global_step7"
    write(step, config={})
    model = json.dumps({"model_type": "gpt2"})
    for folder, text in ((tmp_path, model), (tmp_path / "run", model), (step, json.dumps({"password": "x"}))):
        (folder / "config.json").write_text(text)
        (folder / "vocab.txt").write_text("secret")
    assert aggregate(step, tmp_path / "a").copied == {}, "the folder above belongs to nobody who is known"
    (tmp_path / "run" / "latest").write_text("global_step7")
    found = aggregate(step, tmp_path / "b").copied
    assert found == dict.fromkeys(("config.json", "vocab.txt"), str(tmp_path / "run"))
    assert main(["aggregate", str(step), str(tmp_path / "c")]) == 0
    assert f"copied from {tmp_path / 'run'}: config.json, vocab.txt" in capsys.readouterr().out


def test_the_command_reports_in_text_and_json(shards, tmp_path, capsys):
    assert main(["--local_rank=0", "aggregate", str(shards), str(tmp_path / "a"), "--dtype", "bf16"]) == 0
    text = capsys.readouterr().out
    assert "model.safetensors" in text and "GB/s" in text and "dtype bf16" in text and "source checked" in text
    assert main(["aggregate", str(shards), str(tmp_path / "b"), "--json", "--no-verify"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"].keys() == {"model.safetensors", "config.json"} and report["verified"] is False
    assert main(["aggregate", str(shards), str(tmp_path / "c"), "--dry-run"]) == 0
    assert "would write" in capsys.readouterr().out and not (tmp_path / "c").exists()


@pytest.mark.parametrize("wrong", [["--max-shard-size", "5XB"], ["--workers", "0"], ["--tag", "gone"]])
def test_bad_choices_are_status_2_and_one_line(shards, tmp_path, capsys, wrong):
    assert main(["aggregate", str(shards), str(tmp_path / "out"), *wrong]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not names(tmp_path / "out")


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16", "what": "weights+optimizer", "max_shard_size": "20MB"}])
def test_a_few_chunks_are_held_whatever_the_size(tmp_path, monkeypatch, options):
    monkeypatch.setattr(streaming, "CHUNK", 1 << 20)
    names = [f"t{i}" for i in range(8)]
    write(tmp_path / "c", {(kind, n): torch.ones(1 << 20) for n in names for kind in (MASTER, "exp_avg")})
    tracemalloc.start()
    try:
        aggregate(tmp_path / "c", tmp_path / "out", workers=2, **options)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_rank_zero_decides_and_a_failure_is_gathered(shards, tmp_path):
    class Watched(RankGroup):
        reports: list = []

        def gather(self, value):
            self.reports.append(value)
            return [value]

    ranks = Watched()
    with pytest.raises(CheckpointError):
        aggregate(shards, tmp_path / "out", dtype="fp8", ranks=ranks)
    assert "dtype is 'fp8'" in ranks.reports[-1]


@pytest.mark.parametrize("limit", ["5GB", 20_000])
@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_transformers_loads_the_model_without_a_word(tmp_path, kind, format, limit, monkeypatch):
    import transformers

    monkeypatch.setattr(streaming, "CHUNK", 8 << 20)
    torch.manual_seed(3)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=61, n_positions=8)
        )
    else:
        model = transformers.BertForMaskedLM(
            transformers.BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=61,
                                    intermediate_size=32, max_position_embeddings=8)
        )  # fmt: skip
    parameters = dict(model.named_parameters())
    owner = {id(p): n for n, p in parameters.items()}
    aliases = {n: owner[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if owner[id(p)] != n}
    assert aliases
    persistent = set(model.state_dict())
    tensors = {(MASTER, n): p.detach().clone() for n, p in parameters.items()}
    tensors |= {(BUFFER, n): b.clone() for n, b in model.named_buffers() if n in persistent}
    write(tmp_path / "c", tensors, aliases=aliases, config={"config.json": model.config.to_json_string()})
    aggregate(tmp_path / "c", tmp_path / "out", format=format, max_shard_size=limit)
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert same(loaded.state_dict(), model.state_dict())
    if format == "torch":  # transformers 5.0 ties none that a file has twice, as torch's own do
        (tmp_path / "plain").mkdir()
        model.config.save_pretrained(tmp_path / "plain")
        torch.save(model.state_dict(), tmp_path / "plain" / "pytorch_model.bin")
        plain = type(model).from_pretrained(tmp_path / "plain")
        ties = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    else:
        ties = True
    assert ties == (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight)
    base = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert same(dict(base.named_parameters()), {n: dict(model.base_model.named_parameters()).get(n, p)
                                                for n, p in base.named_parameters()})  # fmt: skip
