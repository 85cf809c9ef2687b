"""Transitions of graphs under DeepSpeed, 2 ranks: exported once each, agreed on, and nobody hangs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from rank_processes.ranks import run_on_ranks
from transformers import T5Config, T5ForConditionalGeneration

import ort_zero

# -- what each rank runs -----------------------------------------------------------------------------------------------


VOCAB = 64


def t5() -> torch.nn.Module:
    """Return an encoder and decoder whose bias of positions is shared by its layers."""
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    ))  # fmt: skip


def named(name: str) -> torch.nn.Module:
    """Return a model of `models.py`, or a T5."""
    from models import build

    return t5() if name == "t5" else build(name)


def batch(step: int, rank: int, length: int, labels: bool = True) -> dict[str, torch.Tensor]:
    """Return the arguments of one call."""
    ids = torch.randint(1, VOCAB, (4, length), generator=torch.Generator().manual_seed(100 * step + rank))
    return {"input_ids": ids, "labels": ids.clone()} if labels else {"input_ids": ids}


def run(name: str, stage: int, ort: bool | None) -> dict[str, Any]:
    """Train, evaluate, change lengths and structures, freeze; return losses, parameters and status."""
    import deepspeed

    rank = torch.distributed.get_rank()
    model = named(name)
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config(stage, ort=ort, **zero)
    )
    losses = []
    for step, length in enumerate((8, 5, 8, 11)):
        arguments = batch(step, rank, length)
        if step % 2:
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        loss = engine(**arguments).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            losses.append(engine(**batch(step, rank, length)).loss.item())
        engine.train()
    result = {"losses": losses, "parameters": full_parameters(model), "status": ort_zero.status()["models"]}
    engine.destroy()
    return result


def everyday(name: str, stages: list[int]) -> dict[int, Any]:
    """Return PyTorch's and ORT's losses, the difference of parameters, and the status, for each stage."""
    start()
    report = {}
    for stage in stages:
        expected, ours = run(name, stage, None), run(name, stage, True)
        pairs = [(expected["parameters"][n], p) for n, p in ours["parameters"].items()]
        report[stage] = {
            "expected": expected["losses"],
            "losses": ours["losses"],
            "difference": max((a - b).abs().max().item() for a, b in pairs),
            "status": ours["status"][-1],
        }
    return report


class Branches(torch.nn.Module):
    """Has an optional argument that adds a weight, one that does not, and one that cannot be exported."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, more=None, extra=None, fail=False):
        if fail and torch.jit.is_tracing():
            raise RuntimeError("this branch cannot be traced")
        y = self.b(self.a(x).relu())
        if more is not None:
            y = y + self.c(more)
        if extra is not None:
            y = y * extra
        return y.pow(2).mean()


def uneven(stage: int) -> list[Any]:
    """Give rank 1 other arguments than rank 0, in turn; return what each turn ended in."""
    import deepspeed

    rank = start()
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    model = Branches()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=ds_config(stage, ort=True, split="off", **zero)
    )
    ended: list[Any] = []

    def turn(*args: Any, **kwargs: Any) -> None:
        try:
            loss = engine(*args, **kwargs)
            engine.backward(loss)
            engine.step()
            ended.append(round(loss.item(), 6))
        except Exception as error:
            ended.append((type(error).__name__, str(error)))

    x = torch.ones(4, 6)
    turn(x)
    turn(x[:1] if rank else x)  # the last batch is smaller
    turn(x, extra=x) if rank else turn(x)  # another graph with the same weights
    if stage == 3:  # below, the graph has no collectives, and DeepSpeed's own would not match in PyTorch either
        turn(x, x) if rank else turn(x)  # another graph with other weights
        turn(x)
        turn(x, fail=bool(rank))  # one rank cannot export
        turn(x, fail=bool(rank))
    turn(x)
    transitions = [(t["transition"], t["reasons"]) for t in ort_zero.status()["models"][0]["transitions"]]
    return [ended, transitions]


def cached(stage: int, folder: str) -> list[Any]:
    """Train twice with one export cache; return losses, what the cache said, and gathers of both."""
    import deepspeed

    rank = start()
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    runs = []
    for _ in range(2):
        model = named("gpt2_sdpa")
        config = ds_config(stage, ort=True, **zero)
        config["ort_zero"]["ortmodule"]["cache_dir"] = folder
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        losses = []
        for step in range(3):
            loss = engine(**batch(step, rank, 8)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        status = ort_zero.status()["models"][-1]
        runs.append((losses, [t["cache"] for t in status["transitions"]], status["graphs"]["training"]))
        engine.destroy()
        del engine, model, loss, _
        gc.collect()
    assert not ort_zero.status()["models"]
    return runs


class Weighted(torch.nn.Module):
    """Reads numbers from attributes: a weight of the loss, a slope, the rate of a dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.dropout, self.b = torch.nn.Linear(6, 6), torch.nn.Dropout(0.0), torch.nn.Linear(6, 6)
        self.beta, self.slope = 0.0, 0.1

    def forward(self, x):
        y = self.b(self.dropout(torch.nn.functional.leaky_relu(self.a(x), self.slope)))
        return y.pow(2).mean() + self.beta * y.abs().mean()


def scheduled(stage: int) -> dict[str, Any]:
    """Change attributes through the engine, at every step and on one rank only; return losses of both backends."""
    import deepspeed

    rank = start()
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    report: dict[str, Any] = {}
    for ort in (None, True):
        model = Weighted()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=ds_config(stage, ort=ort, **zero)
        )
        losses = []
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        for step in range(10):
            engine.module.beta = 0.1 * step
            if step == 6 and rank:
                engine.module.slope = 0.5
            if step == 8:
                engine.module.slope = 0.3
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        report["ort" if ort else "torch"] = losses
        if ort:
            report["status"] = ort_zero.status()["models"][-1]
        engine.destroy()
    return report


class Decay(torch.nn.Module):
    """Loops over an axis."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        state = x[:, 0]
        for i in range(1, x.shape[1]):
            state = state * self.weight + x[:, i]
        return state


class Sized(torch.nn.Module):
    """Branches on a size, and loops over it in a submodule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.decay, self.b = torch.nn.Linear(6, 6), Decay(), torch.nn.Linear(6, 6)

    def forward(self, x):
        y = self.a(x)
        if x.shape[1] > 4:
            y = y.tanh()
        return self.b(self.decay(y)).pow(2).mean()


def sized(stage: int) -> dict[str, Any]:
    """Train on sequences of another length on each rank and at each step; return losses of both backends."""
    import deepspeed

    rank = start()
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    report: dict[str, Any] = {}
    for ort in (None, True):
        model = Sized()
        config = ds_config(stage, ort=ort, **zero)
        if ort:
            config["ort_zero"]["ortmodule"]["graph_cache_size"] = 2
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        losses = []
        for step in range(8):
            length = 3 + step if rank == 0 else 6 - step % 3
            loss = engine(torch.randn(4, length, 6, generator=torch.Generator().manual_seed(10 * step + rank)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        report["ort" if ort else "torch"] = losses
        if ort:
            report["status"] = ort_zero.status()["models"][-1]
        engine.destroy()
    return report


def scheduled_and_sized(stage: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the reports of both in one launch."""
    return scheduled(stage), sized(stage)


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "gpt2_sdpa", "t5"])
def test_lengths_structures_and_modes_are_exported_once_each(name):
    for report in run_on_ranks(everyday, 2, name, [2, 3]):
        for stage, got in report.items():
            assert got["losses"] == pytest.approx(got["expected"], rel=2e-4), (name, stage)
            assert got["difference"] < 1e-4
            status = got["status"]
            exports = {mode: graph["exports"] for mode, graph in status["graphs"].items()}
            # evaluation has the export of one of the training graphs
            assert exports == {"training": 2, "inference": 0} and status["fallbacks"] == 0
            assert status["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}
            kinds = [t["transition"] for t in status["transitions"] if t["mode"] == "training"]
            assert kinds == ["export", "export", "switch", "switch"]
            assert status["transitions"][-1]["reasons"] == ['input "attention_mask" appeared']


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_whose_calls_differ_are_told_and_go_on(stage):
    (zero, zero_did), (one, one_did) = run_on_ranks(uneven, 2, stage)
    assert all(isinstance(loss, float) for loss in (*zero[:3], *one[:3])), (zero, one)
    assert zero_did[0] == one_did[0] == ("export", ["first call"])
    assert one_did[1] == ("export", ['input "extra" appeared']) and len(zero_did) < len(one_did)
    if stage == 3:
        for ended in (zero[3], one[3]):
            assert ended[0] == "ExportError" and "structure" in ended[1] and "rank 0" in ended[1], ended
        assert isinstance(zero[4], float) and isinstance(one[4], float)
        assert zero[5][0] == zero[6][0] == "RankError" and "this branch cannot be traced" in zero[5][1]
        for ended in (one[5], one[6]):
            assert ended[0] == "ExportError" and "this branch cannot be traced" in ended[1]
            assert "fail" in ended[1] and "earlier ones are kept" in ended[1]
    assert isinstance(zero[-1], float) and isinstance(one[-1], float), (zero, one)


def test_attributes_and_sizes_that_change_at_every_step_or_on_one_rank_have_pytorchs_effect():
    for rank, (report, sizes) in enumerate(run_on_ranks(scheduled_and_sized, 2, 3)):
        assert report["ort"] == pytest.approx(report["torch"], rel=2e-4)
        status = report["status"]
        exports = [t for t in status["transitions"] if t["transition"] == "export"]
        assert len(exports) == 4 + rank and status["fallbacks"] == 0
        assert exports[1]["reasons"] == ["Weighted.beta changed from 0.0 to 0.1"]
        assert status["graphs"]["training"]["attribute_inputs"][0] == "Weighted.beta"
        assert status["graphs"]["training"]["runs"]["backward"] == 10
        # the ranks meet on two sides of a branch, and rank 1 follows when rank 0 has had too many lengths
        assert sizes["ort"] == pytest.approx(sizes["torch"], rel=2e-4)
        status = sizes["status"]
        reasons = [reason for done in status["transitions"] for reason in done["reasons"]]
        assert any("branches on x.shape[1] > 4 (" in reason for reason in reasons), reasons
        assert list(status["in_torch"]) == ["decay"] and status["fallbacks"] == 0
        assert status["graphs"]["training"]["runs"]["backward"] == 8
        assert status["graphs"]["training"]["exports"] <= 7


@pytest.mark.parametrize("stage", [2, 3])
def test_the_next_run_loads_its_graphs_on_every_rank(stage, tmp_path):
    for (first, said_first, _), (second, said_second, graph) in run_on_ranks(cached, 2, stage, str(tmp_path)):
        assert first == second
        assert all(words.startswith("miss: no training entry") for words in said_first), said_first
        assert all(words.startswith("hit: the same model") for words in said_second), said_second
        assert graph["exports"] == 0 and graph["runs"] == {"forward": 3, "backward": 3}
        assert (graph["gathers"] > 0) == (stage == 3)
