"""Holds a long training to what it may hold on to: memory, files, threads and time must not grow with the steps.

GPT-2 under ZeRO-3 in ONNX Runtime with every weight gathered: batches of changing length, an evaluation every 50 steps,
a checkpoint every 100 in the background, a layer that is frozen and set free twice, statistics for 20 steps. All of it
has happened once by step 200. What each rank notes after every tenth step from then on is held against the goals below.
Then a short training is started and ended many times: each must end with status 0 and without a warning.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SETTLED = 200
"""Steps after which everything of the training has happened once."""
MEMORY, TIME = 1.02, 1.05
"""Largest factors by which the anonymous memory, and the CPU time of a step, may grow from then on."""
MODEL = {"hidden": 96, "layers": 3, "vocab": 1000, "seq": 32}
BATCH = 4
LENGTHS = (16, 20, 24, 28, 32)
NOTE_EVERY = 10
COUNTED = ("descriptors", "python_threads", "shared")
"""What a rank notes as a count; a save in the background holds some for a moment."""
_NOISE = re.compile(r"Traceback|Warning|warning|leaked|destroy_process_group|Segmentation|core dumped|terminate called")
_ACCEPTED = "`loss_type=None` was set in the config"
_SHARED = Path("/dev/shm")


class _Heap(ctypes.Structure):
    """What ``mallinfo2`` of glibc 2.33 and later tells, in bytes and blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def noted() -> dict[str, float]:
    """Return what this process holds: MiB of anonymous memory and of the heap in use, files, threads, mappings."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Heap
    anonymous = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {
        "rss_mib": int(anonymous[1]) / 1024,
        "used_mib": mallinfo2().uordblks / (1 << 20),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "python_threads": threading.active_count(),
        "shared": len({line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/" in line}),
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train on each rank; return notes, losses and the status of ort_zero."""
    import deepspeed
    import torch
    from training_models import build

    import ort_zero

    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    folder = {"output_dir": str(args.dir / "statistics"), "start_step": 110, "end_step": 130}
    section = {
        "compile": {"place": "ort"},
        "checkpoint": {"sharded": True, "async_save": True},
        "statistics": {"enabled": True, **folder},
    }
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **({} if args.plain else {"ort_zero": section}),
    }
    model = build("gpt2", MODEL)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    lengths = random.Random(1)
    ids = torch.randint(0, MODEL["vocab"], (BATCH, MODEL["seq"]), generator=torch.Generator().manual_seed(rank))
    frozen = {140: True, 180: False, args.steps // 2: True, args.steps // 2 + 50: False}
    checkpoints, notes, losses = args.dir / "checkpoints", [], []
    cpu = time.process_time()
    for step in range(1, args.steps + 1):
        if step in frozen:
            model.transformer.h[1].requires_grad_(not frozen[step])
        batch = ids[:, : lengths.choice(LENGTHS)].contiguous()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        if step % 50 == 0:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(input_ids=ids, labels=ids).loss.item())
            engine.train()
        if step % 100 == 0:
            engine.save_checkpoint(str(checkpoints), tag=f"step_{step}")
            if rank == 0 and step > 300:  # the newest three stay
                shutil.rmtree(checkpoints / f"step_{step - 300}")
        if step % NOTE_EVERY == 0:
            notes.append({"step": step, "cpu": (time.process_time() - cpu) / NOTE_EVERY, **noted()})
            cpu = time.process_time()
    status = None if args.plain else ort_zero.status()["models"][-1]
    engine.destroy()
    torch.distributed.destroy_process_group()
    return {"notes": notes, "losses": losses, "status": status}


def launch(folder: Path, steps: int, args: argparse.Namespace) -> tuple[int, str]:
    """Train on the ranks under torchrun; return the status and what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    command += [__file__, "--dir", str(folder), "--steps", str(steps), *(["--plain"] if args.plain else [])]
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **os.environ}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=args.timeout
    )
    return done.returncode, done.stdout


def noise_in(text: str) -> list[str]:
    """Return the lines that tell of something wrong, or of something that was left open."""
    return [line[:200] for line in text.splitlines() if _NOISE.search(line) and _ACCEPTED not in line]


def growth_of(notes: list[dict[str, float]]) -> dict[str, float]:
    """Return how what a rank holds has changed since everything had happened once: factors, and counts."""
    later = [note for note in notes if note["step"] > SETTLED]
    tenth = max(5, len(later) // 10)
    first, last = later[:tenth], later[-tenth:]
    return {
        "anonymous memory": max(note["rss_mib"] for note in later) / first[0]["rss_mib"],
        "heap in use": max(note["used_mib"] for note in later) / first[0]["used_mib"],
        "CPU time of a step": statistics.median(n["cpu"] for n in last) / statistics.median(n["cpu"] for n in first),
        **{name: min(note[name] for note in last) - min(note[name] for note in first) for name in COUNTED},
    }


def what_grew(rank: int, report: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Print how what a rank holds has changed; return what is above its goal."""
    growth = growth_of(report["notes"])
    print(f"rank {rank}: {', '.join(f'{name} {value:.3f}' for name, value in growth.items())}")
    goals = {"anonymous memory": MEMORY, "heap in use": MEMORY, "CPU time of a step": TIME, **dict.fromkeys(COUNTED, 0)}
    lost = [f"rank {rank}: {name} {growth[name]:.3f}, at most {goal}" for name, goal in goals.items()
            if growth[name] > goal]  # fmt: skip
    if report["losses"][-1] >= report["losses"][0]:
        lost.append(f"rank {rank}: the loss did not fall")
    status = report["status"]
    if status and (status["failures"] or status["graph_runs"]["backward"] != args.steps * len(status["units"])):
        lost.append(f"rank {rank}: not all in ONNX Runtime: {status['graph_runs']}, {status['failures']}")
    return lost


def main() -> int:
    """Print what grew; return 1 if a goal is not kept."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--starts", type=int, default=50, help="how often a short training is started and ended")
    parser.add_argument("--plain", action="store_true", help="train in PyTorch, without the section of ort_zero")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one training may take")
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dir:  # a rank
        (args.dir / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(train(args), default=str))
        return 0
    if args.steps < 2 * SETTLED:
        parser.error(f"--steps must be at least {2 * SETTLED}, or nothing is settled before the end")
    lost, before = [], set(_SHARED.iterdir())
    for number in range(args.starts + 1):  # the first is the long training
        with tempfile.TemporaryDirectory() as folder:
            status, text = launch(Path(folder), 2 if number else args.steps, args)
            lost += [f"start {number}: status {status}: {text[-1500:]}"] if status else []
            # PyTorch warns of DeepSpeed's calls in a plain training
            lost += [] if args.plain else [f"start {number}: {line}" for line in noise_in(text)]
            for rank in range(args.ranks) if not number and not status else ():
                lost += what_grew(rank, json.loads(Path(folder, f"rank_{rank}.json").read_text()), args)
    lost += [f"left in shared memory: {path.name}" for path in sorted(set(_SHARED.iterdir()) - before)]
    print(f"{args.steps} steps, {args.starts} starts")
    for line in lost:
        print(f"NOT KEPT: {line}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
