"""Measures the most memory that a step takes: ONNX Runtime beside eager PyTorch, with and without the fused loss.

Each variant has a process of its own. Counted is the growth of its anonymous memory from before the first forward to
the highest mark before the end of the first backward, gradients included; nothing is computed again. Outputs are kept
until then, as a loop that reads them later does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from training_models import TEXT, batch, build

GOAL = 0.5
"""Largest ratio of ORT's peak to PyTorch's for the default model."""
VARIANTS = {"torch": None, "ort": {}, "ort, whole logits": {"fuse_loss": "off"}}
"""Keys of the section's ``ortmodule`` part by the name of the variant; None for eager PyTorch."""


def measure(name: str, variant: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the peak in bytes of the first step in this process, and the loss."""
    import torch

    from ort_zero.config import OrtModuleConfig
    from ort_zero.ortmodule.recompute.resident_memory import PeakMeter
    from ort_zero.ortmodule.testing.peaks import start_at_first_run
    from ort_zero.ortmodule.wrap import wrap_model

    torch.set_num_threads(1)
    model, inputs = build(name, options).train(), batch(options, 0, name)
    meter, section = PeakMeter(torch.device("cpu")), VARIANTS[variant]
    if section is None:
        meter.start()
    else:
        runtime, model = wrap_model(model, OrtModuleConfig(log_level="ERROR", **section), 0)
        start_at_first_run(runtime, meter)
    result = model(**inputs)
    result.loss.backward()
    peak = meter.read()
    if section is not None:
        status = runtime.status()
        assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status
    return {"peak": peak, "loss": result.loss.item()}


def main() -> int:
    """Print the peaks; return 1 if that of ORT is above the goal."""
    parser = argparse.ArgumentParser(description="Peak memory of a step: ORT beside eager PyTorch.")
    parser.add_argument("--models", nargs="+", choices=TEXT, default=["gpt2"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--labels", type=float, default=1.0, help="share of tokens that have a label")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file to which the cases are added")
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    cases: dict[str, Any] = {}
    for name in args.models:
        size = f"{args.layers}x{args.hidden} memory vocab {args.vocab} {args.batch}x{args.seq}"
        label = f"{name} {size} labels {args.labels:g}"
        found = {v: run_on_ranks(measure, 1, name, v, {**vars(args), "out": None}, timeout=300)[0] for v in VARIANTS}
        for figures in found.values():
            figures["ratio"] = figures["peak"] / found["torch"]["peak"]
        cases[label] = {"variants": found}
        if not args.json:
            for variant, figures in found.items():
                print(f"{label}: {variant:18} {figures['peak'] / 2**20:8.1f} MiB, {figures['ratio']:.2f} of PyTorch's, "
                      f"loss {figures['loss']:.6f}")  # fmt: skip
    if args.out is not None:
        known = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(json.dumps({**known, **cases}, indent=1, sort_keys=True) + "\n")
    if args.json:
        print(json.dumps(cases))
    return int(max(case["variants"]["ort"]["ratio"] for case in cases.values()) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
