"""Trains as train_lm.py does, with a fault: one block has the exact GELU in place of GPT-2's approximation by tanh.

The loss hardly moves. ``ort-zero stats compare`` with a run of train_lm.py names the module, see docs/statistics.md.

    deepspeed --num_gpus 2 examples/seeded_fault.py --deepspeed_config configs/zero3_statistics_ort.json --steps 5
"""

from __future__ import annotations

import sys

import lm_common
import torch
import train_lm

FAULTY = "transformer.h.2.mlp"


def make_faulty_model(**options: int) -> torch.nn.Module:
    """Return the model of train_lm.py with another activation function in one block."""
    model = lm_common.make_model(**options)
    model.get_submodule(FAULTY).act = torch.nn.GELU()
    return model


if __name__ == "__main__":
    train_lm.make_model = make_faulty_model
    sys.exit(train_lm.main())
