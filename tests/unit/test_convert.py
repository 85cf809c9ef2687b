"""Conversions between our format and DeepSpeed's, without ranks: every bit stays, and nothing is lost on the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_files
import deepspeed_states
import pytest
import torch
import torch.distributed.checkpoint
from damage import flipped
from deepspeed_checkpoints import assert_same as assert_tensors_same
from deepspeed_checkpoints import read

from ort_zero.checkpoint.conversions import converting
from ort_zero.checkpoint.conversions.conversion import Conversion
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.files.storage import LocalFolder, open_folder
from ort_zero.checkpoint.finding import find_source
from ort_zero.checkpoint.inspection.listing import list_checkpoints
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.records import MASTER, Optimizer, ParamGroup, Source
from ort_zero.cli.main import main
from ort_zero.errors import CheckpointError, CorruptCheckpointError

PEAKS = """
import sys, threading, time
from ort_zero.checkpoint.conversions.converting import convert
import deepspeed

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

peak = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
for to in ("ort_zero", "deepspeed", "universal"):
    for size in ("small", "large"):
        before = peak = anonymous()
        convert(f"{sys.argv[1]}/{size}/t", f"{sys.argv[1]}/{to}_{size}", to=to, stage=2, world_size=2, progress=False)
        print(peak - before)
"""
"""Prints by how many MiB the anonymous memory of the process grows in conversions of a small and a large checkpoint."""


def values_of(source: Source) -> dict[Any, torch.Tensor]:
    return {(t.kind, t.name): read(source, t) for t in source.tensors}


def assert_same(one: Source, other: Source) -> None:
    """Compare tensors bit by bit, and all that is known besides them."""
    assert_tensors_same(values_of(one), values_of(other))
    assert one.optimizer is not None and other.optimizer is not None
    assert one.optimizer.scalars == other.optimizer.scalars
    groups = [[(set(g.names), dict(g.options)) for g in s.optimizer.groups] for s in (one, other) if s.optimizer]
    assert groups[0] == groups[1]
    assert (one.aliases, one.step) == (other.aliases, other.step)


@pytest.fixture
def ours(tmp_path) -> Path:
    """A checkpoint of ours of three ranks, without what DeepSpeed's formats have no place for."""
    tensors = {k: v for k, v in checkpoint_files.some_tensors().items() if k[1] not in ("none", "bn.mask")}
    checkpoint_files.write(tmp_path / "ours" / "t", tensors)
    return tmp_path / "ours" / "t"


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_ours_to_deepspeeds_and_back(tmp_path, ours, stage, world):
    report = convert(ours, tmp_path / "theirs", to="deepspeed", stage=stage, world_size=world)
    assert report.world_size == world and report.zero_stage == stage
    theirs = find_source(str(tmp_path / "theirs"))
    assert (theirs.format, theirs.world_size, theirs.zero_stage) == ("deepspeed", world, stage)
    assert_same(find_source(str(ours)), theirs)
    convert(tmp_path / "theirs", tmp_path / "back", world_size=3)
    assert_same(theirs, find_source(str(tmp_path / "back")))
    for name in ("theirs", "back"):
        assert not verify(str(tmp_path / name), progress=False).problems


@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_checkpoint_is_read_again_and_checked(tmp_path, ours, stage):
    convert(ours, tmp_path / "out", to="universal", stage=stage, world_size=2, progress=False)
    place = str(tmp_path / "out" / "global_step7")
    assert_same(find_source(str(ours)), find_source(place))
    assert find_source(place).zero_stage == stage
    report = verify(place, progress=False)
    assert report.ok and report.files == len([p for p in (tmp_path / "out").rglob("*.pt")])
    convert(place, tmp_path / "back", progress=False)
    assert_same(find_source(place), find_source(str(tmp_path / "back")))
    module = "zero_pp_rank_0_mp_rank_00_model_states.pt"
    flipped(module, checkpoint_files.raw(checkpoint_files.some_tensors()["weight", "ice.weight"])[:30])(Path(place))
    assert module in "".join(verify(place, progress=False).problems)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_at_another_world_size_and_stage(tmp_path, stage):
    deepspeed_states.write(tmp_path / "a" / "t", stage)
    convert(tmp_path / "a" / "t", tmp_path / "b", to="deepspeed", stage=5 - stage, world_size=3, sub_group_size=5)
    assert_same(find_source(str(tmp_path / "a" / "t")), find_source(str(tmp_path / "b")))


def test_the_command_reports_refuses_and_replaces(tmp_path, capsys):
    checkpoint_files.write(tmp_path / "ours" / "t", tag="t")
    command = ["convert", str(tmp_path / "ours" / "t"), str(tmp_path / "out"), "--world-size", "2", "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tag"] == "t" and report["world_size"] == 2 and "manifest.json" in report["files"]
    assert (tmp_path / "out" / "latest").read_text() == "t"
    assert main(command) == 2 and "--overwrite" in capsys.readouterr().err
    before = find_source(str(tmp_path / "out"))
    assert main([*command[:3], "--world-size", "5", "--overwrite"]) == 0
    after = find_source(str(tmp_path / "out"))
    assert (before.world_size, after.world_size) == (2, 5)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest", "t"]
    (tmp_path / "out" / "t" / "notes.txt").write_text("mine")
    assert main([*command[:3], "--overwrite"]) == 2 and "notes.txt" in capsys.readouterr().err
    assert (tmp_path / "out" / "t" / "notes.txt").read_text() == "mine"
    assert main(["convert", str(tmp_path / "ours" / "t"), str(tmp_path / "ours")]) == 2  # onto itself
    assert find_source(str(tmp_path / "ours" / "t")).world_size == 3


@pytest.mark.parametrize("to", ["ort_zero", "deepspeed", "universal", "dcp"])
@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_a_damaged_source_leaves_the_destination_as_it_was(tmp_path, kind, to):
    def written() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}

    folder, options = tmp_path / kind / "t", {} if to == "dcp" else {"stage": 2}
    if kind == "ours":
        checkpoint_files.write(folder)
        name, place = "rank_00001_optimizer.safetensors", -9
    else:
        values = deepspeed_states.write(folder, 3)
        name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        place = checkpoint_files.raw(values["exp_avg/embed.weight"])[-8:]
    convert(folder, tmp_path / "out", to=to, progress=False, **options)
    before = written()
    flipped(name, place)(folder)
    with pytest.raises(CorruptCheckpointError, match=name):
        convert(folder, tmp_path / "out", to=to, overwrite=True, progress=False, **options)
    assert before == written()


@pytest.mark.parametrize(("to", "stage", "block"), [("ort_zero", 1, 1 << 20), ("deepspeed", 3, 4096)])
@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 5), (4, 1)])
def test_a_piece_that_ranks_share_is_read_whole_once(tmp_path, monkeypatch, block, to, stage, old, new):
    monkeypatch.setattr(LocalFolder, "block", block)
    made = []
    monkeypatch.setattr(converting, "Conversion", lambda **fields: made.append(Conversion(**fields)) or made[-1])
    tensors = {(kind, name): torch.randn(size) for name, size in (("a", 30_011), ("b", 20_000), ("c", 5))
               for kind in (MASTER, "exp_avg", "exp_avg_sq")}  # fmt: skip
    checkpoint_files.write(tmp_path / "t", tensors, ranks=old, aliases={}, frozen=[])
    report = convert(tmp_path / "t", tmp_path / "new", to=to, stage=stage, world_size=new, progress=False)
    found = find_source(report.destination)
    assert found.world_size == new
    assert_tensors_same(values_of(found), tensors)
    needed = sum(value.nbytes for value in tensors.values())
    (work,) = made
    assert needed <= work.folder.bytes_read <= 2 * needed, work.folder.bytes_read / needed


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    for name, millions in (("small", 2), ("large", 16)):
        tensors = {(kind, f"w{i}"): torch.ones(1 << 20) for i in range(millions) for kind in ("master", "exp_avg")}
        checkpoint_files.write(tmp_path / name / "t", tensors, aliases={}, tag="t")
    command = [sys.executable, "-c", PEAKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    peaks = [float(line) for line in done.stdout.splitlines()[-6:]]
    # MiB; the large one has 128 MiB in its files
    assert all(large < small + 12 and large < 80 for small, large in zip(peaks[::2], peaks[1::2])), peaks


def test_the_checkpoint_is_found_where_people_point(tmp_path, monkeypatch):
    checkpoint_files.write(tmp_path / "run" / "checkpoint-7" / "global_step7", tag="global_step7")
    report = convert(tmp_path / "run", tmp_path / "out", progress=False)
    assert report.tag == "global_step7" and verify(str(tmp_path / "out"), progress=False).ok
    write_dcp(tmp_path / "here", {"a": torch.randn(3)}, {})
    monkeypatch.chdir(tmp_path / "here")
    assert convert(".", tmp_path / "dcp", to="dcp", progress=False).tag == "here"


def test_bad_choices_are_refused(tmp_path):
    checkpoint_files.write(tmp_path / "ours" / "t")
    for options, text in (
        ({"to": "zip"}, "not known"),
        ({"to": "deepspeed", "stage": 0}, "from 1 to 3"),
        ({"world_size": 0}, "at least 1"),
        ({"dtype": "int8"}, "not known"),
    ):
        with pytest.raises(CheckpointError, match=text):
            convert(tmp_path / "ours" / "t", tmp_path / "out", **options)
    shutil.rmtree(tmp_path / "ours")
    with pytest.raises(CheckpointError):
        convert(tmp_path / "ours" / "t", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def write_dcp(
    folder: Path, weights: dict[str, torch.Tensor], states: dict[str, dict[str, torch.Tensor]], **options: Any
) -> str:
    """Write a checkpoint as ``torch.distributed.checkpoint`` does, with one parameter group; return its path."""
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, **options, "params": list(weights)}]}
    torch.distributed.checkpoint.save({"model": weights, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
    return str(folder)


def adam_states(weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return states as Adam has them after a step, in the dtypes of the weights."""
    moments = {name: {kind: torch.randn_like(w) for kind in ("exp_avg", "exp_avg_sq")} for name, w in weights.items()}
    return {name: {"step": torch.tensor(1.0), **states} for name, states in moments.items()}


OUTSIDE = "/" + "../" * 20 + "tmp/outside"
DEEPSPEEDS = ("deepspeed", "universal")
REFUSED: dict[str, tuple[str, Any, tuple[str, ...], str]] = {
    # case: (name of a parameter, its states besides Adam's or its weights, formats, text)
    "a state that is a path": ("a", {OUTSIDE: torch.randn(4)}, ("universal",), "cannot be the name of its file"),
    "a state named as the master": ("a", {"fp32": torch.randn(4)}, ("universal",), "cannot be the name of its file"),
    "a state named as a kind": ("a", {"master": torch.randn(4)}, ("dcp", "deepspeed"), "named 'master'"),
    "a parameter that is a path": (OUTSIDE, {}, ("universal",), "cannot be the name of a folder"),
    "a state of another shape": ("a", {"row_var": torch.randn(2)}, (*DEEPSPEEDS, "ort_zero"), "row_var.* shape .* a, "),
    "a state of one parameter": ("a", {"momentum": torch.randn(4)}, DEEPSPEEDS, "b has no momentum"),
    "a number": ("a", {"mu_product": torch.tensor(0.5)}, ("universal",), "no place for .* mu_product"),
    "double": ("a", torch.randn(4).double(), DEEPSPEEDS, "F64 of a; --to dcp"),
    "complex": ("a", torch.randn(4, dtype=torch.complex64), DEEPSPEEDS, "C64 of a; --to dcp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_store_is_refused_by_name(tmp_path, case):
    name, change, formats, text = REFUSED[case]
    weights = {name: torch.randn(4) if isinstance(change, dict) else change, "b": torch.randn(3)}
    states = adam_states(weights)
    states[name] |= change if isinstance(change, dict) else {}
    source = write_dcp(tmp_path / "t", weights, states)
    for to in formats:
        with pytest.raises(CheckpointError, match=text):
            convert(source, tmp_path / "out", to=to, stage=2, progress=False)
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("url", ["local", "memory://planted"])
def test_no_writer_leaves_its_folder(tmp_path, url):
    folder = open_folder(tmp_path / url if url == "local" else url)
    folder.make()
    for name in ("../x", "/x", "a/../x", "a\nb", ""):
        with pytest.raises(CheckpointError, match="cannot be the name"):
            folder.write(name, b"", "token")
    assert not list(tmp_path.rglob("*x*"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_weights_in_a_group_with_bf16_ones_keep_every_bit(tmp_path, stage):
    weights = {"layer": torch.randn(4, 4).bfloat16(), "router": torch.randn(4)}
    states = adam_states(weights)
    source = write_dcp(tmp_path / "t", weights, states)
    report = convert(source, tmp_path / "out", to="deepspeed", stage=stage, world_size=2)
    expected = {(MASTER, name): weight.float() for name, weight in weights.items()}
    for name in weights:
        expected |= {(kind, name): value.float() for kind, value in states[name].items() if kind != "step"}
    assert_tensors_same(values_of(find_source(report.destination)), expected)


def test_the_report_of_dcp_says_what_ls_says(tmp_path, capsys):
    checkpoint_files.write(tmp_path / "ours" / "t", tag="t")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", "dcp"]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path / 'ours' / 't'} (ort_zero, ZeRO-1, 3 ranks)" in text and "t (dcp, 1 rank)" in text
    (listed,) = list_checkpoints(str(tmp_path / "out"))
    assert (listed.format, listed.world_size) == ("dcp", 1)


@pytest.mark.parametrize(("dtype", "said"), [("keep", "keep"), ("bf16", "BF16")])
def test_dcp_keeps_each_dtype_unless_asked(tmp_path, dtype, said):
    weights = {"bf16": torch.randn(4, 4).bfloat16(), "fp32": torch.randn(4), "fp64": torch.randn(4).double(),
               "complex": torch.randn(4, dtype=torch.complex64)}  # fmt: skip
    states = adam_states(weights)
    report = convert(write_dcp(tmp_path / "t", weights, states), tmp_path / "out", to="dcp", dtype=dtype)
    assert report.dtype == said
    values = values_of(find_source(report.destination))
    for name, weight in weights.items():
        expected = {MASTER: weight if dtype == "keep" or name == "complex" else weight.bfloat16()}
        expected |= {kind: states[name][kind] for kind in ("exp_avg", "exp_avg_sq")}
        assert_tensors_same({kind: values[kind, name] for kind in expected}, expected)


@pytest.mark.parametrize(
    ("class_name", "decoupled"), [("AdamW", True), ("FusedAdam", None), ("unknown", None), ("Lion", None)]
)
def test_dcp_has_the_masters_and_the_options_that_are_known(tmp_path, class_name, decoupled):
    tensors = {key: value for key, value in checkpoint_files.some_tensors().items() if key[1] != "none"}
    optimizer = replace(checkpoint_files._optimizer(tensors), class_name=class_name)
    checkpoint_files.write(tmp_path / "t", tensors, dtype="BF16", optimizer=optimizer)
    report = convert(tmp_path / "t", tmp_path / "out", to="dcp", progress=False)
    found = find_source(report.destination)
    assert found.optimizer is not None
    (group,) = found.optimizer.groups
    assert group.options.get("decoupled_weight_decay") is decoupled
    assert ("amsgrad" in group.options) == (class_name != "Lion")
    noted = any("decoupled_weight_decay" in note for note in report.warnings)
    assert noted == (class_name in ("FusedAdam", "unknown"))
    values = values_of(found)
    masters = {key: value for key, value in tensors.items() if key[0] == MASTER}
    assert_tensors_same({key: values[key] for key in masters}, masters)


@pytest.mark.parametrize("to", DEEPSPEEDS)
@pytest.mark.parametrize("kind", ["momentum_buffer", "exp_avg", "no state"])
def test_optimizers_without_steps_and_without_states(tmp_path, kind, to):
    weights = {(MASTER, name): torch.randn(shape) for name, shape in (("a", (4, 3)), ("b", (3,)))}
    states = {(kind, name): torch.randn_like(w) for (_, name), w in weights.items()} if kind != "no state" else {}
    group = ParamGroup(names=("a", "b"), options={"lr": 0.1, "momentum": 0.9})
    optimizer = Optimizer(class_name="unknown", groups=(group,), scalars={})
    checkpoint_files.write(tmp_path / "ours", {**weights, **states}, aliases={}, optimizer=optimizer)
    source = convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", progress=False).destination
    # torch's format tells the trained parameters by their states
    again = convert(source if states else tmp_path / "ours", tmp_path / "out", to=to, stage=2, world_size=2)
    found = find_source(again.destination)
    assert_tensors_same(values_of(found), {**weights, **states})
    for each in (found, find_source(source)):
        assert each.optimizer is not None
        assert [(set(g.names) or {"a", "b"}, g.options) for g in each.optimizer.groups] == [({"a", "b"}, group.options)]


@pytest.mark.parametrize("to", DEEPSPEEDS)
def test_all_numbers_go_to_deepspeeds_files_and_zeros_for_a_parameter_without_gradient(tmp_path, to):
    moments = {(kind, name): torch.randn(4) for kind in ("exp_avg", "exp_avg_sq") for name in ("a", "b")}
    masters = {(MASTER, name): torch.randn(4) for name in ("a", "b", "unrouted")}
    scalars = {"step": dict.fromkeys("ab", 3.0)}
    if to == "deepspeed":  # the universal format has no place for it
        scalars["mu_product"] = dict.fromkeys("ab", 0.5)
    group = ParamGroup(names=("a", "b", "unrouted"), options={"lr": 0.1})
    optimizer = Optimizer(class_name="NAdam", groups=(group,), scalars=scalars)
    checkpoint_files.write(tmp_path / "t", {**masters, **moments}, aliases={}, optimizer=optimizer)
    report = convert(tmp_path / "t", tmp_path / "out", to=to, stage=3, sub_group_size=1, progress=False)
    found = find_source(report.destination)
    zeros = {(kind, "unrouted"): torch.zeros(4) for kind in ("exp_avg", "exp_avg_sq")}
    assert_tensors_same(values_of(found), {**masters, **moments, **zeros})
    assert found.optimizer is not None
    expected = {key: dict.fromkeys(group.names, next(iter(values.values()))) for key, values in scalars.items()}
    assert found.optimizer.scalars == expected


@pytest.mark.parametrize("tag", ["latest", "latest_universal"])
def test_destinations_that_would_damage_are_refused(tmp_path, tag):
    source = tmp_path / "run" / tag
    checkpoint_files.write(source, tag=tag)
    with pytest.raises(CheckpointError, match="rename the source"):
        convert(source, tmp_path / "out", to="deepspeed", progress=False)
    shutil.move(source, tmp_path / "run" / "t")
    checkpoint_files.write(tmp_path / "run" / "t", tag="t")
    for place in ("run", "run/t", "run/t/inner"):
        with pytest.raises(CheckpointError, match="lies in the checkpoint"):
            convert(tmp_path / "run" / "t", tmp_path / place, to="dcp", progress=False)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["t"] and not (tmp_path / "out").exists()
