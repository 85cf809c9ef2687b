"""Measures how long a save holds up training, and what memory it takes: sharded checkpoints beside DeepSpeed's own.

Real engines on two ranks, one launch per round. Within a round one engine is saved by all ways in turn, so that all
write the same state and meet the same machine; each checkpoint is removed before the next one is written, which also
drops its pages that are not on disk yet. The time of a save is that of the slowest rank. DeepSpeed's checkpoint holds
the module's weights beside masters and moments; ours holds them once, for they follow from the masters.

The first background save of an engine finds no memory for its copy, later ones do: they are told apart. Their copy is
made while the next forward and backward run, and the optimizer's step waits for it: that wait, the "stall", counts as
blocking too, measured with the shortest step there is, a batch of one row. "plain copy" is one ``memmove`` of as many
bytes on all ranks at once, into memory that is there.
Background saves wait for the disk (fsync); "sync and fsync" tells what a synchronous save would pay for that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aggregate import MIB, Goal, Sampler, show

SYNC_GOAL = 0.7
"""Largest ratio of a save's blocking time to DeepSpeed's."""
ASYNC_GOAL = 0.1
"""The same of a background save."""
SLACK = 64 * MIB
"""Bytes that a save may take beyond one copy of the shard: buffers, headers, the allocator."""
WAYS = ("deepspeed", "sync", "sync and fsync", "async first", "async later", "plain copy")


def make_engine(stage: int, precision: str, millions: int, hidden: int) -> Any:
    """Return an engine around linear layers after one step, so that it has moments."""
    import deepspeed
    import torch

    layers = max(1, round(millions * 1e6 / hidden**2))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(hidden, hidden) for _ in range(layers)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ort_zero": {"backend": "torch", "checkpoint": {"sharded": False}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    train_step(engine, hidden)
    return engine


def train_step(engine: Any, hidden: int) -> None:
    """Train with one row: the shortest forward and backward that there are."""
    import torch

    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(1, hidden, dtype=dtype)).float().square().mean())
    engine.step()


def stall_of_step(engine: Any, root: str, way: str, hidden: int) -> float:
    """Return the seconds for which the optimizer's step waits for the copy when training goes on at once."""
    from ort_zero import checkpoint

    moments: list[float] = []
    optimizer = engine.optimizer.optimizer

    def note(*_: Any) -> None:
        moments.append(time.perf_counter())

    before = optimizer.register_step_pre_hook(note)
    checkpoint.save(engine, root, tag=f"{way} again", async_save=True)
    after = optimizer.register_step_pre_hook(note)  # hooks run in the order of their registration
    train_step(engine, hidden)
    before.remove()
    after.remove()
    checkpoint.wait(engine)
    return moments[1] - moments[0]


def measure(root: str, precision: str, millions: int, hidden: int, shift: int) -> dict[str, dict[str, float]]:
    """Run on each rank: return seconds, growth of memory and bytes of each way to save."""
    import ort_zero

    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    import numpy as np
    import torch.distributed as dist

    from ort_zero import checkpoint

    engine = make_engine(2, precision, millions, hidden)
    rank = dist.get_rank()

    def save(way: str) -> None:
        if way == "deepspeed":
            engine.save_checkpoint(root, tag=way)
            return
        checkpoint.save(engine, root, tag=way, async_save=way.startswith("async"))
        if "fsync" in way:
            for path in (Path(root) / way).glob(f"rank_{rank:05d}_*"):
                with open(path) as file:
                    os.fsync(file.fileno())

    found: dict[str, dict[str, float]] = {}
    ways = list(WAYS[:3])
    ways = ways[shift % 3 :] + ways[: shift % 3]
    # not measured: it opens the connection between the ranks and imports what is needed
    checkpoint.save(engine, root, tag="warm")
    for way in (*ways, "async first", "async later"):
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root)
            os.mkdir(root)
        dist.barrier()
        with Sampler() as sampler:
            start = time.perf_counter()
            save(way)
            seconds = time.perf_counter() - start
            checkpoint.wait(engine)
            total = time.perf_counter() - start
        stall = stall_of_step(engine, root, way, hidden) if way.startswith("async") else 0.0
        dist.barrier()
        files = [path for path in (Path(root) / way).iterdir()]
        own = f"rank_{rank:05d}_"
        found[way] = {
            "seconds": seconds,
            "stall": stall,
            "until_written": total,
            "growth": sampler.growth,
            "shard": sum(f.stat().st_size for f in files if f.name.startswith(own)),
            "bytes": sum(f.stat().st_size for f in files),
        }
    engine.destroy()
    size = found["sync"]["shard"]
    source, place = np.ones(size, np.uint8), np.ones(size, np.uint8)
    dist.barrier()
    start = time.perf_counter()
    np.copyto(place, source)
    seconds = time.perf_counter() - start
    found["plain copy"] = dict(seconds=seconds, stall=0.0, until_written=seconds, growth=0, shard=size, bytes=0)
    return found


def summarize(rounds: list[list[dict[str, dict[str, float]]]]) -> dict[str, dict[str, float]]:
    """Return medians of the rounds by way; of the ranks the largest counts."""
    return {
        way: {
            key: statistics.median(max(rank[way][key] for rank in ranks) for ranks in rounds)
            for key in rounds[0][0][way]
        }
        for way in WAYS
    }


def goals_of(name: str, result: dict[str, dict[str, float]]) -> list[Goal]:
    """Return what is asked of one precision."""
    peer = result["deepspeed"]["seconds"]
    goals = []
    for way in ("sync", "async first", "async later"):
        goal = ASYNC_GOAL if way.startswith("async") else SYNC_GOAL
        blocking = result[way]["seconds"] + result[way]["stall"]
        goals.append(Goal(f"{name}: {way} save, blocking and stall", blocking, peer, goal, "s"))
    for way in ("sync", "async first", "async later"):
        copies = 0 if way == "sync" else result[way]["shard"]
        limit = (copies + SLACK) / MIB
        goals.append(Goal(f"{name}: {way} save, memory, limit", result[way]["growth"] / MIB, limit, 1.0, "MiB"))
    return goals


def main() -> int:
    """Print the figures; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="Blocking time and memory of saves, beside DeepSpeed's.")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16", "fp16"), default=["fp32", "bf16"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--millions", type=int, default=200, help="parameters of the model, in millions")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dir", help="where to write; removed at the end. Default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="one round of a small model: that it runs")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.millions, args.hidden = 1, 4, 512
    from rank_launcher import run_on_ranks

    results: dict[str, dict[str, dict[str, float]]] = {}
    goals: list[Goal] = []
    for precision in args.precisions:
        rounds = []
        for number in range(args.rounds):
            with tempfile.TemporaryDirectory(prefix="ort_zero_bench_", dir=args.dir) as root:
                folder = os.path.join(root, "saves")
                os.mkdir(folder)
                given = (folder, precision, args.millions, args.hidden, number)
                rounds.append(run_on_ranks(measure, args.ranks, *given, timeout=args.timeout))
        name = f"ZeRO-2 {precision}"
        results[name] = summarize(rounds)
        goals += goals_of(name, results[name])
        if not args.json:
            print(f"{name}, {args.millions} M parameters, {args.ranks} ranks")
            for way, got in results[name].items():
                print(
                    f"  {way:<22}{got['seconds']:8.3f} s blocking, {got['stall']:6.3f} s stall of the next step, "
                    f"{got['until_written']:7.3f} s until written, "
                    f"{got['bytes'] / 1e9:6.2f} GB, {got['bytes'] / 1e9 / got['until_written']:5.2f} GB/s, "
                    f"memory +{got['growth'] / MIB:7.1f} MiB"
                )
    if args.json:
        print(json.dumps({"results": results, "goals": [goal.as_dict() for goal in goals]}))
    else:
        show(goals)
    return int(not args.quick and not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
