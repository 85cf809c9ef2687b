"""Starts DeepSpeed with the section on one rank, and prints the error with which the section is refused.

    python tests/versions/refusal.py

Ends with status 1 if the engine was made.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """Make an engine with ONNX Runtime asked for; print the error and return 0, or return 1 if there is none."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"DS_ACCELERATOR": "cpu"}
    try:
        import torch

        import ort_zero

        sys.path.append(str(Path(__file__).resolve().parents[1]))
        from rank_processes.ranks import free_port

        os.environ["MASTER_PORT"] = str(free_port())

        model = torch.nn.Linear(4, 4)
        ort_zero.wrap(torch.nn.Linear(4, 4))(torch.zeros(2, 4))  # before DeepSpeed compiles operators, for minutes
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3},
            "ort_zero": {"enabled": True},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine(torch.zeros(2, 4))
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
