"""Head and loss in one node on 2 ranks, one of which reads the logits alone; compared with PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed_setup import full_parameters, start, tiny_engine
from rank_processes.ranks import run_on_ranks

STEPS = 6


def train(kind: str, stage: int, ort: bool | None) -> dict[str, Any]:
    """Return losses, some logits, weights and what ran of a model `kind` that is trained in one way."""
    from ort_zero.backends import registry

    rank = torch.distributed.get_rank()
    engine = tiny_engine(kind, stage, ort=ort, fuse_loss="on")
    values = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 64, (4, 8), generator=generator)
        labels = torch.where(torch.rand(4, 8, generator=generator) < 0.3 + 0.4 * rank, ids, -100)
        result = engine(input_ids=ids, labels=labels)
        loss = result.loss
        if step == 4:  # the loss of a distillation, say
            loss = loss + result.logits.square().mean()
        engine.backward(loss)
        engine.step()
        values.append(loss.detach())
        if rank == 0 and step in (1, 2, 3):  # after the weights have changed, and by this rank alone
            values.append(result.logits.detach().sum())
    runtimes = registry.runtimes()
    report = {
        "values": torch.stack(values),
        "weights": {name: value.clone() for name, value in full_parameters(engine).items()},
        "status": runtimes[-1].status() if ort else None,
    }
    engine.destroy()
    return report


def run_all() -> dict[tuple, dict[str, Any]]:
    """Run on each rank: every model and stage, in PyTorch and in ONNX Runtime."""
    start()
    return {(kind, stage, ort): train(kind, stage, ort)
            for kind, stage in (("gpt2", 1), ("gpt2", 3), ("bert", 3)) for ort in (None, True)}  # fmt: skip


def test_steps_equal_those_of_pytorch_and_a_rank_may_read_logits_alone():
    for report in run_on_ranks(run_all, 2, timeout=240):
        for kind, stage in (("gpt2", 1), ("gpt2", 3), ("bert", 3)):
            ours, theirs = report[kind, stage, True], report[kind, stage, None]
            torch.testing.assert_close(ours["values"], theirs["values"], rtol=1e-4, atol=1e-4)
            for name, weight in theirs["weights"].items():
                torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=name)
            status = ours["status"]
            graph = status["graphs"]["training"]
            assert (status["backend"], status["fallbacks"], graph["exports"]) == ("onnxruntime", 0, 1)
            # three reads in a row: a rank without collectives in its graph goes over to one that returns them
            assert graph["kernels"].get("fused_loss", 0) == int(stage == 3 or len(ours["values"]) == STEPS)
