"""What one training has saved goes on in another one: with other ranks, stages, precisions, formats and optimizers.

One matrix, in which each pair of two choices comes at least once. All ranks see the same batches, so that the averaged
gradients do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_engines import Odd, engine_of, made, train, whole_parameters_untouched
from deepspeed_checkpoints import read
from optimizer_kinds import BY_DEEPSPEED, BY_SHARD, OPTIMIZERS
from rank_processes.ranks import run_on_ranks
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, convert, load_optimizer_state, verify
from ort_zero.checkpoint.finding import find_source

KINDS = OPTIMIZERS | BY_DEEPSPEED
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "offload": {"offload": True},
    "round_robin": {"round_robin_gradients": True},
    "sub_groups": {"sub_group_size": 40},
    "small_windows": {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 10},
    "bf16_optimizer": {"accumulate": "fp32"},
}
"""More arguments of :func:`engine_of`."""


class Plan(NamedTuple):
    """One way to train."""

    kind: str
    stage: int
    world: int
    precision: str = "fp32"
    variant: str = ""

    @property
    def name(self) -> str:
        """Return a name for folders."""
        return "-".join(str(part) for part in self if part)

    def engine(self, seed: int = 0) -> Any:
        """Return an engine; Adam's has two parameter groups and a scheduler."""
        if self.kind == "adam":
            return engine_of(self.stage, self.precision, seed, **VARIANTS[self.variant])
        kind, options = KINDS[self.kind]
        return made(self.stage, kind, model=Odd(seed), **options)


class Row(NamedTuple):
    """What is saved, and what goes on from it."""

    saved: Plan
    loaded: Plan
    theirs: bool
    """Whether it goes on from DeepSpeed's own files."""

    @property
    def name(self) -> str:
        """Return a name for folders."""
        return f"{self.saved.name} in {self.loaded.name}{' from DeepSpeed' if self.theirs else ''}"


ADAM = [Plan("adam", stage, world) for world in (1, 2, 3) for stage in (0, 1, 2, 3)]
VARIED = [
    *(Plan("adam", stage, 2, "bf16") for stage in (1, 2, 3)),
    *(Plan("adam", stage, 2, variant="offload") for stage in (1, 2, 3)),
    Plan("adam", 2, 2, variant="round_robin"),
    Plan("adam", 3, 2, variant="sub_groups"),
    Plan("adam", 3, 2, variant="small_windows"),
    Plan("adam", 1, 2, "bf16", "bf16_optimizer"),
]
# the states of Muon lie whole on each rank under ZeRO-1 and 2, and saving refuses them
OTHERS = [Plan(kind, stage, 2) for kind in KINDS for stage in (1, 2, 3) if kind != "muon" or stage == 3]
SAVED = [*ADAM, *VARIED, *OTHERS]


def rows() -> Iterator[Row]:
    """Yield the matrix; what two ranks have saved does not go on on three, which are launched before."""
    for number, plan in enumerate(ADAM):
        for world in (1, 2, 3)[: 2 if plan.world == 2 else 3]:
            for theirs in (False, True)[: 2 if plan.stage else 1]:
                yield Row(plan, plan._replace(world=world, stage=(number + world + 2 * theirs) % 4), theirs)
    for theirs in (False, True):
        for plan in VARIED:
            yield Row(plan, plan, theirs)
        for stage in (1, 2, 3):
            full, half = Plan("adam", stage, 2), Plan("adam", stage, 2, "bf16")
            yield Row(full, half, theirs)
            yield Row(half, full, theirs)
    for number, plan in enumerate(OTHERS):
        stage = plan.stage if plan.kind == "muon" else 1 + (number + number // 3) % 3
        yield Row(plan, plan._replace(world=1 + number % 2, stage=stage), False)


ROWS = list(rows())


# -- what each rank runs -----------------------------------------------------------------------------------------------


def train_all(folder: str, world: int, saves: bool, goes_on: bool) -> None:
    """Save all plans of this number of ranks, and go on from what has been saved."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    client = {"epoch": 3, "rng": torch.arange(3)}
    for plan in SAVED if saves else ():
        if plan.world == world:
            engine = plan.engine()
            train(engine, range(4))
            with whole_parameters_untouched(engine):
                engine.save_checkpoint(f"{folder}/{plan.name}", tag="saved", client_state=client)
            if plan.kind == "adam" and plan.stage:
                own = type(engine).save_checkpoint.__wrapped__
                own(engine, f"{folder}/deepspeed/{plan.name}", tag="saved", client_state=client)
            train(engine, range(4, 7))
            engine.save_checkpoint(f"{folder}/{plan.name}", tag="trained")
            engine.destroy()
    for row in ROWS if goes_on else ():
        if row.loaded.world == world:
            engine = row.loaded.engine(seed=1)
            source = f"{folder}/deepspeed/{row.saved.name}" if row.theirs else f"{folder}/{row.saved.name}"
            where, found = engine.load_checkpoint(source, tag="saved")
            assert where.endswith("saved") and found["epoch"] == 3 and found["rng"].tolist() == [0, 1, 2], found
            assert engine.global_steps == 4 and int(engine.module.calls) == 4
            engine.save_checkpoint(f"{folder}/{row.name}", tag="loaded")
            train(engine, range(4, 7))
            engine.save_checkpoint(f"{folder}/{row.name}", tag="trained")
            engine.destroy()


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all checkpoints; each number of ranks is launched once, one rank before and after."""
    folder = tmp_path_factory.mktemp("resumes")
    for world, saves, goes_on in ((1, True, False), (3, True, True), (2, True, True), (1, False, True)):
        run_on_ranks(train_all, world, str(folder), world, saves, goes_on, timeout=800)
    return folder


def state_of(folder: Path, tag: str, kinds: tuple[str, ...] = ()) -> tuple[dict[tuple[str, str], torch.Tensor], Any]:
    """Return the tensors of a checkpoint, of some kinds or of all, and what it knows of the optimizer."""
    source = find_source(str(folder), tag)
    tensors = {(t.kind, t.name): read(source, t) for t in source.tensors if not kinds or t.kind in kinds}
    return tensors, source.optimizer


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_training_goes_on(row: Row, folder: Path):
    precisions = {row.saved.precision, row.loaded.precision}
    kinds = ("master", "exp_avg", "exp_avg_sq") if len(precisions) > 1 else ()
    saved, of_saved = state_of(folder / row.saved.name, "saved", kinds)
    loaded, of_loaded = state_of(folder / row.name, "loaded", kinds)
    assert len(saved) > 5
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert of_loaded.scalars == of_saved.scalars
    options = [{frozenset(group.names): group.options for group in each.groups} for each in (of_saved, of_loaded)]
    for names, before in options[0].items():
        now = options[1][names]
        assert all(now[key] == before[key] for key in ("lr", "betas", "eps", "weight_decay") if key in before)
    if row.saved.kind in BY_SHARD or "bf16" in precisions:
        return  # its steps depend on how ZeRO divides it, or on roundings of torch's kernels
    tolerance = {"rtol": 0, "atol": 0} if row.loaded == row.saved else {"rtol": 1e-5, "atol": 1e-6}
    wanted, found = (state_of(folder / name, "trained")[0] for name in (row.saved.name, row.name))
    torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.parametrize("plan", SAVED, ids=lambda plan: plan.name)
def test_every_kind_verifies_and_comes_back_from_deepspeeds_format(plan: Plan, folder: Path, tmp_path: Path):
    report = verify(str(folder / plan.name), "saved", progress=False)
    assert report.ok and report.tensors > 5, report.problems
    if plan.kind != "adam":
        there, back = str(tmp_path / "deepspeed"), str(tmp_path / "back")
        convert(str(folder / plan.name), there, to="deepspeed", tag="saved", world_size=2, progress=False)
        convert(there, back, to="ort_zero", progress=False)
        expected, found = (state_of(place, "saved")[0] for place in (folder / plan.name, tmp_path / "back"))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("plan", [plan for plan in (*ADAM, *VARIED[:-1]) if plan.stage], ids=lambda plan: plan.name)
def test_aggregation_of_ours_equals_deepspeeds_own_tool(plan: Plan, folder: Path, tmp_path: Path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    report = aggregate(str(folder / plan.name), str(tmp_path / "out"), tag="saved", progress=False)
    ours = load_file(tmp_path / "out" / "model.safetensors")
    theirs = get_fp32_state_dict_from_zero_checkpoint(str(folder / "deepspeed" / plan.name), "saved")
    stored = {name for name in theirs if name != "head.weight"}
    # DeepSpeed's tool drops frozen parameters of ZeRO-1
    assert set(ours) - stored == ({"frozen.weight", "frozen.bias"} if plan.stage == 1 else set())
    for name in stored:
        assert torch.equal(ours[name], theirs[name].to(ours[name].dtype)), name
        assert "frozen" in name or ours[name].dtype == theirs[name].dtype
    assert report.bytes_read <= 1.05 * sum(t.numel() * t.element_size() for t in ours.values())


def test_an_optimizer_of_torch_goes_on(one_rank: None, folder: Path, tmp_path: Path):
    source = str(folder / Plan("adam", 3, 3).name)
    aggregate(source, str(tmp_path / "out"), tag="saved", what="weights+optimizer", progress=False)
    model = Odd(seed=1)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=False)
    decay, rest = ([p for p in model.parameters() if p.requires_grad and (p.dim() > 1) == large] for large in (1, 0))
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    load_optimizer_state(optimizer, str(tmp_path / "out"), model)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    loss = model(torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(4)))
    loss.backward()
    optimizer.step()
    engine = Plan("adam", 0, 1).engine(seed=1)
    engine.load_checkpoint(source, tag="saved")
    train(engine, range(4, 5))
    wanted = dict(engine.module.named_parameters())
    torch.testing.assert_close(dict(model.named_parameters()), wanted, rtol=1e-5, atol=1e-6)
    engine.destroy()
