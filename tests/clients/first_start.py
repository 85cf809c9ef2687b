"""Starts 2 ranks once, so that no program waits for what only a first start does.

DeepSpeed compiles an operator, Python compiles the packages of the extra ``clients``. What cannot be imported, and a
torch of another version than the first environment's, end it with an error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

MINUTES = 20


def start() -> str:
    """Import everything and train one step under ZeRO-3; return the version of torch. Runs on each rank."""
    importlib.import_module("torchvision_operators")
    import deepspeed
    import torch
    from harness import modules_of

    required = importlib.metadata.metadata("ort-zero").get_all("Requires-Dist") or []
    names = [re.split(r"[ ;<>=\[]", line, maxsplit=1)[0] for line in required if 'extra == "clients"' in line]
    for name in modules_of([name for name in names if name != "ort-zero"]):
        importlib.import_module(name)
    deepspeed.init_distributed("gloo", verbose=False)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True}
    )[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    return torch.__version__


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    from rank_processes.ranks import run_on_ranks

    versions = run_on_ranks(start, 2, timeout=400 * MINUTES)
    wanted = re.search(r"^torch==(\S+)", (Path(__file__).parents[2] / ".ci/constraints.txt").read_text(), re.MULTILINE)
    if wanted is None or any(version.split("+")[0] != wanted[1] for version in versions):
        sys.exit(f"error: torch is {versions[0]}, and .ci/constraints.txt wants {wanted and wanted[1]}")
