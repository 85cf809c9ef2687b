"""Measures the memory that a settled step takes: units in ONNX Runtime beside eager PyTorch.

Each variant has a process of its own. Counted is the resident memory from before a step, gradients freed, to the step's
highest mark, after the first steps have compiled, checked and placed everything. Outputs are dropped but for the loss,
unless ``--keep-outputs`` says otherwise. Linux alone, since the highest mark is reset by the kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from training_models import TEXT, batch, build

GOAL = 0.45
"""Largest ratio of the compile backend's peak to PyTorch's for the default model."""
VARIANTS = {"torch": None, "compile": {}, "compile, whole logits": {"fuse_loss": "off"}}
"""Keys of the section's ``compile`` part by the name of the variant; None for eager PyTorch."""
SETTLING, STEPS = 25, 5
MOST_SETTLING = 400
"""Steps after which memory is measured although it is not decided where everything runs."""


def resident_mib(name: str) -> float:
    """Return a line of the process's status in MiB: ``VmRSS``, or ``VmHWM`` for its highest mark."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measure(name: str, variant: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the peak of a settled step in MiB, and the last loss."""
    import torch

    import ort_zero

    torch.set_num_threads(1)
    model, inputs = build(name, options).train(), batch(options, 0, name)
    section = VARIANTS[variant]
    if section is not None:
        ort_zero.wrap(model, backend="compile", log_level="ERROR", compile=section)
    peaks, kept = [], None
    step = 0
    while len(peaks) < STEPS:
        step += 1
        status = ort_zero.status()["models"][-1]["compiled"] if section is not None and step > 1 else {"settled": True}
        is_settled = step > SETTLING and status["settled"] or step > MOST_SETTLING
        model.zero_grad(set_to_none=True)
        kept = None
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free, and was kept, counts as what the step takes
        before = resident_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        outputs = model(**inputs)
        loss = outputs.loss
        kept = outputs if options["keep_outputs"] else None
        del outputs
        loss.backward()
        if is_settled:
            peaks.append(resident_mib("VmHWM") - before)
    if section is not None:
        status = ort_zero.status()["models"][-1]
        assert status["graph_runs"]["backward"] and not status["fallbacks"], status
        assert bool(status["compiled"]["losses_in_chunks"]) == (not section), status
    return {"peak": statistics.median(peaks), "loss": loss.item(), "kept": kept is not None, "steps": step}


def main() -> int:
    """Print the peaks; return 1 if that of the compile backend is above the goal."""
    parser = argparse.ArgumentParser(description="Peak memory of a settled step: ONNX Runtime beside eager PyTorch.")
    parser.add_argument("--models", nargs="+", choices=TEXT, default=["gpt2"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--labels", type=float, default=1.0, help="share of tokens that have a label")
    parser.add_argument("--keep-outputs", action="store_true", help="keep the logits until the backward is over")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    cases: dict[str, Any] = {}
    for name in args.models:
        label = f"{name} {args.layers}x{args.hidden} vocab {args.vocab} {args.batch}x{args.seq} labels {args.labels:g}"
        variants = {v: run_on_ranks(measure, 1, name, v, vars(args), timeout=300)[0] for v in VARIANTS}
        cases[label] = {"variants": variants}
        for variant, figures in variants.items():
            figures["ratio"] = figures["peak"] / variants["torch"]["peak"]
            if not args.json:
                print(f"{label}: {variant:22} {figures['peak']:8.1f} MiB, {figures['ratio']:.2f} of PyTorch's, "
                      f"loss {figures['loss']:.6f}")  # fmt: skip
    if args.json:
        print(json.dumps(cases))
    return int(max(case["variants"]["compile"]["ratio"] for case in cases.values()) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
