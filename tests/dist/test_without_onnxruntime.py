"""Plugin, ZeRO-3 hooks, checkpoints and statistics where onnxruntime and the old engine cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks

ABSENT = ("onnx", "onnxruntime", "ort_zero.ortmodule")


def train(folder: str) -> tuple[list[float], dict, list[str]]:
    """Train three steps under ZeRO-3 in PyTorch; save, change a weight, load; return losses and what is patched."""
    sys.modules.update(dict.fromkeys(ABSENT))  # None there makes an import fail as a missing package does
    import deepspeed
    import torch

    import ort_zero

    start()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    config = ds_config(3, ort=False, stage3_param_persistence_threshold=0)
    config["ort_zero"]["statistics"] = {"enabled": True, "output_dir": f"{folder}/statistics"}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    assert type(engine.module) is torch.nn.Sequential
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(4):
        loss = engine(x).square().mean()
        losses.append(loss.item())
        if step == 2:
            engine.save_checkpoint(f"{folder}/checkpoint", tag="saved")
        engine.backward(loss)
        engine.step()
    engine.load_checkpoint(f"{folder}/checkpoint", tag="saved")
    losses.append(engine(x).square().mean().item())
    status = ort_zero.status()
    engine.destroy()
    ort_zero.disable()
    imported = [name for name, module in sys.modules.items() if module is not None and name.startswith(ABSENT)]
    return losses, status, imported


def test_everything_but_onnx_runtime_works_without_it(tmp_path: Path):
    results = run_on_ranks(train, 2, str(tmp_path), fresh=True, timeout=240)
    for losses, status, imported in results:
        assert losses[0] > losses[1] > losses[2] > losses[3] and losses[4] == losses[2]
        assert status["enabled"] and status["fallbacks"] == 0 and status["models"] == [] and not imported
        assert any("setup_zero_stage3_hooks" in target for target in status["patches"])
    from ort_zero.checkpoint import aggregate, verify
    from ort_zero.statistics.files import open_run

    assert verify(tmp_path / "checkpoint").ok
    aggregate(tmp_path / "checkpoint", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert open_run(tmp_path / "statistics") is not None
