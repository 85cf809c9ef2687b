"""Trains and saves a small model on 2 ranks in plain DeepSpeed, without anything of ort_zero, under ZeRO-1, 2 and 3.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 torchrun --standalone --nproc_per_node 2 tests/versions/plain_deepspeed.py FILE

writes one JSON object: for each stage, for DeepSpeed's activation checkpointing, and for parameters that it gathers
together, None, or the error with which DeepSpeed itself fails, and the function in which it does. Failures of our
tests that are this one are none of ort_zero's.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

STAGES = (1, 2, 3)
CHECKPOINTING = "activation checkpointing"
GATHERED = "gathered parameters"


def train(stage: int, folder: str) -> None:
    """Train three steps under ZeRO-`stage` and save a checkpoint; all ranks must call."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3):
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag=f"stage{stage}")
    engine.destroy()


def checkpoint_activations() -> None:
    """Compute gradients through DeepSpeed's activation checkpointing."""
    import deepspeed
    import torch

    layer = torch.nn.Linear(4, 4)
    deepspeed.checkpointing.checkpoint(layer, torch.randn(2, 4, requires_grad=True)).sum().backward()


def gather_parameters() -> None:
    """Gather a large and a small parameter together and raise if one is not whole; all ranks must call."""
    import deepspeed
    import torch

    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(numel)) for numel in (4_000_000, 7)])
    values = [parameter.detach().clone() for parameter in model]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    wrong = 0
    for _ in range(20):
        with deepspeed.zero.GatheredParameters(list(model)):
            wrong += not all(map(torch.equal, model, values))
    engine.destroy()
    if wrong:
        raise RuntimeError("parameters in deepspeed.zero.GatheredParameters are not whole")


def rank(file: str) -> None:
    """Try every stage, one after the other; rank 0 writes what came of it into a file."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    found = {}
    others = {CHECKPOINTING: checkpoint_activations, GATHERED: gather_parameters}
    for name in (*STAGES, *others):
        try:
            others[name]() if name in others else train(name, f"{file}_checkpoints")
            found[name] = None
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = next((f.name for f in reversed(frames) if "deepspeed" in Path(f.filename).parts), frames[-1].name)
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            found[name] = {"error": text, "function": where}
    if any(name.partition(".")[0] == "ort_zero" for name in sys.modules):
        raise RuntimeError("ort_zero was imported, so this was no plain DeepSpeed")
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    rank(sys.argv[1])
    os._exit(0)  # gloo's threads may end an interpreter that ends with "terminate called without an exception"
