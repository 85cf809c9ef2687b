"""Padding that is left out on 2 ranks, of which one has more of it than the other; compared with PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed_setup import full_parameters, start, tiny_engine
from rank_processes.ranks import run_on_ranks

STEPS = 5
RUNS = (("gpt2", 1), ("gpt2", 3), ("bert", 2), ("bert", 3))


def train(kind: str, stage: int, ort: bool | None) -> dict[str, Any]:
    """Return losses, weights and what ran of a model `kind` that is trained in one way."""
    from ort_zero.backends import registry

    rank = torch.distributed.get_rank()
    fuse_loss = "on" if kind == "gpt2" else "off"
    engine = tiny_engine(kind, stage, ort=ort, drop_padding=True, fuse_loss=fuse_loss)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 64, (4, 8), generator=generator)
        mask = torch.ones(4, 8, dtype=torch.long)
        if step != 2 or rank:  # once no padding on one rank alone
            mask[1:, 5 - 3 * rank :] = 0
        loss = engine(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    report = {
        "losses": torch.stack(losses),
        "weights": {name: value.clone() for name, value in full_parameters(engine).items()},
        "status": registry.runtimes()[-1].status() if ort else None,
    }
    engine.destroy()
    return report


def run_all() -> dict[tuple, dict[str, Any]]:
    """Run on each rank: every model and stage, in PyTorch and in ONNX Runtime."""
    start()
    return {(kind, stage, ort): train(kind, stage, ort) for kind, stage in RUNS for ort in (None, True)}


def test_steps_equal_those_of_pytorch():
    for report in run_on_ranks(run_all, 2, timeout=240):
        for kind, stage in RUNS:
            ours, theirs = report[kind, stage, True], report[kind, stage, None]
            torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-4, atol=1e-4)
            for name, weight in theirs["weights"].items():
                torch.testing.assert_close(ours["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=name)
            graph = ours["status"]["graphs"]["training"]
            assert (ours["status"]["backend"], ours["status"]["fallbacks"], graph["exports"]) == ("onnxruntime", 0, 1)
            assert graph["kernels"]["packed_rows"] > 0
