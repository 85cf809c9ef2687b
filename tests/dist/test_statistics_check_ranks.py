"""A check of real ranks: DistributedDataParallel and ZeRO are healthy; a step past the wrapper is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed_setup import start
from rank_processes.ranks import run_on_ranks
from seeded_faults import batch, build
from test_statistics_ranks import collect

from ort_zero.statistics.check.checked_run import check

STEPS = 4
HEALTHY = ("ddp", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def ddp(folder: Path, past_the_wrapper: int | None = None) -> None:
    """Train in DistributedDataParallel; from a step on call the module inside, which reduces no gradients."""
    from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber

    model = torch.nn.parallel.DistributedDataParallel(build("bert"), find_unused_parameters=True)
    session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(folder))])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        called = model if past_the_wrapper is None or step < past_the_wrapper else model.module
        called(**batch("bert", dist.get_rank(), step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    session.remove()


def runs(folder: str) -> None:
    """Collect one run after the other, each in a folder of its own."""
    start()
    ddp(Path(folder, "ddp"))
    ddp(Path(folder, "past the wrapper"), past_the_wrapper=2)
    for stage in range(4):
        collect(str(Path(folder, f"ZeRO-{stage}")), "bert", ort=False, stage=stage, steps=STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checked")
    run_on_ranks(runs, 2, str(path))
    return path


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_ranks_have_no_finding(folder, name):
    checked = check(folder / name)
    assert not checked.findings and len(checked.run.steps) == STEPS, checked.findings
    assert any("ZeRO-3" in note for note in checked.notes) == (name == "ZeRO-3")
    assert any("flat copies" in note for note in checked.notes) == (name in HEALTHY[2:]), checked.notes
    assert not any("replicas" in note and "not known" in note for note in checked.notes)


def test_a_step_past_the_wrapper_is_named(folder):
    checked = check(folder / "past the wrapper")
    first = checked.findings[0]
    assert (first.kind, first.step, first.rank, first.direction) == ("replicas apart", 2, 1, "backward")
