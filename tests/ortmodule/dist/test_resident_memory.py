"""The resident memory of a rank over many steps under ZeRO-3, every weight gathered: level, and gathers as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks
from tiny_models import gpt2

STEPS = 300
SETTLED = 60
"""Steps after which nothing is new: DeepSpeed, ORT and PyTorch have made what they keep."""


def resident() -> int:
    """Return the anonymous memory of this process in kB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def train(reuse_distance: int) -> dict[str, Any]:
    rank = start()
    import deepspeed

    from ort_zero.backends import registry

    torch.manual_seed(0)
    model = gpt2(words=1000, hidden=96, layers=3)
    zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": reuse_distance}
    config = ds_config(3, ort=True, **zero)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = torch.randint(0, 1000, (4, 32), generator=torch.Generator().manual_seed(rank))
    sizes = []
    for _ in range(STEPS):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        sizes.append(resident())
    status = registry.runtimes()[-1].status()
    return {"sizes": sizes, "status": status, "loss": loss.item()}


@pytest.mark.parametrize("reuse_distance", [0, 10**9], ids=["each use", "default"])
def test_a_rank_does_not_grow_with_the_steps(reuse_distance):
    for report in run_on_ranks(train, 2, reuse_distance, timeout=300):
        status, sizes = report["status"], report["sizes"]
        graph = status["graphs"]["training"]
        assert (status["backend"], status["fallbacks"]) == ("onnxruntime", 0)
        assert graph["runs"] == {"forward": STEPS, "backward": STEPS} and graph["gathers"] > STEPS
        settled = max(sizes[SETTLED : SETTLED + 40])
        assert max(sizes[SETTLED:]) <= 1.02 * settled, sizes[::20]
        memory = graph["gather_memory"]
        assert memory["peak"] == memory["planned"] == memory["live"] > 0, memory
        assert memory["unplanned"] <= STEPS // 20, memory
        assert report["loss"] < 6
