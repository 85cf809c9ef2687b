"""DeepSpeed's flops profiler counts the model's operations, and no export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks


def profiled(folder: str, stage: int) -> dict[str, Any]:
    """Train four steps with and without the section, the third one profiled; return flops, losses and runs."""
    import deepspeed

    import ort_zero

    rank = start()
    results: dict[str, Any] = {}
    for ort in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
        config = ds_config(stage, ort=True if ort else None)
        file = Path(folder) / f"flops_{ort}_{rank}.txt"
        config["flops_profiler"] = {"enabled": True, "profile_step": 2, "detailed": False, "output_file": str(file)}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
        losses = []
        for _ in range(4):
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        text = file.read_text() if file.exists() else ""
        results[f"losses {ort}"] = losses
        results[f"flops {ort}"] = re.findall(r"fwd flops per GPU: +(\S+ \S+)", text)
        if ort:
            (status,) = ort_zero.status()["models"]
            graph = status["graphs"]["training"]
            results["graph"] = graph["exports"], graph["runs"], status["called_in_torch"]
        engine.destroy()
    return results


@pytest.mark.parametrize("stage", [1, 3])
def test_the_figures_are_those_of_plain_deepspeed_and_the_graph_stays(stage, tmp_path):
    ranks = run_on_ranks(profiled, 2, str(tmp_path), stage, timeout=300)
    assert ranks[0]["flops True"] == ranks[0]["flops False"] != []
    assert stage == 3 or ranks[0]["flops True"] == ["18.69 K"]
    for result in ranks:
        for ours, theirs in zip(result["losses True"], result["losses False"], strict=True):
            assert abs(ours - theirs) < 1e-5
        exports, runs, in_torch = result["graph"]
        assert exports == 1 and runs == {"forward": 3, "backward": 3}
        assert "forward under DeepSpeed's flops profiler" in in_torch
