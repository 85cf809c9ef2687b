"""Damaged checkpoints are refused by name, by load, aggregate and verify; what is loaded stays what it was."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from checkpoint_engines import (
    differences,
    engine_of,
    outcome,
    train,
    values_of,
)
from rank_processes.ranks import run_on_ranks
from safetensors.torch import load_file

from ort_zero.checkpoint import load, save
from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.saves import saving
from ort_zero.errors import CheckpointError

SHARD = "rank_00001_master.safetensors"
OTHER = "rank_00000_master.safetensors"


def save_for_faults(folder: str) -> None:
    """Save two steps of one run, and one of another run."""
    engine = engine_of(stage=2)
    for tag in ("good", "later"):
        train(engine, range(3))
        save(engine, folder, tag, client_state={"rank": dist.get_rank(), "rng": torch.arange(3)})
    saving._RUN_ID = "of another run"
    train(engine, range(3))
    save(engine, folder, "other_run", save_latest=False)


def save_wider(folder: str) -> None:
    """Save once more, from a world of another size."""
    engine = engine_of(stage=2)
    train(engine, range(3))
    save(engine, folder, "wider", save_latest=False)


def load_rows(rows: dict[str, tuple[str, str | None]]) -> dict[str, dict[str, Any]]:
    """Load each row's (folder, tag) into one and the same engine; return the outcomes."""
    engine = engine_of(stage=2, seed=1)
    found = {}
    ways = {"": load, " by the engine": lambda engine, folder, tag: engine.load_checkpoint(folder, tag)}
    for name, (folder, tag), way in (
        (f"{name}{end}", row, way) for end, way in ways.items() for name, row in rows.items()
    ):
        train(engine, range(1))
        before = values_of(engine)
        steps = engine.global_steps
        found[name] = outcome(lambda: way(engine, folder, tag))
        found[name]["changed"] = differences(engine, before)
        found[name]["losses"] = train(engine, range(1))
        found[name]["steps"] = engine.global_steps - steps
    return found


# -- what is damaged, and what is said of it -------------------------------------------------------------------------


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
        lambda tag: ((tag / SHARD).unlink(), (tag / SHARD).mkdir()), "is a folder", verify=".", kind=PLAIN
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
        lambda tag: edit_manifest(tag, lambda value: value.update(version=4)),
        "has format version 4",
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
    "no_latest": Fault(
        lambda tag: (tag.parent / "latest").unlink(),
        "has no file.*give a tag; tags there: good, later",
        "latest",
        verify=None,
        tag=None,
        kind=PLAIN,
    ),
    "latest_is_a_folder": Fault(
        lambda tag: ((tag.parent / "latest").unlink(), (tag.parent / "latest").mkdir()),
        "has no file.*give a tag",
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
    run_on_ranks(save_for_faults, 2, str(root / "saved"))
    run_on_ranks(save_wider, 3, str(root / "saved"))
    for name, fault in FAULTS.items():
        shutil.copytree(root / "saved", root / name)
        fault.damage(root / name / "good")
    return root


@pytest.fixture(scope="module")
def loaded(damaged) -> list[dict[str, dict[str, Any]]]:
    """What each rank's load said of each fault."""
    rows = {name: (str(damaged / name), fault.tag) for name, fault in FAULTS.items()}
    return run_on_ranks(load_rows, 2, rows)


@pytest.mark.parametrize("way", ["", " by the engine"])
@pytest.mark.parametrize("name", FAULTS)
def test_load_refuses(name, way, loaded):
    """The engine must not go over to DeepSpeed's loader, which finds nothing and lets the training start anew."""
    fault, outcomes = FAULTS[name], [rank[name + way] for rank in loaded]
    for reported in outcomes:
        assert reported["steps"] == 1 if fault.load else reported["type"] is None, reported
        assert not fault.load or not reported["changed"], reported["changed"]
    if not fault.load:
        assert all(reported["changed"] for reported in outcomes), "nothing was loaded"
        return
    types = [reported["type"] for reported in outcomes]
    assert fault.kind in types and set(types) <= {fault.kind, "RankError"}, outcomes
    for reported in outcomes:
        assert fault.of in reported["text"] and re.search(fault.says, reported["text"]), reported["text"]
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
        with pytest.raises(CheckpointError, match=r"no checkpoint|neither a checkpoint|not there|leads out|give a tag"):
            verify(damaged / name, fault.tag, progress=False)
        return
    report = verify(damaged / name, fault.tag, progress=False)
    if name == "none":
        assert report.ok
        return
    wanted = fault.verify or fault.says
    assert any(fault.of in text and re.search(wanted, text) for text in report.problems), report.problems
    assert all(re.search(wanted, text) or name == "swapped_ranks" for text in report.problems), report.problems
