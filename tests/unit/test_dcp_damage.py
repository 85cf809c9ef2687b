"""Damaged and hostile checkpoints of torch's format: an error in words, nothing executed, nothing written."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import Change, flipped, removed, truncated
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ort_zero.checkpoint import aggregate, list_checkpoints, verify
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.finding import find_source
from ort_zero.checkpoint.seal import NAME as SEAL
from ort_zero.errors import CheckpointError, CorruptCheckpointError

SHARD, METADATA, BIAS = "__0_0.distcp", ".metadata", "model.up.bias"


def save(folder: Path, seed: int = 0) -> Path:
    """Save a small model with a tensor of each size class, as torch writes it in one process."""
    torch.manual_seed(seed)
    weights = {"up.weight": torch.randn(600, 500), "up.bias": torch.randn(600), "scale": torch.tensor(2.0)}
    dcp.save({"model": weights, "epoch": seed}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A whole checkpoint."""
    return save(tmp_path_factory.mktemp("whole") / "saved")


@pytest.fixture
def saved(whole, tmp_path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "saved"))


def metadata(change: Callable[[Any], Any]) -> Change:
    """Change the metadata as torch's objects."""

    def act(folder: Path) -> None:
        content = pickle.loads((folder / METADATA).read_bytes())
        change(content)
        (folder / METADATA).write_bytes(pickle.dumps(content))

    return act


def of_another_save(folder: Path) -> None:
    """Put in the metadata of a save with tensors of other sizes."""
    other = {"model": {"up.weight": torch.randn(601, 500), "up.bias": torch.randn(600), "scale": torch.tensor(2.0)}}
    dcp.save({**other, "epoch": 1}, checkpoint_id=folder.with_name("other"), no_dist=True)
    shutil.copy(folder.with_name("other") / METADATA, folder)


def overlap(content: Any) -> None:
    content.state_dict_metadata[BIAS].chunks.append(ChunkStorageMetadata(torch.Size([300]), torch.Size([300])))
    place = content.storage_data[MetadataIndex(BIAS, torch.Size([0]), 0)]
    content.storage_data[MetadataIndex(BIAS, torch.Size([300]), 1)] = place


def huge(content: Any) -> None:
    described, size = content.state_dict_metadata[BIAS], torch.Size([1 << 60])
    described.size, described.chunks[0] = size, ChunkStorageMetadata(torch.Size([0]), size)


def outside(content: Any) -> None:
    for place in content.storage_data.values():
        place.relative_path = "../../etc/passwd"


class Hostile:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def hostile(folder: Path) -> None:
    metadata(lambda content: setattr(content, "planner_data", Hostile(folder.with_name("harm"))))(folder)


IN_VALUES = flipped(SHARD, 600_000)
"""Flips a bit in the middle of the largest tensor."""
FAULTS = {
    "in values": (IN_VALUES, "CRC-32"),
    "truncated": (truncated(SHARD, -1000), "truncated"),
    "missing": (removed(SHARD), "is missing"),
    "interrupted": (removed(METADATA), "the save was interrupted"),
    "metadata cut": (truncated(METADATA, 200), "cannot be unpickled"),
    "of another save": (of_another_save, "does not end with its zip directory|the metadata say"),
    "hole": (metadata(lambda content: setattr(content.state_dict_metadata[BIAS], "size", torch.Size([601]))),
        "elements 600 to 601 are in no shard"),
    "overlap": (metadata(overlap), "overlaps another"),
    "huge": (metadata(huge), "the metadata say"),
    "outside": (metadata(outside), "names the file"),
    "hostile": (hostile, "which no checkpoint needs"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_and_nothing_is_written(saved, tmp_path, name):
    damage, says = FAULTS[name]
    damage(saved)
    before = sorted(saved.iterdir())
    report = verify(str(saved))
    assert not report.ok and len(report.problems) == 1
    with pytest.raises(CheckpointError, match=says) as raised:
        aggregate(saved, tmp_path / "model")
    # a search for the newest whole checkpoint passes over damage, but not over a kind that it does not know
    assert name == "hostile" or raised.type is CorruptCheckpointError
    assert not (tmp_path / "model").exists() or not any((tmp_path / "model").iterdir())
    assert sorted(saved.iterdir()) == before and not (tmp_path / "harm").exists()


def test_a_damaged_number_of_the_optimizer_is_no_step(tmp_path):
    weights = {"scale": torch.ones(1)}
    states = {"scale": {"step": torch.tensor(12345.0), "exp_avg": torch.ones(1)}}
    dcp.save({"model": weights, "optim": {"state": states}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    flipped(SHARD, struct.pack("<f", 12345.0))(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="CRC-32"):
        aggregate(tmp_path / "saved", tmp_path / "model", what="weights+optimizer")


def test_a_file_too_many_is_a_problem_and_a_left_out_value_a_note(saved):
    for name, says in (
        ("__9_0", "; a save on more ranks than this one's 1, perhaps an interrupted one, left it; remove it"),
        ("__0_9", ""),
    ):
        (saved / f"{name}.distcp").write_bytes(b"rest")
        (problem,) = verify(str(saved)).problems
        assert f"{name}.distcp is one too many: the metadata do not name it" in problem and says in problem
        (saved / f"{name}.distcp").unlink()
    report = verify(str(saved))
    assert report.ok and report.tensors == 3 and any("left out: epoch" in note for note in report.notes)


def test_the_size_of_accelerates_folder_counts_its_inner_files(tmp_path):
    saved = save(tmp_path / "runs" / "state" / "pytorch_model_fsdp_0")
    (listed,) = list_checkpoints(str(tmp_path / "runs"))
    assert (listed.tag, listed.format, listed.whole) == ("state", "dcp", True)
    assert listed.bytes == (saved / SHARD).stat().st_size


def test_values_without_checksums_are_named_until_they_are_sealed(tmp_path):
    from torch.serialization import set_crc32_options

    set_crc32_options(False)
    try:
        saved = save(tmp_path / "saved")
    finally:
        set_crc32_options(True)
    report = verify(str(saved))
    assert report.ok and any("without checksums" in note and ".distcp" in note for note in report.notes)
    report = verify(str(saved), seal_it=True)
    assert report.ok and any(SEAL in note for note in report.notes)
    assert not any("without checksums" in note for note in verify(str(saved)).notes)
    IN_VALUES(saved)
    (problem,) = verify(str(saved)).problems
    assert "do not match their CRC-32, in weight of up.weight" in problem
    with pytest.raises(CheckpointError, match="CRC-32"):
        aggregate(saved, tmp_path / "model")


def test_a_seal_notices_what_was_added_changed_or_damaged(saved, tmp_path):
    assert verify(str(saved), seal_it=True).ok and verify(str(saved)).ok
    read = []
    real = Folder.crc32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Folder, "crc32", lambda self, *args, **options: read.append(args[:3]) or real(self, *args, **options)
        )
        assert verify(str(saved)).ok
    in_shards = sum(end - start for name, start, end in read if name == SHARD)
    assert 1 <= in_shards / (saved / SHARD).stat().st_size < 1.1  # once; pickles twice, since opening reads them
    aggregate(saved, tmp_path / "model")
    with (saved / ".metadata").open("ab") as file:
        file.write(b"more")
    (problem,) = verify(str(saved)).problems
    assert ".metadata has" in problem and "when it was sealed" in problem
    (saved / SEAL).write_text("{")
    (problem,) = verify(str(saved)).problems
    assert f"{SEAL} is damaged" in problem
    with pytest.raises(CheckpointError, match="remove it if you do without the seal"):
        aggregate(saved, tmp_path / "model", overwrite=True)


def shards(folder: Path) -> None:
    """Save a tensor in files of two ranks, and a file more of the second, as torch's HuggingFaceStorageWriter does."""
    folder.mkdir()
    for rank, number, offset in ((1, 1, 0), (2, 1, 2), (2, 2, 4)):
        info = {"w": {"saved_offsets": [offset, 0]}}
        name = f"shard-{rank:05d}-model-{number:05d}-of-{rank:05d}.safetensors"
        save_file({"w": torch.ones(2, 3)}, folder / name, {"DCP_SHARDING_INFO": json.dumps(info)})


def ranks(folder: Path) -> None:
    """Save a file a rank of a model and its optimizer."""
    folder.mkdir()
    for rank in range(2):
        states = {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}},
            "param_groups": [{"params": [0]}],
        }
        for kind, state in (("model", {"w": torch.ones(2)}), ("optim", states)):
            torch.save(state, folder / f"{kind}_world_size_2_rank_{rank}.pt")


def test_files_of_two_ranks_are_one_checkpoint(tmp_path):
    ranks(tmp_path / "saved")
    source = find_source(str(tmp_path / "saved"))
    assert [(tensor.kind, tensor.name) for tensor in source.tensors] == [("master", "w"), ("exp_avg", "w")]
    assert source.optimizer is not None and source.optimizer.scalars == {"step": {"w": 3.0}}
    assert source.world_size == 2 and not any("left out" in note for note in source.notes)


def of_another_step(folder: Path) -> None:
    path = folder / "optim_world_size_2_rank_1.pt"
    state = torch.load(path)
    state["state"][0]["step"] += 1
    torch.save(state, path)


FIRST = "shard-00001-model-00001-of-00001.safetensors"


@pytest.mark.parametrize(("make", "damage", "says"), [
    (shards, removed(FIRST), "missing: shard-00001"),
    (shards, removed("shard-00002-model-00001-of-00002.safetensors"), "missing: number 1 of 2 of shard 2"),
    (shards, removed("shard-00002-model-00002-of-00002.safetensors"), "missing: number 2 of 2 of shard 2"),
    (shards, lambda folder: save_file({"w": torch.ones(2)}, folder / FIRST, {"DCP_SHARDING_INFO": "[" * 100_000}),
     "nested too deeply"),
    (ranks, of_another_step, "is of another step than .*: optimizer.state.0.step"),
    (ranks, removed("model_world_size_2_rank_1.pt"), r"ranks \[1\] are missing"),
    (ranks,
     lambda folder: shutil.copy(folder / "model_world_size_2_rank_0.pt", folder / "model_world_size_2_rank_2.pt"),
     "model_world_size_2_rank_2.pt is one too many: 2 ranks saved"),
    (ranks, lambda folder: torch.save({}, folder / "optim_world_size_4_rank_3.pt"),
     r"files of saves of \[2, 4\] ranks; all files of \[2\] are there: move those of the other saves"),
    (lambda folder: torch.save({}, folder.mkdir() or folder / f"model_world_size_{1 << 60}_rank_0.pt"),
     lambda folder: None, r"ranks \[1, 2, .* are missing"),
])  # fmt: skip
def test_files_of_ranks_that_do_not_belong_together_are_named(tmp_path, make, damage, says):
    saved = tmp_path / "saved"
    make(saved)
    damage(saved)
    with pytest.raises(CheckpointError, match=says):
        aggregate(saved, tmp_path / "model")
    report = verify(str(saved))
    assert not report.ok and re.search(says, " ".join(report.problems))


def test_verify_says_what_torchs_files_cannot_tell(saved, tmp_path):
    def notes() -> str:
        return " ".join(verify(str(saved)).notes)

    assert "do not name their save" in notes() and ".metadata has no checksum" in notes()
    verify(str(saved), seal_it=True)
    assert "do not name their save" not in notes() and "has no checksum" not in notes()
    shards(tmp_path / "shards")
    assert "a missing last one is not noticed" in " ".join(verify(str(tmp_path / "shards")).notes)


@pytest.mark.parametrize("make", [save, shards])
def test_a_seal_protects_names_too_and_is_not_renewed_over_damage(tmp_path, make):
    saved = tmp_path / "saved"
    make(saved)
    verify(str(saved), seal_it=True)
    name, old, new = (METADATA, b"up.bias", b"up.bios") if make is save else (FIRST, b"w", b"x")
    for path in (saved / name, *saved.glob("shard-00002-*")):
        path.write_bytes(path.read_bytes().replace(old, new))
    for action in (lambda: aggregate(saved, tmp_path / "model"), lambda: convert(saved, tmp_path / "to", to="dcp")):
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            action()
    for again in (True, False):
        assert f"{name} is damaged" in verify(str(saved), seal_it=again).problems[0]
    seal = json.loads((saved / SEAL).read_text())
    (saved / SEAL).write_text(json.dumps({**seal, "block": 0}))
    with pytest.raises(CheckpointError, match="in blocks of 0"):
        aggregate(saved, tmp_path / "model")
