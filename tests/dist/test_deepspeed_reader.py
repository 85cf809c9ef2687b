"""Our reader of DeepSpeed's checkpoints against DeepSpeed's own converter and the live engines, bit by bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from deepspeed_checkpoints import (
    ALL,
    BF16_OPTIMIZER,
    FEW,
    STEPS,
    TRAINED,
    Odd,
    Variant,
    assert_same,
    checkpoint_of,
    read,
    values,
)

from ort_zero.checkpoint.finding import find_source
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT
from ort_zero.errors import CheckpointError

CASES = [pytest.param(world, v, id=f"{world}-{v.name}") for world in (1, 2, 3) for v in (FEW if world == 1 else ALL)]
ZERO = [case for case in CASES if case.values[1].stage]
BUFFERS = {"count", "table"}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def frozen(variant: Variant, held: dict[str, dict]) -> set[str]:
    """Return what no optimizer updates; DeepSpeed before 0.19 gives it the parameter without elements too."""
    return {"frozen.weight"} if variant.stage == 3 else {"frozen.weight", "nothing"} - held[TRAINED].keys()


@pytest.fixture
def opened(request, tmp_path_factory, world, variant):
    folder, held = checkpoint_of(tmp_path_factory, world, variant)
    return find_source(str(folder)), held


@pytest.mark.parametrize(("world", "variant"), ZERO)
def test_weights_are_those_of_zero_to_fp32(opened, world: int, variant: Variant):
    source, held = opened
    mine = {name: read(source, tensor) for name, tensor in source.weights().items()}
    mine |= {alias: mine[name] for alias, name in source.aliases.items()}
    if variant.name == BF16_OPTIMIZER:
        expected = held["module"] | held[MASTER] | {"head.weight": held[MASTER]["embed.weight"]}
    else:
        expected = held["zero_to_fp32"]
    if variant.stage == 1 and variant.name != BF16_OPTIMIZER:  # it drops what is frozen
        assert not frozen(variant, held) & set(expected)
        expected = expected | {name: held["module"][name] for name in frozen(variant, held)}
    if expected["count"].is_floating_point():  # DeepSpeed before 0.19 makes fp32 of all buffers
        stored = {"count": torch.int64, "table": PRECISIONS[variant.dtype]}
        expected = expected | {name: expected[name].to(dtype) for name, dtype in stored.items()}
    assert set(expected) == set(Odd(variant.stage < 3).state_dict())
    assert_same(mine, expected)


@pytest.mark.parametrize(("world", "variant"), [c for c in ZERO if c.values[1].steps])
def test_masters_and_moments_are_those_of_the_live_optimizer(opened, world: int, variant: Variant):
    source, held = opened
    for kind in (MASTER, "exp_avg", "exp_avg_sq"):
        assert held[kind].keys() == held[TRAINED].keys() and len(held[kind].keys() - {"nothing"}) == 8
        assert_same(values(source, kind), held[kind])
    assert source.optimizer.scalars["step"] == dict.fromkeys(held[MASTER], float(STEPS))
    assert {t.kind for t in source.tensors} == {MASTER, WEIGHT, BUFFER, "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("world", "variant"), CASES)
def test_what_is_known_besides_tensors(opened, world: int, variant: Variant):
    source, held = opened
    assert (source.world_size, source.zero_stage, source.step) == (world, variant.stage, variant.steps)
    assert (source.tag, source.format) == (f"global_step{variant.steps}", "deepspeed")
    assert source.aliases == {"head.weight": "embed.weight"}
    assert set(source.by_name(BUFFER)) == BUFFERS
    if variant.stage == 0:
        # DeepSpeed before 0.19 writes masters and what is frozen for bf16 without ZeRO too
        written = any(Path(source.root).glob("*_optim_states.pt"))
        assert (source.optimizer is not None) == written and source.frozen <= {"frozen.weight"}
        return
    assert source.frozen == frozen(variant, held)
    groups = source.optimizer.groups
    assert {n for g in groups for n in g.names} == set(source.by_name(MASTER))
    if variant.name.endswith("elastic"):
        return
    assert groups[0].options["betas"] == [0.9, 0.98] and groups[0].options["lr"] == 0.01
    assert [g.options["weight_decay"] for g in groups] == [0.1, 0.0][: variant.groups]
    if variant.groups == 2:
        assert set(groups[1].names) == {"scale", "first.bias", "last.bias", "norm.weight", "norm.bias"}


@pytest.mark.parametrize(("world", "variant"), [c for c in CASES if not c.values[1].stage])
def test_stage_0_gives_the_weights_of_the_module(opened, world: int, variant: Variant):
    source, held = opened
    mine = {name: read(source, tensor) for name, tensor in source.weights().items()}
    if source.optimizer is not None:  # then they are the masters, of which the module's are made
        mine = {name: value.to(held["module"][name].dtype) for name, value in mine.items()}
    assert_same(mine | {"head.weight": mine["embed.weight"]}, held["module"])


@pytest.mark.parametrize(("world", "variant"), CASES)
def test_verify_finds_nothing(world: int, variant: Variant, tmp_path_factory):
    folder, _ = checkpoint_of(tmp_path_factory, world, variant)
    report = verify(str(folder), progress=False)
    assert report.ok, report.problems
    assert report.bytes >= sum(f.stat().st_size for f in Path(report.root).iterdir()) * 0.3


@pytest.mark.parametrize(("world", "variant"), [c for c in CASES if c.id in ("2-stage1", "2-stage3")])
def test_without_optimizer_files(world: int, variant: Variant, tmp_path_factory, tmp_path):
    source, held = checkpoint_of(tmp_path_factory, world, variant)
    folder = Path(shutil.copytree(source, tmp_path / "c"))
    for path in folder.glob("*/*_optim_states.pt"):
        path.unlink()
    if variant.stage == 3:
        with pytest.raises(CheckpointError, match=r"no \*_optim_states.pt.*save_16bit_model"):
            find_source(str(folder))
        return
    source = find_source(str(folder))
    mine = {name: read(source, tensor) for name, tensor in source.weights().items()}
    assert_same(mine | {"head.weight": mine["embed.weight"]}, held["module"])
    assert source.by_name(MASTER) == {} and source.optimizer is None and source.notes
    assert source.frozen == frozen(variant, held)
