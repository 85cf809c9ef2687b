"""Measures how long a training takes to its first step and its fifth: ONNX Runtime beside Inductor and eager PyTorch.

Each start is a process of its own. A first start finds empty caches, a second one what the first has left in them:
Inductor's kernels and graphs, our placements. Times are wall times in seconds: of the first forward and backward, of
the first five, and of the whole process to the end of the first step, imports and the making of the model included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from step_time import SIZES
from training_models import MODELS, batch, build

SECTIONS = {"torch": None, "compile": None, "segments": "compile", "ortmodule": "ortmodule"}
"""The backend of each variant: eager PyTorch; torch.compile by Inductor; the compile backend with measured placement;
onnxruntime-training (in its own environment)."""
DEFAULT = ("compile", "segments", "torch")
STEPS = 5


def start(name: str, kind: str, size: str) -> dict[str, float]:
    """Return the seconds of the first step, of five steps, and of this process until the first step is over."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {**SIZES[size], "vocab": 8000, "batch": 4, "seq": 128}
    model, inputs = build(name, options), batch(options, 0, name)
    begin = time.perf_counter()
    if kind == "compile":
        model.compile()
    elif SECTIONS[kind] is not None:
        import ort_zero

        ort_zero.wrap(model, backend=SECTIONS[kind], log_level="ERROR")
    found: dict[str, float] = {}
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()
        if step == 0:
            found = {"step": time.perf_counter() - begin, "process": time.time() - float(os.environ["STARTED_AT"])}
    if SECTIONS[kind] is not None:
        assert ort_zero.status()["models"][-1]["graph_runs"]["backward"], "ONNX Runtime ran nothing"
    return {**found, "steps": time.perf_counter() - begin}


def measured(name: str, kind: str, size: str, caches: str) -> dict[str, float]:
    """Return the seconds of one start in a process of its own, with the caches in a folder."""
    own = {"ORT_ZERO_CACHE_DIR": caches, "TORCHINDUCTOR_CACHE_DIR": caches, "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own, "STARTED_AT": str(time.time())}
    command = [sys.executable, __file__, "--one", name, kind, size]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{name} {kind}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the seconds of each start, and their ratio to the first variant's start of the same kind."""
    parser = argparse.ArgumentParser(description="What a first step costs beside Inductor.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt2", "bert"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["4x256"])
    parser.add_argument("--variants", nargs="+", choices=SECTIONS, default=DEFAULT, help="compared with the first")
    parser.add_argument("--repeat", type=int, default=1, help="starts of each kind; the median counts")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(start(*args.one)))
        return
    for name, size in ((name, size) for name in args.models for size in args.sizes):
        runs: dict[tuple[int, str], list[dict[str, float]]] = {(n, kind): [] for n in (1, 2) for kind in args.variants}
        for _ in range(args.repeat):
            for kind in args.variants:
                with tempfile.TemporaryDirectory() as caches:
                    for number in (1, 2):
                        runs[number, kind].append(measured(name, kind, size, caches))
        medians = {which: {key: statistics.median(run[key] for run in some) for key in some[0]}
                   for which, some in runs.items()}  # fmt: skip
        for (number, kind), found in medians.items():
            texts = [f"{key} {found[key]:6.2f} s ({found[key] / medians[number, args.variants[0]][key]:.3f})"
                     for key in ("step", "steps", "process")]  # fmt: skip
            print(f"{name} {size}, start {number}, {kind:8}: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
