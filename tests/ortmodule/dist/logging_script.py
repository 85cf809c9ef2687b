"""One rank that trains two steps and says something at every level; run as a script, so that a test has its streams.

RANK=0 WORLD_SIZE=2 ... python logging_script.py MODEL STAGE LEVEL
"""

from __future__ import annotations

import logging
import os
import sys

import torch
from deepspeed_setup import ds_config, start
from torch import nn

from ort_zero import log


class Net(nn.Module):
    """Prints while it is traced, as an exporter does."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        if torch.jit.is_tracing():
            print("traced to stdout", sys.stdout is sys.__stdout__)
            print("traced to stderr", file=sys.stderr)
        return self.b(torch.tanh(self.a(x)))


class Fails(Net):
    def forward(self, x):
        out = super().forward(x)
        if torch.jit.is_tracing():
            raise ValueError("cannot be traced")
        return out


class Exits(Net):
    def forward(self, x):
        out = super().forward(x)
        if torch.jit.is_tracing():
            sys.exit(7)
        return out


class Dies(Net):
    """Is killed in native code while it is traced."""

    def forward(self, x):
        out = super().forward(x)
        if torch.jit.is_tracing():
            os.write(2, b"native words\n")
            os.kill(os.getpid(), 9)
        return out


def main(model: str, stage: int, level: str) -> None:
    """Train two steps, then let the logger speak at each level."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    rank = start()
    import deepspeed

    config = ds_config(stage, ort=True, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}))
    config["ort_zero"]["ortmodule"] |= {"log_level": level, "split": "off"}
    torch.manual_seed(0)
    net = globals()[model]()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 6)).square().mean())
        engine.step()
    logger = log.get_logger()
    for number in (logging.DEBUG, logging.DEBUG + 5, logging.INFO, logging.WARNING, logging.ERROR):
        logger.log(number, "probe")
    print("root logger as before:", (root.handlers, root.level) == before)
    torch.distributed.barrier()
    print("rank", rank, "done", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
