"""Makes the stored checkpoints: ``python tests/golden/make_checkpoints.py`` writes them beside this file, on two ranks.

Run it when the version of our format changes, or for another release of DeepSpeed; a folder of an older version of our
format stays, for it must remain readable or be refused with the way out.

Each folder holds one checkpoint and ``expected.safetensors``: what the engine itself said of its masters and moments,
frozen parameters and buffers, read from its live tensors and not through our files.
"""

from __future__ import annotations

import shutil
import sys
from collections import deque
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 3
CLIENT_STATE = {"epoch": 3, "best": 0.5, "seen": ["a", None], "key": b"x", "last": deque([[1], 3])}


def save(folder: str, ours: str) -> None:
    """Save small engines under ``folder/<name>``. All ranks must call.

    Args:
        folder: exists.
        ours: name for the checkpoint of our format.
    """
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "dist")]
    import torch
    from checkpoint_engines import engine_of, train
    from safetensors.torch import save_file

    for name, stage in ((ours, 3), ("deepspeed_zero2", 2), ("deepspeed_zero3", 3)):
        engine = engine_of(stage)
        train(engine, range(STEPS))
        write = engine.save_checkpoint if name == ours else _own_save(engine)
        write(f"{folder}/{name}", tag="saved", client_state={**CLIENT_STATE, "order": torch.arange(3)})
        expected = expected_of(engine, stage)
        if torch.distributed.get_rank() == 0:
            save_file(expected, f"{folder}/{name}/expected.safetensors")
        engine.destroy()


def _own_save(engine: Any) -> Any:
    """Return DeepSpeed's own ``save_checkpoint``, which ort_zero's replaces."""
    original = type(engine).save_checkpoint.__wrapped__
    return lambda *args, **kwargs: original(engine, *args, **kwargs)


def expected_of(engine: Any, stage: int) -> dict[str, Any]:
    """Return the values of an engine by ``kind/name``, gathered from its live tensors. All ranks must call."""
    import deepspeed
    from deepspeed_checkpoints import Variant, live_state

    states = live_state(engine, Variant("golden", stage))
    found = {f"{kind}/{name}": value for kind, values in states.items() for name, value in values.items()}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                found[f"weight/{name}"] = parameter.detach().clone()
    persistent = engine.module.state_dict().keys()
    return found | {f"buffer/{n}": b.detach().clone() for n, b in engine.module.named_buffers() if n in persistent}


def main() -> None:
    """Replace the folders beside this file."""
    import tempfile

    from rank_processes.ranks import run_on_ranks

    from ort_zero.checkpoint.format import manifest

    with tempfile.TemporaryDirectory() as scratch:
        run_on_ranks(save, 2, scratch, f"checkpoint_v{manifest.VERSION}", timeout=800)
        for made in Path(scratch).iterdir():
            shutil.rmtree(HERE / made.name, ignore_errors=True)
            # DeepSpeed puts its converters beside its checkpoints; nobody needs them here
            shutil.copytree(made, HERE / made.name, ignore=shutil.ignore_patterns("zero_to_*.py"))


if __name__ == "__main__":
    main()
