"""Measures whether a rank's memory grows with the steps: ONNX Runtime beside PyTorch, each under the same engine.

Every weight is gathered (persistence threshold 0). Each variant has processes of its own. Printed are the anonymous
resident memory of rank 0 over the steps, its growth after the first tenth, the CPU time of a step, and how the bytes
that gathers were planned to take compare with what they took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

GOAL = 1.02
"""Largest factor by which ORT's ranks may grow after the first tenth of the steps."""


def resident_mib() -> float:
    """Return the anonymous memory of this process in MiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


def measure(ort: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Run on each rank: return the memory after each tenth of the steps, and what was planned for gathers."""
    import torch
    from training_models import batch, build, make_engine

    import ort_zero

    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    zero = {} if options["stage"] < 3 else {"stage3_param_persistence_threshold": 0}
    if options["reuse_distance"] is not None:
        zero["stage3_max_reuse_distance"] = options["reuse_distance"]
    engine, runtime = make_engine(
        build("gpt2", options), options["stage"], ort=ort, batch_size=options["batch"], **zero
    )  # fmt: skip
    inputs = batch(options, torch.distributed.get_rank())
    tenth, memory = max(1, options["steps"] // 10), []
    for step in range(1, options["steps"] + 1):
        if step == tenth:
            start = time.process_time()
        engine.backward(engine(**inputs).loss)
        engine.step()
        if step % tenth == 0:
            memory.append(resident_mib())
    seconds = (time.process_time() - start) / (options["steps"] - tenth)
    planned = None
    if runtime is not None:
        status = runtime.status()
        graph = status["graphs"]["training"]
        assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status
        assert graph["runs"]["backward"] == options["steps"], status
        planned = graph["gather_memory"]
    return {"mib": memory, "growth": memory[-1] / memory[0], "cpu_ms": seconds * 1e3, "gathers": planned}


def main() -> int:
    """Print the figures; return 1 if a rank grows by more than the goal, or gathers took other bytes than planned."""
    parser = argparse.ArgumentParser(description="Memory of a rank over many steps: ORT beside PyTorch.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--reuse-distance", type=int, help="stage3_max_reuse_distance; 0 gathers for each use")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    results = {}
    for ort in (False, True):
        name = "ort" if ort else "torch"
        reports = run_on_ranks(measure, args.ranks, ort, vars(args), timeout=args.timeout)
        results[name] = {**reports[0], "growth": max(report["growth"] for report in reports)}
        if not args.json:
            levels = " ".join(f"{mib:.0f}" for mib in results[name]["mib"])
            print(f"{name:6} MiB {levels}; grown by {results[name]['growth'] - 1:.1%}; "
                  f"{results[name]['cpu_ms']:.1f} ms of CPU time a step; {results[name]['gathers'] or ''}")  # fmt: skip
    gathers = results["ort"]["gathers"]
    kept = gathers is None or gathers["peak"] == gathers["planned"]
    if args.json:
        print(json.dumps({"goal": GOAL, **results}))
    return int(results["ort"]["growth"] > GOAL or not kept)


if __name__ == "__main__":
    sys.exit(main())
