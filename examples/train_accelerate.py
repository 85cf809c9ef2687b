"""Trains the same language model through Accelerate; the YAML names the DeepSpeed JSON.

accelerate launch --config_file configs/accelerate_zero3.yaml examples/train_accelerate.py
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, DummyOptim
from lm_common import (
    StepPrinter,
    add_arguments,
    exit_status,
    load_text,
    make_batch,
    make_model,
    mean_over_ranks,
    print_proof,
    rank_and_world,
)


def main() -> int:
    """Train, print one line per step and what executed the model; return the exit status."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2 through Accelerate and DeepSpeed.")
    add_arguments(parser)
    args = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

    accelerator = Accelerator()
    if accelerator.distributed_type is not DistributedType.DEEPSPEED:
        parser.error("start with: accelerate launch --config_file configs/accelerate_zero3.yaml " + sys.argv[0])
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    if args.batch:
        config["train_micro_batch_size_per_gpu"] = args.batch
    model = make_model(layers=args.layers, hidden=args.hidden, seq=args.seq, seed=args.seed)
    # the optimizer is the JSON's; Accelerate wants a placeholder for it
    model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))
    # On a machine without accelerator Accelerate counts one process, while DeepSpeed runs them all.
    rank, world = rank_and_world()
    train_text, _ = load_text()

    model.train()
    print_step = StepPrinter(args.steps)
    for step in range(1, args.steps + 1):
        batch = make_batch(
            train_text,
            step=step,
            batch=config["train_micro_batch_size_per_gpu"],
            seq=args.seq,
            seed=args.seed,
            rank=rank,
            world=world,
            device=accelerator.device,
        )
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print_step(step, mean_over_ranks(loss))

    proved = print_proof(args.steps, config)
    if args.out:
        model.save_checkpoint(args.out, tag=f"step_{args.steps}")
        if rank == 0:
            print(f"checkpoint: {Path(args.out) / f'step_{args.steps}'}", flush=True)
    status = exit_status(proved, args)
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
