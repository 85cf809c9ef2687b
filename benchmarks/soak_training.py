"""The training of `soak.py`, one rank: an ordinary script with everything switched on that a long run has.

GPT-2 under ZeRO-3 in ONNX Runtime with every weight gathered: batches of changing length, an evaluation every 50 steps,
a checkpoint every 100 in the background, a layer that is frozen and set free twice, statistics for 20 steps. All of it
has happened once by step 200. After every tenth step it notes what the process holds; at its end it writes these notes
to a file of its rank.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from training_models import build

import ort_zero

MODEL = {"hidden": 96, "layers": 3, "vocab": 1000, "seq": 32}
BATCH = 4
LENGTHS = (16, 20, 24, 28, 32)
NOTE_EVERY = 10
KEEP = 2
"""How many of the newest checkpoints stay on the disk."""


class _Heap(ctypes.Structure):
    """What ``mallinfo2`` of glibc 2.33 and later tells, in bytes and blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def in_use() -> float:
    """Return MiB of the heap that are in use: resident memory has what was freed as well."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Heap
    return mallinfo2().uordblks / (1 << 20)


def held() -> dict[str, float]:
    """Return what this process holds: MiB of anonymous memory, open files, threads, mappings of shared memory."""
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    with open("/proc/self/maps", encoding="utf-8") as file:
        shared = {line.split(maxsplit=5)[-1].strip() for line in file if "/dev/shm/" in line}
    return {
        "rss_mib": int(fields["RssAnon"].split()[0]) / 1024,
        "used_mib": in_use(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(fields["Threads"]),
        "python_threads": threading.active_count(),
        "shared": len(shared),
    }


def config(args: argparse.Namespace) -> dict[str, Any]:
    """Return DeepSpeed's config; with ``--plain`` without the section of ort_zero."""
    found = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "ort_zero": {
            "compile": {"place": "ort"},
            "checkpoint": {"sharded": True, "async_save": True},
            "statistics": {
                "enabled": True, "output_dir": str(args.dir / "statistics"), "start_step": 110,
                "end_step": 130,
            },
        },
    }  # fmt: skip
    if args.plain:
        del found["ort_zero"]
    return found


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train and return what was noted."""
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    model = build("gpt2", MODEL)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(args))
    lengths = random.Random(1)
    ids = torch.randint(0, MODEL["vocab"], (BATCH, MODEL["seq"]), generator=torch.Generator().manual_seed(rank))
    layer = model.transformer.h[1]
    frozen = {140: True, 180: False, args.steps // 2: True, args.steps // 2 + 50: False}
    checkpoints, notes, losses = args.dir / "checkpoints", [], []
    spent, cpu = time.perf_counter(), time.process_time()
    for step in range(1, args.steps + 1):
        if step in frozen:
            layer.requires_grad_(not frozen[step])
        batch = ids[:, : lengths.choice(LENGTHS)].contiguous()
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if step % 50 == 0:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(input_ids=ids, labels=ids).loss.item())
            engine.train()
        if step % 100 == 0:
            engine.save_checkpoint(str(checkpoints), tag=f"step_{step}")
            if rank == 0 and step > 100 * (KEEP + 1):
                shutil.rmtree(checkpoints / f"step_{step - 100 * (KEEP + 1)}")
        if step % NOTE_EVERY == 0:
            now, work = time.perf_counter(), time.process_time()
            notes.append({"step": step, "seconds": (now - spent) / NOTE_EVERY, "cpu": (work - cpu) / NOTE_EVERY,
                          **held()})  # fmt: skip
            spent, cpu = now, work
    status = None if args.plain else ort_zero.status()["models"][-1]
    engine.destroy()
    torch.distributed.destroy_process_group()
    return {"notes": notes, "losses": losses, "status": status}


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of soak.py.")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    report = train(args)
    (args.dir / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(report, default=str))


if __name__ == "__main__":
    main()
