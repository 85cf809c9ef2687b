"""Aggregation: the bytes that come out, what is refused, and what is left after a failure."""

from __future__ import annotations

import contextlib
import json
import os
import random
import tracemalloc
from pathlib import Path

import checkpoint_files
import deepspeed_states
import pytest
import torch
from checkpoint_files import SAVED_ELSEWHERE, some_tensors, write
from damage import flipped
from file_limits import files_of_at_most
from safetensors import safe_open
from safetensors.torch import load_file

from ort_zero.checkpoint.aggregation import streaming
from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.aggregation.aggregation_plan import make_plan, split
from ort_zero.checkpoint.files import safetensors_header, storage
from ort_zero.checkpoint.files.storage import LocalFolder, open_folder
from ort_zero.checkpoint.reads import checked_reads
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT, Piece, Source, Tensor
from ort_zero.cli.main import main
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


def from_index(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the files that an index names."""
    table = json.loads(path.read_text())["weight_map"]
    found = {}
    for name in set(table.values()):
        found.update(load_file(path.parent / name))
    assert found.keys() == table.keys()
    return found


def test_shards_with_an_index_and_the_optimizer(shards, tmp_path):
    out = tmp_path / "out"
    report = aggregate(shards, out, what="weights+optimizer", max_shard_size=300, workers=3)
    assert same(from_index(out / "model.safetensors.index.json"), WEIGHTS)
    moments = {f"{k}/{n}": v for (k, n), v in some_tensors().items() if k.startswith("exp_avg")}
    assert same(from_index(out / "optimizer.safetensors.index.json"), moments)
    assert json.loads((out / "optimizer.json").read_text())["scalars"]["step"]["a.bias"] == 7.0
    assert report.files == {name: (out / name).stat().st_size for name in names(out)}


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
    assert report.files == {name: (out / name).stat().st_size for name in names(out)}
    assert (out / "pytorch_model.bin.index.json").exists() == (limit == 300)


def test_a_flipped_bit_names_file_and_parameter(shards, tmp_path):
    path = shards / "global_step7" / "rank_00001_master.safetensors"
    flipped(path.name, -1)(path.parent)
    with pytest.raises(CorruptCheckpointError, match=f"{path.name} is damaged: the bytes of .* of "):
        aggregate(shards, tmp_path / "out")
    assert names(tmp_path / "out") == []
    assert main(["aggregate", str(shards), str(tmp_path / "out")]) == 1
    aggregate(shards, tmp_path / "out", verify=False)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_byte_of_deepspeeds_files_is_checked_and_read_once(tmp_path, stage):
    values = deepspeed_states.write(tmp_path / "c", stage)
    report = aggregate(tmp_path / "c", tmp_path / "out")
    assert report.verified and report.bytes_read <= sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    last = checkpoint_files.raw(values["master/embed.weight"])[-32:]
    file = next(path for path in (tmp_path / "c").glob("*optim_states.pt") if last in path.read_bytes())
    flipped(file.name, last)(tmp_path / "c")
    with pytest.raises(CorruptCheckpointError, match=f"{file.name} is damaged: bytes .* CRC-32"):
        aggregate(tmp_path / "c", tmp_path / "damaged")
    assert names(tmp_path / "damaged") == []


def test_objects_that_are_missing_or_short_are_damage():
    folder = open_folder("memory://short")
    folder.write("x", b"0123456789", "t")
    with pytest.raises(CorruptCheckpointError, match="short/x is truncated: it ends at byte 10, bytes up to 12 are"):
        folder.read("x", 8, 4)
    with pytest.raises(CorruptCheckpointError, match="short/y is missing"):
        folder.read("y", 0, 1)


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
    out, index = tmp_path / "out", tmp_path / "out" / "model.safetensors.index.json"
    values = {name: {f"w{i}": torch.full((50,), start + i) for i in range(4)} for name, start in
              (("old", 0.0), ("new", 100.0))}  # fmt: skip
    for name, weights in values.items():
        write(tmp_path / name, {(MASTER, key): value for key, value in weights.items()}, config={})
    aggregate(tmp_path / "old", out, max_shard_size=400)
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
            aggregate(tmp_path / ("new", "old")[moment % 2], out, max_shard_size=400, overwrite=True)
        if index.exists():  # otherwise nothing loads
            loaded = from_index(index)
            (found,) = [name for name, weights in values.items() if same(loaded, weights)]
            ends.add(found)
    assert "old" in ends
    left = 99
    aggregate(tmp_path / "new", out, max_shard_size=400, overwrite=True)
    assert len(names(out)) == 3 and same(from_index(index), values["new"])


@pytest.mark.parametrize(("place", "reason"), [
    ("global_step7", "lies in the checkpoint"),
    ("global_step7/deeper/out", "lies in the checkpoint"),
    ("global_step8", "global_step8 is itself a checkpoint"),
])  # fmt: skip
def test_no_checkpoint_is_a_destination(shards, place, reason):
    write(shards / "global_step8")
    before = names(shards / "global_step7"), names(shards / "global_step8")
    with pytest.raises(CheckpointError, match=reason):
        aggregate(shards, shards / place, overwrite=True)
    assert (names(shards / "global_step7"), names(shards / "global_step8")) == before


def test_the_destination_may_be_the_folder_of_checkpoints(shards):
    aggregate(shards, shards, overwrite=True)
    assert names(shards) == ["config.json", "global_step7", "latest", "model.safetensors"]


@pytest.mark.parametrize("place", ["file", "/proc/nowhere"])
def test_a_destination_that_cannot_be_written_is_named(shards, tmp_path, capsys, place):
    (tmp_path / "file").write_text("x")
    assert main(["aggregate", str(shards), str(tmp_path / place)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(tmp_path / place) in err and "cannot" in err


def test_a_source_that_cannot_be_read_is_named(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(storage.os, "preadv", _raises(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="cannot read .*: Input/output error"):
        aggregate(shards, tmp_path / "out", tag="global_step7")


def test_a_full_disk_is_named_and_leaves_nothing(shards, tmp_path, capsys):
    with files_of_at_most(200):
        assert main(["aggregate", str(shards), str(tmp_path / "out")]) == 2
    assert "out/model.safetensors: File too large" in capsys.readouterr().err
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_an_interrupt_leaves_what_was_there(shards, tmp_path, monkeypatch, format):
    out = tmp_path / "out"
    aggregate(shards, out, max_shard_size=400, format=format)
    before = {name: (out / name).read_bytes() for name in names(out)}
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


@pytest.mark.parametrize(("choice", "name"), [("keep", "float32"), ("bf16", "bfloat16")])
def test_config_names_the_dtype_that_was_written(tmp_path, choice, name):
    """transformers loads in the dtype of config.json: one that says otherwise would change the weights."""
    write(tmp_path / "src", config={"config.json": json.dumps({"torch_dtype": "float16", "hidden_size": 7})})
    aggregate(tmp_path / "src", tmp_path / "out", dtype=choice)
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert table == {"hidden_size": 7, "dtype": name}


def test_files_of_other_programs_near_a_checkpoint_are_not_copied(tmp_path, capsys):
    """``config.json`` and ``vocab.txt`` are names that everybody uses; what lies above may hold a password."""
    step = tmp_path / "run" / "global_step7"
    write(step, config={})
    assert "config.json" in aggregate(step, tmp_path / "none").warnings[0]
    model = json.dumps({"model_type": "gpt2"})
    for folder, text in ((tmp_path, model), (tmp_path / "run", model), (step, json.dumps({"password": "x"}))):
        (folder / "config.json").write_text(text)
        (folder / "vocab.txt").write_text("secret")
    assert aggregate(step, tmp_path / "a").copied == {}, "the folder above belongs to nobody who is known"
    (tmp_path / "run" / "latest").write_text("global_step7")
    report = aggregate(step, tmp_path / "b")
    assert report.copied == dict.fromkeys(("config.json", "vocab.txt"), str(tmp_path / "run")) and not report.warnings
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


@pytest.mark.parametrize("limit", ["5GB", 20_000])
@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_transformers_loads_the_model_without_a_word(tmp_path, kind, format, limit, monkeypatch):
    import tiny_models
    import transformers

    monkeypatch.setattr(streaming, "CHUNK", 8 << 20)
    torch.manual_seed(3)
    model = getattr(tiny_models, kind)(words=61, hidden=16, layers=1)
    parameters = dict(model.named_parameters())
    owner = {id(p): n for n, p in parameters.items()}
    aliases = {n: owner[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if owner[id(p)] != n}
    assert aliases
    tensors = {(MASTER, n): p.detach().clone() for n, p in parameters.items()}
    tensors |= {(BUFFER, n): b.clone() for n, b in model.named_buffers() if n in model.state_dict()}
    write(tmp_path / "c", tensors, aliases=aliases, config={"config.json": model.config.to_json_string()})
    aggregate(tmp_path / "c", tmp_path / "out", format=format, max_shard_size=limit)
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert same(loaded.state_dict(), model.state_dict())
    ties = True
    if format == "torch":  # transformers 5.0 ties none that a file has twice, as torch's own do
        model.config.save_pretrained(tmp_path / "plain")
        torch.save(model.state_dict(), tmp_path / "plain" / "pytorch_model.bin")
        plain = type(model).from_pretrained(tmp_path / "plain")
        ties = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert ties == (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight)
    base = transformers.AutoModel.from_pretrained(tmp_path / "out").state_dict()
    own = model.base_model.state_dict()
    assert same({n: base[n] for n in own}, own)


# -- the plan ----------------------------------------------------------------------------------------------------------


def tensor(name: str, *shape: int, kind: str = MASTER, dtype: str = "F32") -> Tensor:
    whole = Tensor(name=name, kind=kind, dtype=dtype, shape=shape, pieces=())
    return Tensor(name=name, kind=kind, dtype=dtype, shape=shape, pieces=(Piece("f", 0, whole.nbytes, 0),))


def source(*tensors: Tensor, aliases: dict[str, str] | None = None) -> Source:
    return Source(
        format="ort_zero", root="/ckpt", tag="t", step=1, world_size=1, zero_stage=1, tensors=tensors, files={},
        aliases=aliases or {}, frozen=frozenset(), optimizer=None,
    )  # fmt: skip


def test_files_are_filled_in_order_and_a_large_tensor_has_its_own():
    plan = make_plan(source(*(tensor(n, k) for n, k in zip("abcde", (2, 2, 9, 1, 3)))), max_shard_size=16)
    assert [[e.name for e in f.entries] for f in plan.files] == [["a", "b"], ["c"], ["d", "e"]]
    assert [f.name for f in plan.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_a_master_is_taken_before_the_weight_of_its_name():
    plan = make_plan(source(tensor("a", 2, kind=WEIGHT, dtype="BF16"), tensor("a", 2)))
    assert [(e.name, e.dtype, e.tensor.kind) for e in plan.files[0].entries] == [("a", "F32", MASTER)]


def test_a_header_longer_than_the_library_reads_is_refused(monkeypatch):
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="too many tensors .*, choose a smaller --max-shard-size"):
        make_plan(source(tensor("a", 2), tensor("b", 2)))


@pytest.mark.parametrize(("what", "message"), [
    (source(tensor("a", 2), tensor("a", 3)), r"name clash in /ckpt: two tensors \(master\) are named 'a'"),
    (source(tensor("a", 2), tensor("a", 2, kind=BUFFER)), "a parameter and a buffer are named 'a'"),
    (source(tensor("a", 2), tensor("b", 2), aliases={"b": "a"}), "'b' is a tensor and an alias of 'a'"),
    (source(tensor("__metadata__", 2)), "no tensor may be named '__metadata__'"),
    (source(tensor("a", 2), aliases={"b": "gone"}), "'b' is tied to 'gone', which the checkpoint does not hold"),
    (source(tensor("a", 2, kind="exp_avg")), "holds no weights"),
])  # fmt: skip
def test_names_that_clash_or_lead_nowhere_are_refused(what, message):
    with pytest.raises(CheckpointError, match=message):
        make_plan(what)


@pytest.mark.parametrize("wrong", [{"what": "all"}, {"dtype": "fp8"}, {"format": "gguf"}])
def test_unknown_choices_are_named(wrong):
    (name,) = wrong
    with pytest.raises(CheckpointError, match=f"{name} is .*, choose from"):
        make_plan(source(tensor("a", 2)), **wrong)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_share_all_files_and_none_could_go_to_a_rank_that_writes_less(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([10, 300, 5000, draw.randint(1, 40_000)]) for _ in range(draw.randint(2, 30))]
    plan, ranks = make_plan(source(*(tensor(f"t{i}", n) for i, n in enumerate(sizes))), max_shard_size=4), seed % 5 + 1
    shares = [split(plan, rank, ranks) for rank in range(ranks)]
    assert sorted(f.name for share in shares for f in share) == [f.name for f in plan.files]
    loads = [sum(f.size for f in share) for share in shares]
    for share, written in zip(shares, loads):
        assert not share or written - min(f.size for f in share) <= min(loads)
