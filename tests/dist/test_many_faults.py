"""Generated faults of both formats: aggregating and loading are refused or right, ``verify`` sees each, nothing hangs.

A load that is refused leaves the engine as it was, bit by bit.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoint_files
import deepspeed_states
import pytest
import torch
from checkpoint_engines import values_of
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, load, verify
from ort_zero.checkpoint.finding import open_checkpoint
from ort_zero.checkpoint.records import BUFFER, MASTER
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


@contextmanager
def engine_for(folder: Path) -> Iterator[Any]:
    """Give an engine on one rank with the parameters and buffers that a checkpoint holds."""
    import deepspeed

    source = open_checkpoint(str(folder))
    model = torch.nn.Module()
    for name, tensor in source.weights().items():
        *path, last = name.split(".")
        place = model
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        value = torch.zeros(tensor.shape, dtype=torch.int64 if tensor.dtype == "I64" else torch.float32)
        if tensor.kind == BUFFER:
            place.register_buffer(last, value)
        else:
            place.register_parameter(last, torch.nn.Parameter(value, requires_grad=tensor.kind == MASTER))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "ort_zero": {"backend": "torch"},
    }
    with pytest.MonkeyPatch.context() as patch:
        # which fails for parameters without dimensions
        patch.setattr(deepspeed.DeepSpeedEngine, "_broadcast_model", lambda engine: None)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        try:
            yield engine
        finally:
            engine.destroy()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Compare what an engine trains with, bit by bit."""
    return one.keys() == other.keys() and all(
        checkpoint_files.raw(value) == checkpoint_files.raw(other[key]) for key, value in one.items()
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("form", ["ours", "zero2", "zero3"])
def test_generated_faults(tmp_path, form, one_rank):
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
    counts = dict.fromkeys(("refused by aggregate", "refused by load", "noticed by verify"), 0)
    with engine_for(tmp_path / "whole") as engine:
        load(engine, str(tmp_path / "whole"))
        loaded = values_of(engine)
        load(engine, str(tmp_path / "other"))
        before = values_of(engine)
        assert not same(loaded, before)
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
                counts["refused by aggregate"] += 1
                assert not out.exists() or not [path for path in out.iterdir() if not path.name.startswith(".")], where
            try:
                load(engine, str(folder))
                assert same(values_of(engine), loaded), f"{where}: what was loaded is wrong"
                load(engine, str(tmp_path / "other"))
            except CheckpointError:
                counts["refused by load"] += 1
            assert same(values_of(engine), before), f"{where}: the engine was changed"
            try:
                ok = verify(folder, progress=False).ok
            except CheckpointError:
                ok = False
            assert not ok or harmless or not changed, f"{where}: verify calls it whole"
            counts["noticed by verify"] += not ok
            shutil.rmtree(folder)
            shutil.rmtree(out, ignore_errors=True)
    print(f"{FAULTS // 3} faults of {form}: {counts}")
    assert min(counts.values()) > FAULTS // 12 and counts["noticed by verify"] > FAULTS // 6
