"""Trains a small language model with DeepSpeed; whether ONNX Runtime executes it is the JSON's affair.

deepspeed --num_gpus 2 examples/train_lm.py --deepspeed_config configs/zero3.json
torchrun --nproc_per_node 2 examples/train_lm.py --deepspeed_config configs/zero3.json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
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
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on the prose of Python's manual.")
    add_arguments(parser)
    parser.add_argument("--deepspeed_config", required=True, help="path of the DeepSpeed JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the deepspeed launcher")
    args = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

    config = json.loads(Path(args.deepspeed_config).read_text())
    if args.batch:
        config["train_micro_batch_size_per_gpu"] = args.batch
    deepspeed.init_distributed()
    rank, world = rank_and_world()
    model = make_model(layers=args.layers, hidden=args.hidden, seq=args.seq, seed=args.seed)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    train_text, held_out = load_text()
    shape = {
        "batch": engine.train_micro_batch_size_per_gpu(),
        "seq": args.seq,
        "seed": args.seed,
        "rank": rank,
        "world": world,
        "device": engine.device,
    }

    engine.train()
    print_step = StepPrinter(args.steps)
    for step in range(1, args.steps + 1):
        for micro in range(engine.gradient_accumulation_steps()):
            number = step * engine.gradient_accumulation_steps() + micro
            loss = engine(**make_batch(train_text, step=number, **shape)).loss
            engine.backward(loss)
            engine.step()
        print_step(step, mean_over_ranks(loss))

    engine.eval()
    with torch.no_grad():
        validation = mean_over_ranks(engine(**make_batch(held_out, step=0, **shape)).loss)
    if rank == 0:
        print(f"validation loss {validation:.4f}")
    proved = print_proof(args.steps * engine.gradient_accumulation_steps())
    if args.out:
        engine.save_checkpoint(args.out, tag=f"step_{args.steps}")
        if rank == 0:
            print(f"checkpoint: {Path(args.out) / f'step_{args.steps}'}", flush=True)
    status = exit_status(proved, args)
    engine.destroy()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
