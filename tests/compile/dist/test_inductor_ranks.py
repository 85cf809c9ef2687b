"""Units by Inductor train under ZeRO-3 on two ranks as in plain DeepSpeed."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from comparison import Run, compare, trained_alike
from launch_once import once
from models import VOCAB, build, losses_of
from rank_processes.ranks import run_on_ranks
from test_unit_memory import alive, released_storages

INDUCTOR: dict[str, Any] = {"place": "measured", "runners": ["inductor"]}

# -- what each rank runs -----------------------------------------------------------------------------------------------


def counted() -> list[int]:
    """Count the calls of Inductor's own code from now on."""
    from torch._inductor.output_code import CompiledFxGraph

    runs, original = [0], CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        runs[0] += 1
        return original(self, inputs)

    CompiledFxGraph.__call__ = call
    return runs


def released(run: Run) -> None:
    """Accumulate two micro-batches; look at weights and their memory after a forward and after a step."""
    runs = counted()
    model, loss_of = losses_of("llama", run.rank)
    options = dict(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0, options=INDUCTOR)
    run.start(model, gas=2, **options)
    run.train(loss_of, 4)
    with released_storages() as noted:
        loss = loss_of(run.engine, 4)
        run.notes["whole"], run.notes["alive"] = run.whole(), alive(noted)
        run.notes["released"] = sum(size for _, size, _ in noted)
        run.step(loss)
        del loss
        run.notes["alive after"], run.notes["whole after"] = alive(noted), run.whole()
    run.train(loss_of, range(5, 8))
    run.evaluate(loss_of)
    run.notes["runs"] = runs[0]


def checkpointed_lengths(run: Run, reentrant: bool) -> None:
    """Train with activation checkpointing on lengths that change, other ones on each rank."""
    runs = counted()
    model = build("gpt2_dropout")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    run.start(model, options=INDUCTOR)
    torch.manual_seed(run.rank)
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + run.rank)
        tokens = torch.randint(0, VOCAB, (2, (16, 11, 13)[(step + run.rank) % 3]), generator=generator)
        run.step(run.engine(input_ids=tokens, labels=tokens).loss)
    run.notes["runs"] = runs[0]


def compiled_at_other_times(run: Run) -> None:
    """Have one rank evaluate in the first steps, and so time its units in other steps than the other one."""
    model, loss_of = losses_of("llama", run.rank)
    options = {"place": "measured", "runners": ["ort", "inductor", "torch"]}
    run.start(model, options=options, stage=2)
    for step in range(48):
        run.step(loss_of(run.engine, step))
        if run.rank and step < 4:
            run.engine.eval()
            with torch.no_grad():
                loss_of(run.engine.module, step)
            run.engine.train()


def train_all(folder: str) -> dict[str, Any]:
    """Train all scenarios."""
    named = {
        "released": released,
        "reentrant": functools.partial(checkpointed_lengths, reentrant=True),
        "not reentrant": functools.partial(checkpointed_lengths, reentrant=False),
        "other times": compiled_at_other_times,
    }
    return compare(named, folder)


# -- what comes of it --------------------------------------------------------------------------------------------------


@once
def _launch() -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="ort_zero_inductor_") as folder:
        # what an earlier run has decided is not timed again
        return run_on_ranks(train_all, 2, folder, timeout=400, env={"ORT_ZERO_CACHE_DIR": f"{folder}/cache"})


def test_no_view_of_a_weight_is_left_and_losses_are_plain_deepspeeds():
    for rank, reports in enumerate(_launch()):
        trained_alike(reports["released"], f"rank {rank}", ran=False)
        ours = reports["released"]["notes"][1]
        assert ours["released"] > 0 and ours["runs"] >= 2 * 8 * 2
        assert (ours["whole"], ours["alive"], ours["whole after"], ours["alive after"]) == ([], {}, [], {})
        (status,) = reports["released"]["models"]
        assert status["backend"] == "inductor" and status["fallbacks"] == 0 and not status["compiled"]["failed"]


@pytest.mark.parametrize("name", ["reentrant", "not reentrant"])
def test_checkpointing_with_dropout_on_lengths_that_change(name: str):
    for rank, reports in enumerate(_launch()):
        trained_alike(reports[name], f"{name}, rank {rank}", ran=False)
        assert reports[name]["notes"][1]["runs"] > 0
        (status,) = reports[name]["models"]
        assert status["fallbacks"] == 0 and not status["compiled"]["failed"]


def test_ranks_that_compile_at_other_times_agree_on_the_runner():
    reports = [reports["other times"] for reports in _launch()]
    found, timed = [], set()
    for rank, report in enumerate(reports):
        trained_alike(report, f"other times, rank {rank}", ran=False)
        (status,) = report["models"]
        layers = status["runners"]["LlamaDecoderLayer"]
        assert status["fallbacks"] == 0 and not status["compiled"]["failed"] and len(layers["units"]) == 1
        found.append(layers["units"])
        timed |= layers["ms"].keys()
    assert found[0] == found[1] and "inductor" in timed
