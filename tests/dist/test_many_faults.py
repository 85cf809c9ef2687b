"""Generated faults of both formats: an aggregation is refused or right, ``verify`` sees each, and nothing hangs."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoint_files
import deepspeed_states
import pytest
import torch
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, verify
from ort_zero.errors import CheckpointError

FAULTS = 600


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 1, 8))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randrange(1, 99)))


def blank(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.randrange(1, 600))
    data[start:end] = bytes(end - start)
    path.write_bytes(data)


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def swap(path: Path, chance: random.Random) -> None:
    other = chance.choice(sorted(set(path.parent.iterdir()) - {path}))
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def from_another_save(path: Path, chance: random.Random) -> None:
    shutil.copy(path.parent.parent / "other" / path.name, path)


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    flip, flip, cut, lengthen, blank, remove, swap, from_another_save,
)  # fmt: skip


def write_ours(folder: Path, seed: int) -> None:
    checkpoint_files.write(folder, checkpoint_files.some_tensors(seed), save_id=f"save{seed}")


def write_deepspeeds(folder: Path, stage: int, step: int) -> None:
    deepspeed_states.write(folder, stage, 2, step=step)


def tensors_in(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of an aggregated model and its optimizer."""
    found = {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}
    return {name: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            for name, value in found.items()}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", ["ours", "zero2", "zero3"])
def test_generated_faults(tmp_path, form):
    seed = 16
    chance = random.Random(f"{form} {seed}")
    print(f"seed {form} {seed}")
    for name, number in (("whole", 0), ("other", 1)):
        if form == "ours":
            write_ours(tmp_path / name, number)
        else:
            write_deepspeeds(tmp_path / name, int(form[-1]), 4 + number)
    aggregate(tmp_path / "whole", tmp_path / "right", what="weights+optimizer", progress=False)
    right = tensors_in(tmp_path / "right")
    contents = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    refused = noticed = 0
    for number in range(FAULTS // 3):
        folder, out = tmp_path / "c", tmp_path / "out"
        shutil.copytree(tmp_path / "whole", folder)
        file = folder / chance.choice(sorted(contents))
        kind = chance.choice(KINDS)
        kind(file, chance)
        changed = {path.name: path.read_bytes() for path in folder.iterdir()} != contents
        where = f"{form} {seed}, fault {number}: {kind.__name__} of {file.name}"
        harmless = False
        try:
            aggregate(folder, out, what="weights+optimizer", progress=False)
            assert tensors_in(out) == right, f"{where}: the output is wrong"
            harmless = form != "ours"  # the zip's directory has fields that nobody reads
        except CheckpointError:
            refused += 1
            assert not out.exists() or not [path for path in out.iterdir() if not path.name.startswith(".")], where
        try:
            ok = verify(folder, progress=False).ok
        except CheckpointError:
            ok = False
        assert not ok or harmless or not changed, f"{where}: verify calls it whole"
        noticed += not ok
        shutil.rmtree(folder)
        shutil.rmtree(out, ignore_errors=True)
    print(f"{refused} refused by aggregate, {noticed} noticed by verify")
    assert refused > FAULTS // 12 and noticed > FAULTS // 6
