"""Measures how long loading takes: ours, DeepSpeed's own and torch.distributed.checkpoint's, in one run.

Real engines on several ranks; within a round one engine loads in all ways in turn. The wall time is that of the slowest
rank, the CPU time that of all ranks together. torch.distributed.checkpoint loads what each rank holds (masters and
moments) into place, without scheduler or any check; the module's weights, with which the engine would go on, are then
gathered from the masters, as ours and DeepSpeed's do. Without them it is measured too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from aggregate import Goal, show
from checkpoints import make_engine

DCP = "torch.distributed.checkpoint"
WAYS = ("deepspeed", "ours", "ours, of DeepSpeed's files", DCP, f"{DCP}, no weights")
GOAL = 1.0
"""Largest ratio of our times to those of the others."""


def measure(root: str, stage: int, precision: str, millions: int, hidden: int, rounds: int) -> dict[str, list]:
    """Run on each rank: return (seconds, CPU seconds) of each way, by round."""
    import ort_zero

    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from ort_zero import checkpoint
    from ort_zero.checkpoint.saves import saving
    from ort_zero.compat.deepspeed_state import EngineState

    engine = make_engine(stage, precision, millions, hidden)
    own = type(engine).load_checkpoint.__wrapped__

    def held() -> dict[str, Any]:
        state, rank, found = EngineState(engine), dist.get_rank(), {}
        for index, flat in enumerate(state.flats()):
            found[f"{rank}.{index}.master"] = flat.master
            found |= {f"{rank}.{index}.{kind}": value for kind, value in state.elementwise(flat).items()}
        return found

    def load_dcp() -> None:
        dcp.load(held(), checkpoint_id=f"{root}/dcp")
        state = EngineState(engine)
        with saving.settled(state):  # else ZeRO-3 would go on with its persistent parameters as they were
            state.loaded()

    engine.save_checkpoint(f"{root}/deepspeed", tag="t")
    checkpoint.save(engine, f"{root}/ours", tag="t")
    dcp.save(held(), checkpoint_id=f"{root}/dcp")
    ways: dict[str, Callable[[], Any]] = {
        "deepspeed": lambda: own(engine, f"{root}/deepspeed", "t"),
        "ours": lambda: checkpoint.load(engine, f"{root}/ours", "t"),
        "ours, of DeepSpeed's files": lambda: checkpoint.load(engine, f"{root}/deepspeed", "t"),
        DCP: load_dcp,
        f"{DCP}, no weights": lambda: dcp.load(held(), checkpoint_id=f"{root}/dcp"),
    }
    found: dict[str, list] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, load in ways.items():
            dist.barrier()
            before, start = time.process_time(), time.perf_counter()
            load()
            if number:  # the first opens connections and imports what is needed
                found[way].append((time.perf_counter() - start, time.process_time() - before))
    engine.destroy()
    return found


def main() -> int:
    """Print the figures; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="Time of loading, beside DeepSpeed's and torch's.")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--millions", type=int, default=100, help="parameters of the model, in millions")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--dir", help="where to write; removed at the end. Default: a temporary folder")
    parser.add_argument("--timeout", type=float, default=400)
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    goals = []
    for stage in args.stages:
        with tempfile.TemporaryDirectory(prefix="ort_zero_bench_", dir=args.dir) as root:
            given = (root, stage, args.precision, args.millions, args.hidden, args.rounds)
            ranks = run_on_ranks(measure, args.ranks, *given, timeout=args.timeout)
        print(f"ZeRO-{stage} {args.precision}, {args.millions} M parameters, {args.ranks} ranks")
        wall, cpu = {}, {}
        for way in WAYS:
            rounds = list(zip(*(rank[way] for rank in ranks), strict=True))
            wall[way] = statistics.median(max(seconds for seconds, _ in each) for each in rounds)
            cpu[way] = statistics.median(sum(used for _, used in each) for each in rounds)
            print(f"  {way:<42}{wall[way]:8.3f} s, {cpu[way]:8.3f} s of CPU")
        for peer in ("deepspeed", DCP):
            for label, found in (("CPU", cpu), ("wall", wall)):
                goals.append(Goal(f"ZeRO-{stage}: {label} / {peer}", found["ours"], found[peer], GOAL, "s"))
    show(goals)
    return int(not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
