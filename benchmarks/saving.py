"""Measures a synchronous save beside DeepSpeed's ``save_checkpoint`` with its default writer: wall and CPU time.

Real engines on several ranks; within a round one engine is saved in both ways in turn, and the order changes from round
to round. The wall time is that of the slowest rank, the CPU time that of all ranks together. A checkpoint is removed
before the next one is written. "the bytes alone" is a plain write of as many bytes as ours has, by each rank its share:
what the kernel takes. ``--dir`` says on which file system; one after the other, for several.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from aggregate import Goal, show
from checkpoints import make_engine

GOAL = 0.5
"""Largest ratio of our times to DeepSpeed's."""
WAYS = ("deepspeed", "ours", "the bytes alone")
BLOCK = 8 << 20


def measure(root: str, stage: int, precision: str, millions: int, hidden: int, rounds: int) -> dict[str, list]:
    """Run on each rank: return (seconds, CPU seconds, bytes of the checkpoint) of each way, by round."""
    import ort_zero

    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    import torch.distributed as dist

    from ort_zero import checkpoint

    engine = make_engine(stage, precision, millions, hidden)
    rank = dist.get_rank()
    size = 0

    def write_bytes(tag: str) -> None:
        os.makedirs(f"{root}/{tag}", exist_ok=True)
        with open(f"{root}/{tag}/{rank}", "wb", buffering=0) as file:
            for _ in range(size // dist.get_world_size() // BLOCK):
                file.write(block)

    block = bytes(BLOCK)
    ways: dict[str, Callable[[str], Any]] = {
        "deepspeed": lambda tag: engine.save_checkpoint(root, tag=tag),
        "ours": lambda tag: checkpoint.save(engine, root, tag=tag),
        "the bytes alone": write_bytes,
    }
    found: dict[str, list] = {way: [] for way in ways}
    for number in range(rounds + 1):
        labels = ["deepspeed", "ours"] if number % 2 else ["ours", "deepspeed"]
        for way in (*labels, "the bytes alone"):
            dist.barrier()
            before, start = time.process_time(), time.perf_counter()
            ways[way](f"tag{number}")
            used = time.perf_counter() - start, time.process_time() - before
            dist.barrier()
            written = sum(entry.stat().st_size for entry in os.scandir(f"{root}/tag{number}"))
            size = written if way == "ours" else size
            if number:  # the first opens connections and imports what is needed
                found[way].append((*used, written))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(f"{root}/tag{number}")
    engine.destroy()
    return found


def main() -> int:
    """Print the figures; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="Wall and CPU time of a synchronous save, beside DeepSpeed's.")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--millions", type=int, default=40, help="parameters of the model, in millions")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dir", nargs="+", help="where to write; removed at the end. Default: a temporary folder")
    parser.add_argument("--timeout", type=float, default=300)
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    goals = []
    for folder in args.dir or [tempfile.gettempdir()]:
        for stage in args.stages:
            with tempfile.TemporaryDirectory(prefix="ort_zero_bench_", dir=folder) as root:
                given = (root, stage, args.precision, args.millions, args.hidden, args.rounds)
                ranks = run_on_ranks(measure, args.ranks, *given, timeout=args.timeout)
            wall, cpu = {}, {}
            name = f"{folder}: ZeRO-{stage} {args.precision}"
            print(f"{name}, {args.millions} M parameters, {args.ranks} ranks")
            for way in WAYS:
                rounds = list(zip(*(rank[way] for rank in ranks), strict=True))
                wall[way] = statistics.median(max(one[0] for one in each) for each in rounds)
                cpu[way] = statistics.median(sum(one[1] for one in each) for each in rounds)
                size = rounds[0][0][2] / 1e9
                print(f"  {way:<18}{wall[way]:8.3f} s, {cpu[way]:8.3f} s of CPU, {size:6.2f} GB")
            for label, found in (("CPU", cpu), ("wall", wall)):
                goals.append(Goal(f"{name}: {label} / DeepSpeed's", found["ours"], found["deepspeed"], GOAL, "s"))
    show(goals)
    return int(not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
