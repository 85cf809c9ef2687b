"""Damaged checkpoints are refused by name, saves that fail harm nothing, and ranks may die at any moment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_workers
import pytest
import torch
import xxhash
from safetensors.torch import load_file

from ort_zero.checkpoint import manifest
from ort_zero.checkpoint.aggregation import aggregate
from ort_zero.checkpoint.verification import verify
from ort_zero.errors import CheckpointError
from ort_zero.testing.ranks import run_on_ranks

SHARD = "rank_00001_master.safetensors"
OTHER = "rank_00000_master.safetensors"


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


def edit_manifest(tag: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, and let its digest be right all the same."""
    path = tag / manifest.NAME
    value = json.loads(path.read_bytes())
    value.pop("xxh3_128")
    change(value)
    text = json.dumps(value, indent=1).removesuffix("\n}")
    path.write_text(f'{text},\n"xxh3_128": "{xxhash.xxh3_128(text.encode()).hexdigest()}"\n}}\n')


def flip(path: Path, offset: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def flip_data(tag: Path) -> None:
    value = json.loads((tag / manifest.NAME).read_bytes())
    index = next(i for i, file in enumerate(value["files"]) if file["name"] == SHARD)
    pieces = [p for t in value["tensors"] if t["kind"] == "master" for p in t["pieces"] if p[0] == index]
    flip(tag / SHARD, pieces[0][1] + 1)


def flip_in_run_id(tag: Path) -> None:
    flip(tag / SHARD, (tag / SHARD).read_bytes().index(b'"run_id"') + 12)


def flip_in_manifest(tag: Path) -> None:
    flip(tag / manifest.NAME, (tag / manifest.NAME).read_bytes().index(b'"zero_stage": 2') + 14)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def swap(tag: Path) -> None:
    (tag / SHARD).rename(tag / "aside")
    (tag / OTHER).rename(tag / SHARD)
    (tag / "aside").rename(tag / OTHER)


def rename_in_manifest(name: str) -> Callable[[Path], None]:
    def change(value: dict[str, Any]) -> None:
        next(file for file in value["files"] if file["name"] == SHARD)["name"] = name

    return lambda tag: edit_manifest(tag, change)


def set_dtype(value: dict[str, Any]) -> None:
    value["tensors"][0]["dtype"] = "F7"


@dataclass(frozen=True)
class Fault:
    """What is done to the folder of a tag, and what is said of it."""

    damage: Callable[[Path], Any]
    says: str
    """Regular expression; the messages of load and aggregate match it."""
    of: str = SHARD
    """What every message names."""
    load: bool = True
    """It is refused by load."""
    aggregate: bool = True
    verify: str | None = ""
    """Regular expression that a problem of verify matches, by default `says`; None where verify raises."""
    kind: str = "CorruptCheckpointError"
    tag: str | None = "good"


PLAIN = "CheckpointError"
CHANGED = r"is damaged|is truncated"
FAULTS = {
    "none": Fault(lambda tag: None, "", load=False, aggregate=False),
    "truncated": Fault(lambda tag: cut(tag / SHARD, (tag / SHARD).stat().st_size - 3), "is truncated"),
    "truncated_to_the_header": Fault(lambda tag: cut(tag / SHARD, 100), "is truncated"),
    "flipped_bit": Fault(flip_data, "is damaged"),
    "flipped_bit_in_header": Fault(flip_in_run_id, "", load=False, aggregate=False, verify="another run|damaged"),
    "missing": Fault(lambda tag: (tag / SHARD).unlink(), "is missing"),
    "missing_extra": Fault(
        lambda tag: (tag / "rank_00001_extra.json").unlink(), "is missing", "rank_00001_extra.json", aggregate=False
    ),
    "flipped_bit_in_extra": Fault(
        lambda tag: flip(tag / "rank_00001_extra.json", 40), "is damaged", "rank_00001_extra.json", aggregate=False
    ),
    "one_too_many": Fault(
        lambda tag: shutil.copy(tag / SHARD, tag / "rank_00002_master.safetensors"),
        "",
        "rank_00002_master.safetensors",
        load=False,
        aggregate=False,
        verify="one too many",
    ),
    "of_another_step": Fault(
        lambda tag: shutil.copy(tag.parent / "later" / SHARD, tag),
        CHANGED,
        verify=r"another save \(step 6, tag later\)",
    ),
    "of_another_run": Fault(
        lambda tag: shutil.copy(tag.parent / "other_run" / SHARD, tag), CHANGED, verify="another run"
    ),
    "of_another_world_size": Fault(
        lambda tag: shutil.copy(tag.parent / "wider" / SHARD, tag), CHANGED, verify="another run"
    ),
    "swapped_ranks": Fault(swap, CHANGED, "_master.safetensors", verify="is rank 0's file"),
    "empty": Fault(lambda tag: cut(tag / SHARD, 0), "is truncated|is empty", verify="is empty"),
    "a_folder_instead": Fault(
        lambda tag: ((tag / SHARD).unlink(), (tag / SHARD).mkdir()), "cannot read", verify=".", kind=PLAIN
    ),
    "no_manifest": Fault(
        lambda tag: (tag / manifest.NAME).unlink(), f"no.* {manifest.NAME}", "good", verify=None, kind=PLAIN
    ),
    "cut_manifest": Fault(lambda tag: cut(tag / manifest.NAME, 500), "is not a manifest of ort_zero", manifest.NAME),
    "empty_manifest": Fault(lambda tag: cut(tag / manifest.NAME, 0), "is not a manifest", manifest.NAME),
    "flipped_bit_in_manifest": Fault(flip_in_manifest, "does not match its own digest", manifest.NAME),
    "manifest_is_no_text": Fault(
        lambda tag: (tag / manifest.NAME).write_bytes(b"\x93\0\xff" * 99), "is not a manifest", manifest.NAME
    ),
    "manifest_is_a_list": Fault(lambda tag: (tag / manifest.NAME).write_text("[]"), "is not a manifest", manifest.NAME),
    "file_outside": Fault(
        rename_in_manifest("../x"), r"wrong at files\.\d+\.name.*own folder.*'\.\./x'", manifest.NAME
    ),
    "absolute_file": Fault(
        rename_in_manifest("/etc/passwd"), r"wrong at files\.\d+\.name.*own folder.*passwd", manifest.NAME
    ),
    "unknown_dtype": Fault(
        lambda tag: edit_manifest(tag, set_dtype), r"wrong at tensors\.0\.dtype.*unknown dtype.*F7", manifest.NAME
    ),
    "next_version": Fault(
        lambda tag: edit_manifest(tag, lambda value: value.update(version=2)),
        "has format version 2",
        manifest.NAME,
        kind=PLAIN,
    ),
    "latest_names_nothing": Fault(
        lambda tag: (tag.parent / "latest").write_text("gone"),
        "names the tag 'gone'.*not there",
        "latest",
        verify=None,
        tag=None,
        kind=PLAIN,
    ),
    "latest_leads_out": Fault(
        lambda tag: (tag.parent / "latest").write_text("../x"), "leads out", "latest", verify=None, tag=None, kind=PLAIN
    ),
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    """A folder with one folder of checkpoints per fault."""
    root = tmp_path_factory.mktemp("faults")
    run_on_ranks(fault_workers.save_for_faults, 2, str(root / "saved"))
    run_on_ranks(fault_workers.save_wider, 3, str(root / "saved"))
    for name, fault in FAULTS.items():
        shutil.copytree(root / "saved", root / name)
        fault.damage(root / name / "good")
    return root


@pytest.fixture(scope="module")
def loaded(damaged) -> list[dict[str, dict[str, Any]]]:
    """What each rank's load said of each fault."""
    rows = {name: (str(damaged / name), fault.tag) for name, fault in FAULTS.items()}
    return run_on_ranks(fault_workers.load_rows, 2, rows)


@pytest.mark.parametrize("name", FAULTS)
def test_load_refuses(name, loaded):
    fault, outcomes = FAULTS[name], [rank[name] for rank in loaded]
    for outcome in outcomes:
        assert outcome["steps"] == 1 if fault.load else outcome["type"] is None, outcome
        assert not fault.load or not outcome["changed"], outcome["changed"]
    if not fault.load:
        assert all(outcome["changed"] for outcome in outcomes), "nothing was loaded"
        return
    types = [outcome["type"] for outcome in outcomes]
    assert fault.kind in types and set(types) <= {fault.kind, "RankError"}, outcomes
    for outcome in outcomes:
        assert fault.of in outcome["text"] and re.search(fault.says, outcome["text"]), outcome["text"]
    assert outcomes[0]["losses"] == outcomes[1]["losses"]


@pytest.mark.parametrize("name", FAULTS)
def test_aggregate_refuses(name, damaged, tmp_path):
    fault, out = FAULTS[name], tmp_path / "out"
    if not fault.aggregate:
        aggregate(damaged / name, out, tag=fault.tag, progress=False)
        assert load_file(out / "model.safetensors")
        return
    with pytest.raises(CheckpointError) as caught:
        aggregate(damaged / name, out, tag=fault.tag, progress=False)
    assert type(caught.value).__name__ == fault.kind
    assert fault.of in str(caught.value) and re.search(fault.says, str(caught.value)), str(caught.value)
    assert not out.exists() or not os.listdir(out)


@pytest.mark.parametrize("name", FAULTS)
def test_verify_finds(name, damaged):
    fault = FAULTS[name]
    if fault.verify is None:
        with pytest.raises(CheckpointError, match=r"no checkpoint|not there|leads out"):
            verify(damaged / name, fault.tag, progress=False)
        return
    report = verify(damaged / name, fault.tag, progress=False)
    if name == "none":
        assert report.ok
        return
    wanted = fault.verify or fault.says
    assert any(fault.of in text and re.search(wanted, text) for text in report.problems), report.problems
    assert all(re.search(wanted, text) or name == "swapped_ranks" for text in report.problems), report.problems


# -- saves that cannot work -------------------------------------------------------------------------------------------


@pytest.fixture
def nearly_full(tmp_path) -> str | None:
    """A file system with room for two of three ranks; None where none may be mounted."""
    folder = tmp_path / "nearly_full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True)
    yield str(folder) if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", folder], check=True)


SAVES = {
    # name: (rank that fails by itself, None for all; what every message says)
    "rank_1_cannot_write": (1, r"cannot write .*new/rank_00001_.*File too large"),
    "rank_1_cannot_write_the_same_tag": (1, r"cannot write .*same/rank_00001_.*File too large"),
    "rank_1_runs_full_late": (1, r"cannot write .*same/rank_00001_extra.*File too large"),
    "rank_1_cannot_publish": (1, r"Input/output error.*same/rank_00001_"),
    "rank_0_cannot_write_manifest": (0, r"Input/output error.*same/manifest.json"),
    "rank_0_cannot_write_manifest_of_a_new_tag": (0, r"Input/output error.*fresh/manifest.json"),
    "client_state_of_rank_2": (2, r"client_state\['hook'\] is a builtins.builtin_function"),
    "tags_differ": (None, r"rank 0 saves to .* as 'same', rank 2 to .* as 'good'"),
    "path_is_a_file": (None, r"a_file"),
    "tag_is_a_file": (None, r"a_file"),
    "tag_leads_out": (None, r"'\.\./x' leads out"),
    "no_rights": (2, r"(cannot write|Permission denied).*/same/?.*"),
    "background": (1, r"cannot write .*same/rank_00001_.*File too large"),
    "background_seen_by_next_save": (1, r"cannot write .*same/rank_00001_.*File too large"),
    "disk_full": (1, r"cannot write .*nearly_full/same/rank_0000\d_.*No space left on device"),
}


def test_saves_that_fail(tmp_path, nearly_full):
    ranks = run_on_ranks(fault_workers.save_rows, 3, str(tmp_path / "saved"), nearly_full)
    assert set(ranks[0]) == set(SAVES) - (set() if nearly_full else {"disk_full"})
    for name in ranks[0]:
        failing, says = SAVES[name]
        for rank, outcomes in enumerate(ranks):
            row = outcomes[name]
            expected = "CheckpointError" if failing in (None, rank) else "RankError"
            # what rank 1 fills is full for whoever writes at that moment
            either = rank != failing if name == "disk_full" else failing is None and name != "tags_differ"
            assert row["type"] in (("CheckpointError", "RankError") if either else (expected,)), (name, rank, row)
            assert re.search(says, row["text"]), (name, rank, row["text"])
            assert either or expected != "RankError" or f"rank {failing}" in row["text"], (name, rank, row["text"])
            assert row["seconds"] < 10, (name, rank, row["seconds"])
            for what in ("changed", "partial", "old", "next"):
                assert not row[what], (name, rank, what, row[what])
    assert not (tmp_path / "x").exists()
    assert not any(n.startswith("rank_") for tag in ("new", "fresh") for n in names_in(tmp_path / "saved" / tag))


def names_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.exists() else []


def test_the_same_tag_again(tmp_path):
    first, last, weights = run_on_ranks(fault_workers.save_twice, 2, str(tmp_path / "saved"))[0]
    assert len(first) == len(last) and set(first) & set(last) == {manifest.NAME}
    listed = {file["name"] for file in json.loads((tmp_path / "saved/tag/manifest.json").read_text())["files"]}
    assert set(last) == listed | {manifest.NAME} and (tmp_path / "saved/latest").read_text() == "tag"
    aggregate(tmp_path / "saved", tmp_path / "out", progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in weights.items() if name in found)
    assert set(weights) <= set(found)


# -- in the background ------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_the_moment_of_the_save(tmp_path):
    run_on_ranks(fault_workers.save_in_background, 2, str(tmp_path))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_waits_for_the_copy(tmp_path, stage):
    found = run_on_ranks(fault_workers.step_before_copied, 2, str(tmp_path), stage)
    for call, step in found:  # without ZeRO the forward reads what the optimizer writes: the call itself copies
        assert (call < step) == (stage > 0)


def test_a_copy_that_fails_on_one_rank_fails_on_all(tmp_path):
    first, second = run_on_ranks(fault_workers.copy_that_fails, 2, str(tmp_path))
    assert first["type"] == "RankError" and "rank 1: " in first["text"] and "Cannot allocate" in first["text"]
    assert second["type"] == "CheckpointError" and "copying the state for lost" in second["text"]
    assert not (tmp_path / "lost" / "manifest.json").exists() and verify(tmp_path, "next").ok


def test_a_save_outlives_its_engine(tmp_path):
    run_on_ranks(fault_workers.abandon_engine, 2, str(tmp_path))
    assert verify(tmp_path, "first").ok and verify(tmp_path, "second").ok
    assert (tmp_path / "latest").read_text() == "second"


def test_a_save_outlives_the_process_group(tmp_path):
    run_on_ranks(fault_workers.leave_early, 2, str(tmp_path))
    assert verify(tmp_path).ok and not fault_workers.partials(tmp_path)


# -- ranks that are ended ---------------------------------------------------------------------------------------------


def kill_rounds(how: str, count: int, folder: Path, seed: int, timeout: float) -> dict[str, Any]:
    """Return the report of :func:`fault_workers.rounds`, run in a process of its own."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, fault_workers.__file__, how, str(count), folder, str(seed)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
    )
    outputs = "\n".join(f"{p}:\n{p.read_text()[-2000:]}" for p in sorted(folder.glob("round_*/output_*")))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{outputs}"
    return json.loads(done.stdout.splitlines()[-1])


def test_killed_at_any_moment(tmp_path):
    report = kill_rounds("kill", 12, tmp_path, 1, 280)
    assert report["rounds"] == 12 and 0 < report["one"] < 12 and report["background"] == 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_many_moments(tmp_path):
    report = kill_rounds("kill", 200, tmp_path, 2, 3500)
    assert report["rounds"] == 200 and report["cut"] > 20


def test_killed_while_the_manifest_is_about_to_be_written(tmp_path):
    assert kill_rounds("linger", 2, tmp_path, 3, 120)["rounds"] == 2


def test_interrupted_at_any_moment(tmp_path):
    assert kill_rounds("interrupt", 6, tmp_path, 4, 200)["rounds"] == 6


def test_an_interrupted_wait_leaves_the_save_running(tmp_path):
    assert run_on_ranks(fault_workers.interrupted_wait, 2, str(tmp_path)) == [(True, True)] * 2


def test_an_interrupted_rank_leaves_none_behind(tmp_path):
    (first, left), (second, _) = run_on_ranks(fault_workers.interrupt_at_each_exchange, 2, str(tmp_path), timeout=60)
    assert len(second) > 5 and set(second) == {"KeyboardInterrupt"} and not left
    # the last exchange comes when the checkpoint is complete
    assert first == ["RankError"] * (len(first) - 1) + ["nothing"], first
    assert verify(tmp_path, "after").ok and verify(tmp_path, f"interrupted_{len(first)}").ok
