"""Trains a small language model with DeepSpeed; whether ONNX Runtime executes it is the JSON's affair.

deepspeed --num_gpus 2 examples/train_lm.py --deepspeed_config configs/zero3.json
torchrun --nproc_per_node 2 examples/train_lm.py --deepspeed_config configs/zero3.json
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    share_in_onnxruntime,
)
from torch.optim.lr_scheduler import LinearLR

LEARNING_RATE_STEPS = 20
"""Steps over which the learning rate rises to the JSON's."""
WARM_UP = 5
"""Steps at the beginning that are left out of the times: export, first allocations."""


def make_engine(args: argparse.Namespace, config: dict[str, Any]) -> Any:
    """Return a DeepSpeed engine around a new model, the same weights each time."""
    model = make_model(layers=args.layers, hidden=args.hidden, seq=args.seq, seed=args.seed)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: LinearLR(optimizer, start_factor=0.05, total_iters=LEARNING_RATE_STEPS),
        config=config,
    )
    return engine


def train(
    engine: Any, steps: int, batch: Callable[[int], dict[str, torch.Tensor]], show: Callable[[int, float], None]
) -> tuple[list[float], list[float]]:
    """Train and return, for each step, the loss as the mean of all ranks, and the seconds it took."""
    engine.train()
    losses, seconds = [], []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(**batch(step * engine.gradient_accumulation_steps() + micro)).loss
            engine.backward(loss)
            engine.step()
        losses.append(mean_over_ranks(loss))
        seconds.append(time.perf_counter() - start)
        show(step, losses[-1])
    return losses, seconds


Training = tuple[list[float], list[float]]
"""Losses and seconds of steps, as :func:`train` returns them."""


def comparison(ours: Training, eager: Training, memory: Training | None = None, *, share: float | None) -> str:
    """Return a line with ONNX Runtime's share and the ratios of the times, and one that compares the losses.

    In ONNX Runtime the last steps count: the first ones measure where everything is fastest.

    Args:
        ours: the training as the config has it.
        eager: the first steps of it in PyTorch, without ort_zero.
        memory: the same with ort_zero's measures for the memory of CPUs alone, if the config has the section.
        share: ONNX Runtime's share of the floating-point operations at the end.
    """
    steps = len(eager[0])
    apart = max(abs(a - b) for a, b in zip(ours[0], eager[0]))
    last = max(1, steps - WARM_UP)
    our_time, eager_time, memory_time = (
        statistics.median(seconds[-last:]) for _, seconds in (ours, eager, memory or eager)
    )
    text = f"a step takes {our_time:.3f} s, in eager PyTorch {eager_time:.3f} s: ratio {our_time / eager_time:.2f}"
    if memory is not None:
        text += f'; PyTorch with "cpu_memory" alone {memory_time:.3f} s: ratio {memory_time / eager_time:.2f}'
    if share is not None:
        text = f"ONNX Runtime runs {share:.0%} of the floating-point operations; {text}"
    return f"PyTorch on the same {steps} steps: losses within {apart:.1e} of these\n{text}"


def main() -> int:
    """Train, print one line per step and what executed the model; return the exit status."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on the prose of Python's manual.")
    add_arguments(parser)
    parser.add_argument("--deepspeed_config", required=True, help="path of the DeepSpeed JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the deepspeed launcher")
    parser.add_argument(
        "--compare-torch",
        type=int,
        default=0,
        metavar="STEPS",
        help="train so many steps in PyTorch first, and compare",
    )
    args = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # of torch 2.13, about collectives that DeepSpeed calls
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

    config = json.loads(Path(args.deepspeed_config).read_text())
    if args.batch:
        config["train_micro_batch_size_per_gpu"] = args.batch
    deepspeed.init_distributed()
    rank, world = rank_and_world()
    train_text, held_out = load_text()
    shape = {"seq": args.seq, "seed": args.seed, "rank": rank, "world": world}

    def batch(number: int, text: torch.Tensor = train_text) -> dict[str, torch.Tensor]:
        size = engine.train_micro_batch_size_per_gpu()
        return make_batch(text, step=number, batch=size, device=engine.device, **shape)

    in_torch: list[Training] = []
    if args.compare_torch:
        plain = {key: value for key, value in config.items() if key != "ort_zero"}
        memory_alone = {**plain, "ort_zero": {"backend": "torch", "log_level": "WARNING"}}
        if rank == 0:
            print(f'first {args.compare_torch} steps in PyTorch, and as many with "cpu_memory" alone', flush=True)
        for compared in (plain, memory_alone) if "ort_zero" in config else (plain,):
            engine = make_engine(args, compared)
            in_torch.append(train(engine, min(args.compare_torch, args.steps), batch, lambda step, loss: None))
            engine.destroy()
    engine = make_engine(args, config)
    ours = train(engine, args.steps, batch, StepPrinter(args.steps))

    engine.eval()
    with torch.no_grad():
        validation = mean_over_ranks(engine(**batch(0, held_out)).loss)
    if rank == 0:
        print(f"validation loss {validation:.4f}")
    proved = print_proof(args.steps * engine.gradient_accumulation_steps(), config)
    if args.out:
        engine.save_checkpoint(args.out, tag=f"step_{args.steps}")
        if rank == 0:
            print(f"checkpoint: {Path(args.out) / f'step_{args.steps}'}", flush=True)
    if in_torch and rank == 0:
        print(comparison(ours, *in_torch, share=share_in_onnxruntime()), flush=True)
    status = exit_status(proved, args)
    engine.destroy()
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
