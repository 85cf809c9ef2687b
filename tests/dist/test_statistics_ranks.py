"""From two trainings to the module that is wrong: statistics by real engines on 2 ranks, compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks
from seeded_faults import FAULTS, PARTS, batch, build

import ort_zero
from ort_zero.statistics.compare.compare_runs import compare
from ort_zero.statistics.files import file_name, open_run, read_manifest

# -- what each rank runs -----------------------------------------------------------------------------------------------


def collect(
    folder: str,
    name: str,
    *,
    ort: bool,
    stage: int,
    steps: int,
    fault: str | None = None,
    seed_rank: int = 1,
    statistics: dict | None = None,
    **zero: Any,
) -> list[float]:
    """Train under the section of the config alone, statistics into `folder`; return the losses."""
    import deepspeed

    config = ds_config(stage, ort=ort, **zero)
    config["ort_zero"]["log_level"] = "ERROR"
    config["ort_zero"]["statistics"] = {"enabled": True, "output_dir": folder, **(statistics or {})}
    model = build(name)
    if fault is not None:
        FAULTS[fault][0](model, PARTS[name])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(steps):
        arguments = batch(name, dist.get_rank(), step)
        if fault == "one rank's data shuffled" and dist.get_rank() == seed_rank:
            arguments = {key: value.roll(1, 0) for key, value in arguments.items()}
        loss = engine(**arguments)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if ort:
        mine = ort_zero.status()["models"][-1]
        runs = mine["graph_runs"]
        assert mine["fallbacks"] == 0 and min(runs["forward"], runs["backward"]) >= steps, mine
    engine.destroy()
    del engine, model
    import gc

    gc.collect()
    return losses


def ddp(folder: str, name: str, steps: int) -> None:
    """Train in DistributedDataParallel without DeepSpeed, as ZeRO-0 does."""
    from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(build(name), broadcast_buffers=False)
    session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(folder, end_step=steps)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        model(**batch(name, dist.get_rank(), step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    session.remove()
    session.remove()


def killed(folder: str, name: str, steps: int) -> None:
    """Train; then all ranks are gone from one moment to the next."""
    start()
    import deepspeed

    from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber

    model = build(name)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(1, ort=None))
    GlobalSubscriberManager.subscribe(engine, [StatisticsSubscriber(folder)])
    for step in range(steps):
        loss = engine(**batch(name, dist.get_rank(), step))["loss"]
        engine.backward(loss)
        engine.step()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def runs(folder: str, plan: list[dict[str, Any]]) -> list[list[float]]:
    """Collect one run after the other, each in a folder of its own."""
    start()
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for options in plan:
        options = dict(options)
        found.append(collect(str(Path(folder, options.pop("to"))), options.pop("model"), **options))
    return found


# Dynamo traces the hooks of statistics, which takes minutes on a busy machine
pytestmark = pytest.mark.timeout(1700)

# -- what comes of it --------------------------------------------------------------------------------------------------


MODELS = ("gpt2", "bert", "cnn")
TRIED = [pytest.param(name, marks=pytest.mark.slow) if name != "bert" else name for name in MODELS]
STEPS = 4
ALL_GATHERED = {"stage3_param_persistence_threshold": 0}
CLEAN = {
    "ort zero-0": {"ort": True, "stage": 0},
    "ort zero-1": {"ort": True, "stage": 1},
    "ort zero-2": {"ort": True, "stage": 2, "reduce_bucket_size": 300},
    "ort zero-3": {"ort": True, "stage": 3, **ALL_GATHERED},
    "torch zero-1": {"ort": False, "stage": 1},
    "torch zero-2": {"ort": False, "stage": 2, "reduce_bucket_size": 1000},
    "torch zero-3": {"ort": False, "stage": 3, **ALL_GATHERED},
    "torch zero-3, default threshold": {"ort": False, "stage": 3, "statistics": {"parameters": "full"}},
}
"""Runs that must be the same as PyTorch under ZeRO-0."""
MIDDLE = ("ort zero-1", "ort zero-2", "torch zero-1", "torch zero-2")
"""Stages between those that differ most."""


def in_ort(model: str, fault: str) -> bool:
    """Return where a fault is tried: of the three models, in both."""
    if fault == "bf16 rounding in one block":
        return False  # ONNX Runtime computes 16-bit types in float32 on CPUs, so it does not round
    return (list(FAULTS).index(fault) + MODELS.index(model)) % 2 == 1


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """Return a function of the model that gives the folder with all its runs, or with its reference only.

    Where only some of the tests with parameters were chosen, these tests' runs alone are made.
    """
    made: dict[tuple[str, bool], Path] = {}
    mine = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params.get(key) for item in mine for key in ("clean", "fault") if hasattr(item, "callspec")}
    if any(not hasattr(item, "callspec") for item in mine):
        wanted |= {"ort zero-0", "ort zero-3", "a dropped bias"}

    def runs_of(model: str, reference_only: bool = False) -> Path:
        if (model, reference_only) not in made:
            folder = tmp_path_factory.mktemp(model)
            plan = [{"to": "reference", "model": model, "ort": False, "stage": 0, "steps": STEPS}]
            made[model, reference_only] = folder
            if reference_only:
                run_on_ranks(runs, 2, str(folder), plan)
                return folder
            plan += [
                {"to": name, "model": model, "steps": STEPS, **options}
                for name, options in CLEAN.items()
                if name in wanted
            ]
            for fault in (name for name in FAULTS if name in wanted):
                ort = in_ort(model, fault)
                options = {"ort": ort, "stage": 3, **ALL_GATHERED} if ort else {"ort": False, "stage": 2}
                plan.append({"to": fault, "model": model, "steps": 2, "fault": fault, **options})
            run_on_ranks(runs, 2, str(folder), plan, timeout=1600)
        return made[model, reference_only]

    return runs_of


@pytest.mark.parametrize("model", TRIED)
@pytest.mark.parametrize(
    "clean", [pytest.param(name, marks=pytest.mark.slow) if name in MIDDLE else name for name in CLEAN]
)
def test_clean_runs_are_the_same(folders, model, clean):
    folder = folders(model)
    found = compare(str(folder / "reference"), str(folder / clean))
    assert found.verdict.same, found.verdict.text
    assert found.steps == tuple(range(STEPS)) and found.records > 100 * STEPS * 2
    assert found.b.backend == ("onnxruntime" if CLEAN[clean]["ort"] else "torch")
    assert found.b.zero_stage == CLEAN[clean]["stage"] and found.b.world_size == 2


@pytest.mark.parametrize("model", TRIED)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_named(folders, model, fault):
    folder = folders(model)
    _, role, direction = FAULTS[fault]
    verdict = compare(str(folder / "reference"), str(folder / fault)).verdict
    assert not verdict.same
    assert (verdict.direction, verdict.module) == (direction, PARTS[model].get(role, "")), verdict.text
    assert (verdict.difference.step, verdict.difference.rank) == (0, 1 if direction == "input" else 0), verdict.text
    # and the other way round: which of the two is called the reference must not matter
    back = compare(str(folder / fault), str(folder / "reference")).verdict
    assert (back.direction, back.module) == (direction, verdict.module), back.text


def test_the_command_says_it_in_a_sentence(folders):
    folder = folders("bert")

    def stats(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "ort_zero", "stats", "compare", str(folder / "reference"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=400)

    same = stats(str(folder / "ort zero-3"))
    assert same.returncode == 0 and same.stdout.startswith("same"), same.stdout + same.stderr
    differs = stats(str(folder / "a dropped bias"), "--json")
    assert differs.returncode == 1 and json.loads(differs.stdout)["verdict"]["module"] == PARTS["bert"]["biased"]
    page = folder / "report.html"
    drawn = stats(str(folder / "a dropped bias"), "--html", str(page))
    assert drawn.returncode == 1 and PARTS["bert"]["biased"] in page.read_text() and page.stat().st_size < 300_000
    assert stats(str(folder / "nowhere")).returncode == 2
    other = subprocess.run(
        [sys.executable, "-m", "ort_zero", "stats", "compare", str(folder / "reference"),
         str(folders("cnn", reference_only=True) / "reference")], capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert other.returncode == 2 and other.stderr.count("\n") == 1, other.stderr
    assert "only the second has stem.weight" in other.stderr
    assert "bert.embeddings.word_embeddings.weight" in other.stderr


def test_a_small_tolerance_finds_rounding(folders):
    folder = folders("bert")
    strict = compare(str(folder / "reference"), str(folder / "ort zero-3"), rtol=1e-9)
    assert not strict.verdict.same and strict.counts["numeric"] > 10


def test_ddp_is_the_same_as_zero_0(folders, tmp_path):
    run_on_ranks(ddp, 2, str(tmp_path / "ddp"), "bert", STEPS)
    found = compare(str(folders("bert") / "reference"), str(tmp_path / "ddp"))
    assert found.verdict.same and found.steps == tuple(range(STEPS)), found.verdict.text
    assert not found.notes and set(found.counts.values()) <= {0}, found.notes


def test_ranks_that_were_killed_left_full_steps(folders, tmp_path):
    with pytest.raises(RuntimeError, match="rank"):
        run_on_ranks(killed, 2, str(tmp_path / "cut"), "bert", STEPS)
    found = compare(str(folders("bert") / "reference"), str(tmp_path / "cut"))
    assert found.verdict.same and found.steps == tuple(range(STEPS - 1)), found.verdict.text
    assert sum("no end mark" in note for note in found.notes) == 2


def test_each_rank_has_one_file_with_a_manifest(folders):
    folder = folders("bert") / "ort zero-3"
    assert sorted(path.name for path in folder.iterdir()) == [file_name(rank, 0) for rank in range(2)]
    manifests = [read_manifest(folder / file_name(rank, 0)) for rank in range(2)]
    assert manifests[0]["run_id"] == manifests[1]["run_id"] and manifests[1]["rank"] == 1
    assert manifests[0]["backend"] == "onnxruntime" and manifests[0]["dtype"] == "float32"
    assert manifests[0]["parameters"]["bert.embeddings.word_embeddings.weight"] == [60, 32]
    run = open_run(str(folder))
    assert run.info.steps == tuple(range(STEPS)) and not run.notes
