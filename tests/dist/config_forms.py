"""Hands DeepSpeed its config in every form that it takes."""

from __future__ import annotations

import argparse
import base64
import gc
import json
from pathlib import Path

import torch
from workers import ds_config, start

import ort_zero


def all_forms(folder: str) -> dict[str, str | None]:
    """Return, for each form, which backend runs the model; None where ort_zero has no part in it."""
    import deepspeed

    start()
    config = ds_config(1, ort=True)
    path = Path(folder) / "ds.json"
    path.write_text(json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    off = {**config, "ort_zero": {"enabled": False}}
    forms = {
        "dict": {"config": config},
        "path": {"config": str(path)},
        "string": {"config": encoded},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "disabled": {"config": off},
        "absent": {"config": ds_config(1, ort=None)},
    }
    result: dict[str, str | None] = {}
    for name, how in forms.items():
        model = torch.nn.Linear(4, 2)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), **how)
        before = len(ort_zero.status()["models"])
        engine.backward(engine(torch.randn(4, 4)).sum())
        engine.step()
        ours = [m for m in ort_zero.status()["models"] if m["graphs"].get("training", {}).get("runs")]
        result[name] = ours[-1]["backend"] if len(ours) == before and before else None
        assert (type(engine.module).__name__ == "ORTModule") == (result[name] is not None), name
        engine.destroy()
        del engine, model, _
        gc.collect()
    return result
