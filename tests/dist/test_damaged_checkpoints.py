"""Damaged checkpoints are refused by name on all ranks; the engine that loads stays what it was.

What the commands say of damaged files is in ``tests/unit/test_planted_files.py``.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from checkpoint_engines import (
    differences,
    engine_of,
    outcome,
    train,
    values_of,
)
from damage import Change, edited, flipped, removed, swapped, truncated
from rank_processes.ranks import run_on_ranks

from ort_zero.checkpoint import save
from ort_zero.checkpoint.format import manifest

SHARD = "rank_00001_master.safetensors"
OTHER = "rank_00000_master.safetensors"
THEIRS, MODULE = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


def save_for_faults(folder: str) -> None:
    """Save two steps of one run, in both formats."""
    engine = engine_of(stage=2)
    for tag in ("good", "later"):
        train(engine, range(3))
        save(engine, folder, tag, client_state={"rank": dist.get_rank(), "rng": torch.arange(3)})
        type(engine).save_checkpoint.__wrapped__(engine, f"{folder}/theirs", tag=tag)


def save_wider(folder: str) -> None:
    """Save once more, from a world of another size."""
    engine = engine_of(stage=2)
    train(engine, range(3))
    save(engine, folder, "wider", save_latest=False)


def load_rows(rows: dict[str, tuple[str, str | None]]) -> dict[str, dict[str, Any]]:
    """Load each row's (folder, tag) into one and the same engine; return the outcomes."""
    engine = engine_of(stage=2, seed=1)
    found = {}
    for name, (folder, tag) in rows.items():
        train(engine, range(1))
        before = values_of(engine)
        steps = engine.global_steps
        found[name] = outcome(lambda folder=folder, tag=tag: engine.load_checkpoint(folder, tag))
        found[name]["changed"] = differences(engine, before)
        found[name]["losses"] = train(engine, range(1))
        found[name]["steps"] = engine.global_steps - steps
    return found


# -- what is damaged, and what is said of it -------------------------------------------------------------------------


def flip_data(tag: Path) -> None:
    value = json.loads((tag / manifest.NAME).read_bytes())
    index = next(i for i, file in enumerate(value["files"]) if file["name"] == SHARD)
    pieces = [p for t in value["tensors"] if t["kind"] == "master" for p in t["pieces"] if p[0] == index]
    flipped(SHARD, pieces[0][1] + 1)(tag)


class Fault(NamedTuple):
    """What is done to the folder of a tag, and what is said of it."""

    damage: Change
    says: str | None
    """Regular expression that every message matches; None for what is no fault of a load."""
    of: str = SHARD
    """What every message names."""
    kind: str = "CorruptCheckpointError"
    tag: str | None = "good"
    inside: str = ""
    """Folder of the tag within the folder of checkpoints: "theirs" for DeepSpeed's."""


def from_later(name: str) -> Change:
    return lambda tag: shutil.copy(tag.parent / "later" / name, tag)


PLAIN = "CheckpointError"
CHANGED = r"is damaged|is truncated"
EXTRA = "rank_00001_extra.json"
FAULTS = {
    "none": Fault(lambda tag: None, None),
    "truncated": Fault(truncated(SHARD, -3), "is truncated"),
    "flipped_bit": Fault(flip_data, "is damaged"),
    "missing": Fault(removed(SHARD), "is missing"),
    "missing_extra": Fault(removed(EXTRA), "is missing", EXTRA),
    "flipped_bit_in_extra": Fault(flipped(EXTRA, 40), "is damaged", EXTRA),
    "of_another_step": Fault(from_later(SHARD), CHANGED),
    "of_another_world_size": Fault(lambda tag: shutil.copy(tag.parent / "wider" / SHARD, tag), CHANGED),
    "swapped_ranks": Fault(swapped(SHARD, OTHER), CHANGED, "_master.safetensors"),
    "a_folder_instead": Fault(lambda tag: ((tag / SHARD).unlink(), (tag / SHARD).mkdir()), "is a folder", kind=PLAIN),
    "no_manifest": Fault(removed(manifest.NAME), f"no.* {manifest.NAME}", "good", PLAIN),
    "cut_manifest": Fault(truncated(manifest.NAME, 500), "is not a manifest of ort_zero", manifest.NAME),
    "flipped_bit_in_manifest": Fault(
        flipped(manifest.NAME, b'"zero_stage": 2'), "does not match its own digest", manifest.NAME
    ),
    "infinite_rate": Fault(
        edited(lambda value: value["optimizer"]["groups"][0]["options"].update(lr=math.inf)),
        "lr of parameter group 0 cannot be inf",
        "good",
    ),
    "next_version": Fault(
        edited(lambda value: value.update(version=manifest.VERSION + 1)),
        f"version {manifest.VERSION + 1}",
        manifest.NAME,
        PLAIN,
    ),
    "latest_names_nothing": Fault(
        lambda tag: (tag.parent / "latest").write_text("gone"), "names the tag 'gone'.*not there", "latest", PLAIN, None
    ),
    "no_latest": Fault(
        lambda tag: (tag.parent / "latest").unlink(), "has no file.*tags there: good, later", "latest", PLAIN, None
    ),
    "latest_leads_out": Fault(
        lambda tag: (tag.parent / "latest").write_text("../x"), "leads out", "latest", PLAIN, None
    ),
    "flipped_bit_in_theirs": Fault(
        lambda tag: flipped(THEIRS, within_a_record(tag / THEIRS))(tag), "is damaged", THEIRS, inside="theirs"
    ),
    "missing_of_theirs": Fault(removed(THEIRS), "is missing", THEIRS, inside="theirs"),
    "optimizer_of_another_step": Fault(from_later(THEIRS), "of another step", "optim_states.pt", inside="theirs"),
    "module_of_another_step": Fault(from_later(MODULE), "of another step than the masters", MODULE, inside="theirs"),
}


def within_a_record(path: Path) -> int:
    """Return a place in the bytes of the largest record of a zip: no checksum covers the room between records."""
    with zipfile.ZipFile(path) as file:
        record = max(file.infolist(), key=lambda each: each.file_size)
    data = path.read_bytes()
    name_length, extra_length = struct.unpack_from("<HH", data, record.header_offset + 26)
    return record.header_offset + 30 + name_length + extra_length + record.file_size // 2


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    """A folder with one folder of checkpoints per fault."""
    root = tmp_path_factory.mktemp("faults")
    run_on_ranks(save_for_faults, 2, str(root / "saved"))
    run_on_ranks(save_wider, 3, str(root / "saved"))
    for name, fault in FAULTS.items():
        shutil.copytree(root / "saved", root / name)
        fault.damage(root / name / fault.inside / "good")
    return root


@pytest.fixture(scope="module")
def loaded(damaged) -> list[dict[str, dict[str, Any]]]:
    """What each rank's load said of each fault."""
    rows = {name: (str(damaged / name / fault.inside), fault.tag) for name, fault in FAULTS.items()}
    return run_on_ranks(load_rows, 2, rows)


@pytest.mark.parametrize("name", FAULTS)
def test_load_refuses(name, loaded):
    """The engine must not go over to DeepSpeed's loader, which finds nothing and lets the training start anew."""
    fault, outcomes = FAULTS[name], [rank[name] for rank in loaded]
    if fault.says is None:
        assert all(reported["type"] is None and reported["changed"] for reported in outcomes), outcomes
        return
    types = [reported["type"] for reported in outcomes]
    assert fault.kind in types and set(types) <= {fault.kind, "RankError"}, outcomes
    for reported in outcomes:
        assert reported["steps"] == 1 and not reported["changed"], reported
        assert fault.of in reported["text"] and re.search(fault.says, reported["text"]), reported["text"]
    assert outcomes[0]["losses"] == outcomes[1]["losses"]
