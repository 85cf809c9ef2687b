"""Sharded checkpoints of real engines: another world size, another stage, another precision, another tool."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_engines import (
    Odd,
    engine_of,
    load_all,
    save_all,
    train,
)
from deepspeed_checkpoints import read
from rank_processes.ranks import run_on_ranks

from ort_zero.checkpoint import aggregate, verify
from ort_zero.checkpoint.finding import find_source

WORLDS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
VARIANTS = {
    "round_robin": {"stage": 2, "round_robin_gradients": True},
    "sub_groups": {"stage": 3, "sub_group_size": 40},
    "small_windows": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 10},
    "bf16_optimizer": {"stage": 1, "precision": "bf16", "accumulate": "fp32"},
}


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the masters of this rank, by name and first element."""
    from ort_zero.compat.deepspeed_state import EngineState

    return {
        f"{span.name}@{span.start}": flat.master.narrow(0, span.offset, span.length).clone()
        for flat in EngineState(engine).flats()
        for span in flat.places
    }


def cross_precision(folder: str, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Save a bf16 and an fp32 engine, load each into one of the other precision; return all four's masters."""
    found = {}
    for precision in ("bf16", "fp32"):
        engine = engine_of(stage, precision)
        train(engine, range(4))
        engine.save_checkpoint(folder, tag=f"{precision}_{stage}")
        type(engine).save_checkpoint.__wrapped__(engine, f"{folder}/deepspeed", tag=f"{precision}_{stage}")
        found[precision] = masters_of(engine)
        engine.destroy()
    for precision, other in (("bf16", "fp32"), ("fp32", "bf16")):
        engine = engine_of(stage, other, seed=1)
        engine.load_checkpoint(f"{folder}/deepspeed", tag=f"{precision}_{stage}")
        theirs = masters_of(engine)
        train(engine, range(4, 5))
        engine.load_checkpoint(folder, tag=f"{precision}_{stage}")
        found[f"{precision} in {other}"] = masters_of(engine)
        assert all(torch.equal(theirs[name], master) for name, master in masters_of(engine).items())
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        assert all(w.dtype == (torch.float32 if other == "fp32" else torch.bfloat16) for w in weights.values())
        train(engine, range(4, 6))
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder with one checkpoint per world size and stage, and the losses that each run had afterwards."""
    folder = tmp_path_factory.mktemp("sharded")
    losses = {}
    for world in WORLDS:
        plans = [{"name": f"w{world}_s{stage}", "stage": stage} for stage in STAGES]
        if world == 2:
            plans += [{"name": f"offload_s{s}", "stage": s, "offload": True} for s in (1, 2, 3)]
            plans += [{"name": f"bf16_s{s}", "stage": s, "precision": "bf16"} for s in (1, 2, 3)]
            plans += [{"name": name, **options} for name, options in VARIANTS.items()]
        losses |= run_on_ranks(save_all, world, str(folder), plans, timeout=800)[0]
    return folder, losses


@pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_training_goes_on_at_any_world_size_and_stage(saved, world):
    folder, losses = saved
    tags = [f"w{n}_s{stage}" for n in WORLDS for stage in STAGES]
    pairs = itertools.product(tags, STAGES)
    plans = [{"name": f"{tag} at {stage}", "tag": tag, "stage": stage} for tag, stage in pairs]
    theirs = [
        {"name": f"w2_s{n} at {stage} from DeepSpeed's", "folder": f"deepspeed/w2_s{n}", "tag": "own", "stage": stage,
         "save_as": f"w{world}_s{stage} from {n}"}
        for n, stage in itertools.product((1, 2, 3), STAGES)
    ]  # fmt: skip
    after = run_on_ranks(load_all, world, str(folder), plans + theirs, timeout=800)[0]
    assert len(after) == len(plans) + len(theirs)
    for name, found in after.items():
        expected = losses[name.split(" at ")[0]]
        assert max(abs(a - b) for a, b in zip(found, expected)) <= 1e-5, name
        assert len(found) == 3
    for plan in theirs:
        assert_same_state(folder / plan["folder"], "own", folder / "again", plan["save_as"])


def assert_same_state(folder: Path, tag: str, other_folder: Path, other_tag: str) -> None:
    """Compare masters, moments, numbers and hyper-parameters of two checkpoints, bit by bit."""
    one, other = find_source(str(folder), tag), find_source(str(other_folder), other_tag)
    tensors, others = ({(t.kind, t.name): read(s, t) for t in s.tensors} for s in (one, other))
    assert {kind for kind, _ in tensors} == {"master", "weight", "buffer", "exp_avg", "exp_avg_sq"}
    assert tensors.keys() == others.keys()
    for key, value in tensors.items():
        assert value.dtype == others[key].dtype and torch.equal(value, others[key]), key
    assert one.optimizer.scalars == other.optimizer.scalars
    groups, others = ({frozenset(g.names): g.options for g in s.optimizer.groups} for s in (one, other))
    assert groups.keys() == others.keys()
    for names, options in groups.items():
        assert {key: others[names][key] for key in ("lr", "betas", "eps", "weight_decay")} == {
            key: options[key] for key in ("lr", "betas", "eps", "weight_decay")
        }


def test_bf16_and_offload_go_on_exactly_as_they_would_have(saved):
    folder, losses = saved
    plans = [{"name": f"bf16_s{s}", "tag": f"bf16_s{s}", "stage": s, "precision": "bf16"} for s in (1, 2, 3)]
    plans += [{"name": f"offload_s{s}", "tag": f"offload_s{s}", "stage": s, "offload": True} for s in (1, 2, 3)]
    plans += [{"name": name, "tag": name, **options} for name, options in VARIANTS.items()]
    plans += [{**p, "name": f"{p['name']} from DeepSpeed's", "folder": f"deepspeed/{p['tag']}", "tag": "own"}
              for p in plans]  # fmt: skip
    # "same": the worker compares every bit of the state; bf16 losses themselves differ from process to process by one
    # rounding of torch's CPU kernels, with equal weights
    plans = [{**plan, "same": True} for plan in plans]
    after = run_on_ranks(load_all, 2, str(folder), plans, timeout=800)[0]
    for name, found in after.items():
        expected = losses[name.removesuffix(" from DeepSpeed's")]
        assert found == pytest.approx(expected, abs=2e-3 if name.startswith("bf16") else 0), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_move_between_precisions(tmp_path, stage):
    for found in run_on_ranks(cross_precision, 2, str(tmp_path), stage, timeout=800):
        for precision, other in (("bf16", "fp32"), ("fp32", "bf16")):
            assert found[precision].keys() == found[f"{precision} in {other}"].keys() or stage == 1
            for name, master in found[precision].items():
                loaded = found[f"{precision} in {other}"].get(name)
                if loaded is not None and loaded.shape == master.shape:
                    assert torch.equal(loaded, master), name
        # the two runs differ, so equal masters do not come from nothing having been loaded
        assert any(not torch.equal(found["bf16"][n], found["fp32"][n]) for n in found["bf16"] if n in found["fp32"])


def test_aggregation_of_ours_equals_deepspeeds_own_tool(saved, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import load_file

    folder, losses = saved
    for tag in losses:
        if tag.endswith("_s0") or tag == "bf16_optimizer":  # DeepSpeed's tool reads neither
            continue
        out = tmp_path / tag
        report = aggregate(str(folder), str(out), tag=tag, progress=False)
        ours = load_file(out / "model.safetensors")
        theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder / "deepspeed" / tag), "own")
        stored = {name for name in theirs if name != "head.weight"}
        # DeepSpeed's tool drops frozen parameters of ZeRO-1
        assert set(ours) - stored == ({"frozen.weight", "frozen.bias"} if tag.endswith("_s1") else set()), tag
        for name in stored:
            assert torch.equal(ours[name], theirs[name].to(ours[name].dtype)), (tag, name)
            if "frozen" not in name:
                assert ours[name].dtype == theirs[name].dtype
        assert report.bytes_read <= 1.05 * sum(t.numel() * t.element_size() for t in ours.values())


def test_every_checkpoint_verifies(saved):
    folder, losses = saved
    for tag in losses:
        report = verify(str(folder), tag, progress=False)
        assert report.ok, report.problems
        assert report.tensors > 10


def test_optimizer_state_of_torch_goes_on(saved, tmp_path):
    from safetensors.torch import load_file

    from ort_zero.checkpoint import load_optimizer_state

    folder, losses = saved
    aggregate(str(folder), str(tmp_path / "out"), tag="w3_s3", what="weights+optimizer", progress=False)
    model = Odd(seed=1)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    load_optimizer_state(optimizer, str(tmp_path / "out"), model)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    found = []
    for step in range(4, 6):  # the scheduler's next rate is not the optimizer's business: one step's loss is exact
        ids = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = model(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found == pytest.approx(losses["w3_s3"][:2], abs=2e-3)
    assert abs(found[0] - losses["w3_s3"][0]) <= 1e-5
