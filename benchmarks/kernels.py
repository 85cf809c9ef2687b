"""Measures each kernel of the table beside ONNX Runtime's own, in CPU time of one thread.

Both run in a session of a graph with that one operator, in turns; the smallest time of each counts. A case in which
the replacement loses is marked, and makes the exit code 1 with ``--check``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from ort_zero.ortmodule.compat.ortmodule import run_aten_nodes
from ort_zero.ortmodule.testing.kernel_cases import KernelCase, kernel_cases

MARGIN = 1.05
"""Ratio above which a replacement counts as slower."""


def session(model):
    """Return a session of one thread that runs the nodes of `model` as they are."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(case: KernelCase, calls: int) -> tuple[float, float]:
    """Return the milliseconds of CPU time of ORT's kernel and of its replacement."""
    sessions = [session(case.model), session(case.replaced())]
    best = [float("inf"), float("inf")]
    for _ in range(calls):
        for i, one in enumerate(sessions):
            start = time.process_time()
            one.run(None, case.feeds)
            best[i] = min(best[i], time.process_time() - start)
    return best[0] * 1e3, best[1] * 1e3


def main() -> int:
    """Print the times; return 1 if a replacement loses and ``--check`` is given."""
    parser = argparse.ArgumentParser(description="Kernels of the table beside ONNX Runtime's own.")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--classes", type=int, default=8000)
    parser.add_argument("--calls", type=int, default=25)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run_aten_nodes()
    lost, rows = [], []
    for case in kernel_cases(args.rows, args.width, args.classes):
        own, replaced = measure(case, args.calls)
        slower = replaced > MARGIN * own
        lost += [case.label] if slower else []
        rows.append({"entry": case.entry, "case": case.label, "ort_ms": own, "ms": replaced})
        if not args.json:
            mark = "  slower" if slower else ""
            print(f"{case.entry:20} {case.label:36} ORT {own:8.3f} ms, {replaced:8.3f} ms: {own / replaced:5.2f}{mark}")
    if args.json:
        print(json.dumps({"processor": torch.backends.cpu.get_cpu_capability(), "cases": rows}))
    else:
        print(f"vector instructions: {torch.backends.cpu.get_cpu_capability()}")
    return int(args.check and bool(lost))


if __name__ == "__main__":
    sys.exit(main())
