"""Measures aggregation beside a raw copy of the same bytes, as a process from the shell, and on 2 ranks.

* A raw copy reads the masters' bytes by ``preadv`` and writes them, in blocks of 8 MiB and without checksums: what the
  kernel takes for the bytes alone. CPU time of both, in one process each, in turn.
* The commands are started as a user starts them, imports and all: ``ort-zero aggregate`` beside DeepSpeed's
  ``zero_to_fp32.py`` and a process that writes the same bytes with ``safetensors.torch.save_file``.
* One rank with one thread beside two ranks with one each, into as many output files as ranks and into a single one;
  the same of a raw copy.

Run it on a file system that is no bottleneck, such as ``--dir /dev/shm``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aggregate import Goal, alone, bytes_of, show, write_deepspeed, write_ours

COPY_GOAL = 1.5
"""Largest ratio of our CPU time to that of a raw copy."""
SMALL_GOAL = 0.6
"""Most seconds for 10 MB from the shell."""
PROCESS_GOALS = {"zero_to_fp32": 0.5, "save_file": 0.8}
"""Largest ratios of the CPU time of our process to that of others, for 1 GB."""
RANKS_GOAL = 1 / 1.7
"""Largest ratio of the time of two ranks to that of one, where each has an output file of its own."""
BLOCK = 8 << 20


def run_aggregate(source: str, out: str, workers: int = 1) -> float:
    """Aggregate once for warming up and once measured; return the CPU seconds."""
    from ort_zero.checkpoint import aggregate

    before = time.process_time()
    aggregate(source, out, progress=False, workers=workers)
    return time.process_time() - before


def run_copy(size: int, source: str, out: str) -> float:
    """Copy `size` bytes of the optimizers' files into one; return the CPU seconds."""
    os.mkdir(out)
    names = sorted(Path(source).glob("*/*optim_states.pt")) or sorted(Path(source).glob("*/*_master.safetensors"))
    before = time.process_time()
    buffer = memoryview(bytearray(BLOCK))
    target = os.open(f"{out}/copy", os.O_WRONLY | os.O_CREAT)
    part = -(-size // len(names))
    left = size
    for name in names:
        descriptor = os.open(name, os.O_RDONLY)
        position, end = 0, min(part, left)
        left -= end
        while position < end:
            view = buffer[: min(BLOCK, end - position)]
            got = os.preadv(descriptor, [view], position)
            os.write(target, view[:got])
            position += got
        os.close(descriptor)
    os.close(target)
    return time.process_time() - before


def copies(scratch: str, weights: int, rounds: int, counts: list[int]) -> list[Goal]:
    """Compare with a raw copy, for each kind of checkpoint and number of ranks."""
    goals = []
    for kind in ("zero1", "zero3", "ours"):
        for ranks in counts:
            source, out = f"{scratch}/source", f"{scratch}/out"
            shapes = (
                alone(write_ours, source, ranks, weights)
                if kind == "ours"
                else alone(write_deepspeed, source, int(kind[-1]), ranks, weights)
            )
            found: dict[str, list[float]] = {"ours": [], "copy": []}
            for number in range(rounds):
                for way in ("ours", "copy") if number % 2 else ("copy", "ours"):
                    args = (run_aggregate, source, out) if way == "ours" else (run_copy, bytes_of(shapes), source, out)
                    found[way].append(alone(*args))
                    shutil.rmtree(out)
            shutil.rmtree(source)
            label = f"{kind}, {ranks} ranks, {bytes_of(shapes) / 1e9:.2f} GB: CPU / raw copy"
            ours, peer = (statistics.median(found[way]) for way in ("ours", "copy"))
            goals.append(Goal(label, ours, peer, COPY_GOAL, "s"))
            print(f"{label}: {ours:.3f} / {peer:.3f} = {ours / peer:.2f}", file=sys.stderr, flush=True)
    return goals


def timed(command: list[str], out: str) -> tuple[float, float]:
    """Run a command; return its seconds of wall and of CPU time. What it wrote is removed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(out)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def processes(scratch: str, weights: int, rounds: int) -> list[Goal]:
    """Measure whole processes from the shell."""
    source, out = f"{scratch}/source", f"{scratch}/out"
    ours = [sys.executable, "-m", "ort_zero", "aggregate", source, out]
    alone(write_deepspeed, source, 1, 2, int(10e6))
    small = [timed(ours, out) for _ in range(max(3, rounds))]
    shutil.rmtree(source)
    goals = [
        Goal("10 MB from the shell: wall, limit", min(wall for wall, _ in small), SMALL_GOAL, 1.0, "s"),
        Goal("10 MB from the shell: CPU, limit", statistics.median(cpu for _, cpu in small), SMALL_GOAL, 1.0, "s"),
    ]
    alone(write_deepspeed, source, 1, 2, weights)
    peer = "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert\n"
    peer += f"convert({source!r}, {out!r}, safe_serialization=True)"
    save = "import os, sys\nsys.path.insert(0, os.path.dirname(sys.argv[1]))\n"
    save += f"from aggregate import run_save_file\nrun_save_file({weights}, {out!r})"
    ways = {
        "ours": ours,
        "zero_to_fp32": [sys.executable, "-c", peer],
        "save_file": [sys.executable, "-c", save, __file__],
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, command in ways.items():
            found[way].append(timed(command, out))
    shutil.rmtree(source)
    for way, goal in PROCESS_GOALS.items():
        for index, clock in ((1, "CPU"), (0, "wall")):
            mine, other = (statistics.median(times[index] for times in found[name]) for name in ("ours", way))
            goals.append(
                Goal(f"{weights / 1e9:.1f} GB from the shell: {clock} / process of {way}", mine, other, goal, "s")
            )
    return goals


def rank_seconds(source: str, out: str, limit: int) -> float:
    """Aggregate as one of the ranks that run, with one thread each; return the seconds of the slowest."""
    import ort_zero.checkpoint.deepspeed.reader  # noqa: F401 - no measurement pays for imports
    from ort_zero.checkpoint import aggregate
    from ort_zero.distributed.launched_ranks import from_launcher

    ranks = from_launcher(source)
    ranks.gather(None)
    start = time.perf_counter()
    aggregate(source, out, progress=False, workers=1, ranks=ranks, max_shard_size=limit)
    seconds = time.perf_counter() - start
    return max(ranks.gather(seconds))


def rank_copy(source: str, out: str, size: int, files: int) -> float:
    """Copy as one of the ranks that run its part of `size` bytes into one of `files`; return what the slowest took."""
    from ort_zero.distributed.launched_ranks import from_launcher

    names = sorted(Path(source).glob("*/*optim_states.pt"))
    buffer = memoryview(bytearray(1 << 20))
    ranks = from_launcher(source)
    os.makedirs(out, exist_ok=True)
    ranks.gather(None)
    start = time.perf_counter()
    part = size // len(names)
    for number in range(ranks.rank, len(names), ranks.size):
        descriptor = os.open(names[number], os.O_RDONLY)
        target = os.open(f"{out}/{number % files}", os.O_WRONLY | os.O_CREAT)
        begin = number // files * part
        for position in range(0, part - len(buffer), len(buffer)):
            os.preadv(descriptor, [buffer], position)
            os.pwrite(target, buffer, begin + position)
        os.close(descriptor)
        os.close(target)
    return max(ranks.gather(time.perf_counter() - start))


def two_ranks(scratch: str, weights: int, rounds: int) -> list[Goal]:
    """Compare two ranks with one, one thread each, where each rank has an output file, and with a raw copy."""
    from rank_launcher import run_on_ranks

    source, out = f"{scratch}/source", f"{scratch}/out"
    size = bytes_of(alone(write_deepspeed, source, 1, 2, weights))
    seconds: dict[tuple[str, int], list[float]] = {(way, count): [] for way in ("ours", "copy") for count in (1, 2)}
    for _ in range(rounds):
        for way, count in seconds:
            args = (rank_seconds, count, source, out, size * 11 // 20)
            if way == "copy":
                args = (rank_copy, count, source, out, size, 2)
            seconds[way, count].append(run_on_ranks(*args)[0])
            shutil.rmtree(out)
    ours_2, ours_1, copy_2, copy_1 = (
        statistics.median(seconds[way, count]) for way in ("ours", "copy") for count in (2, 1)
    )
    label = f"{size / 1e9:.1f} GB into 2 files: 2 ranks / 1 rank"
    print(f"{label}: {ours_2:.3f} / {ours_1:.3f} s, raw copy {copy_2:.3f} / {copy_1:.3f} s", file=sys.stderr)
    shutil.rmtree(source)
    return [Goal(label, ours_2, ours_1, RANKS_GOAL, "s")]


def main() -> int:
    """Print the figures; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="Aggregation beside a raw copy, from the shell, and on 2 ranks.")
    parser.add_argument("--weights", type=float, default=1.0, help="GB of fp32 weights")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where to write; what is written is removed. Default: a temporary folder")
    parser.add_argument("--only", choices=("copies", "processes", "ranks"))
    parser.add_argument("--quick", action="store_true", help="one round of a small checkpoint: that it runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.weights, args.rounds, args.ranks = 0.05, 1, [2]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    weights = int(args.weights * 1e9)
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="ort_zero_bench_", dir=args.dir) as scratch:
        if args.only in (None, "copies"):
            goals += copies(scratch, weights, args.rounds, args.ranks)
        if args.only in (None, "processes"):
            goals += processes(scratch, weights, args.rounds)
        if args.only in (None, "ranks"):
            goals += two_ranks(scratch, weights, args.rounds)
    if args.json:
        print(json.dumps({"goals": [goal.as_dict() for goal in goals]}))
    else:
        show(goals)
    return int(not args.quick and not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
