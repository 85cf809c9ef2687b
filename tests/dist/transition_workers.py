"""What the ranks of ``test_transitions_ranks.py`` run."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration
from workers import ds_config, full_parameters, start

import ort_zero

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
        model=model, model_parameters=list(model.parameters()), config=ds_config(stage, ort=True, **zero)
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
