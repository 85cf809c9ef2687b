"""Measures what the collection of statistics costs a step of a GPT-2 of 4 x 256, in PyTorch and in ORT.

All variants live in one process and take turns of a few steps, in an order that rotates from round to round: without
statistics, every module in every step, outside the range of steps, and with the subscriber of onnxruntime-training
1.19.2 (in PyTorch). The first step of a turn finds the caches full of another variant's data and is not counted. A step
is forward, backward and optimizer step. Ratios are taken within a round; their median is printed with the smallest and
the largest.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from training_models import batch, build

GOALS = {"on": 1.10, "out of range": 1.005}
"""Largest ratio to the step without statistics."""


class Variant:
    """One model that takes turns with the others."""

    def __init__(self, name: str, options: dict[str, Any], *, ort: bool, folder: Path):
        from ort_zero import config
        from ort_zero.ortmodule.wrap import wrap_model
        from ort_zero.statistics.collect.subscriber import StatisticsSubscriber
        from ort_zero.statistics.collect.subscriber_manager import GlobalSubscriberManager

        self.name, self.ort = name, ort
        self.model = build("gpt2", options)
        self.model.config.use_cache = False  # upstream cannot take a cache apart
        self.run, self.runtime = self.model, None
        if ort:
            self.runtime, self.run = wrap_model(self.model, config.OrtModuleConfig(log_level="ERROR"), stage=0)
        self.folder = folder / f"{name.replace(' ', '_')}_{'ort' if ort else 'torch'}"
        if name in GOALS:
            start = 0 if name == "on" else 1 << 40
            GlobalSubscriberManager.subscribe(self.run, [StatisticsSubscriber(str(self.folder), start_step=start)])
        elif name == "upstream":
            _subscribe_upstream(self.model, self.folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.seconds: list[float] = []

    def turn(self, arguments: dict[str, torch.Tensor], steps: int) -> None:
        """Train; keep the mean time of all steps but the first."""
        taken = []
        for _ in range(steps):
            started = time.perf_counter()
            self.run(**arguments).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            taken.append(time.perf_counter() - started)
        self.seconds.append(statistics.mean(taken[1:]))


def _subscribe_upstream(model: torch.nn.Module, folder: Path) -> None:
    from ort_zero.ortmodule.compat.ortmodule import import_ortmodule

    import_ortmodule()
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber

    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir=str(folder), override_output_dir=True)])


def measure(options: dict[str, Any], rounds: int, turn: int, folder: Path) -> dict[str, Any]:
    """Return seconds and ratios of all variants."""
    arguments = batch(options, rank=0)
    names = [(name, ort) for ort in (False, True) for name in ("off", "on", "out of range")] + [("upstream", False)]
    variants = [Variant(name, options, ort=ort, folder=folder) for name, ort in names]
    for variant in variants:
        variant.turn(arguments, 2)
        variant.seconds.clear()
    for round_number in range(rounds):
        at = round_number % len(variants)
        for variant in variants[at:] + variants[:at]:
            variant.turn(arguments, turn)
    found = {}
    for variant in variants:
        base = next(v for v in variants if v.ort == variant.ort and v.name == "off")
        ratios = [mine / other for mine, other in zip(variant.seconds, base.seconds, strict=True)]
        files = [path for path in variant.folder.rglob("*") if path.is_file()]
        found[f"{'onnxruntime' if variant.ort else 'torch'} {variant.name}"] = {
            "seconds": statistics.median(variant.seconds),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "goal": GOALS.get(variant.name),
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
        }
        if variant.runtime is not None:
            graph = variant.runtime.status()["graphs"]["training"]
            assert graph["runs"]["forward"] == graph["runs"]["backward"] == 2 + rounds * turn, graph
    return found


def main() -> int:
    """Print the table; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn", type=int, default=4, help="steps in a row of one variant; the first is not counted")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = {name: getattr(args, name) for name in ("layers", "hidden", "vocab", "batch", "seq")}
    folder = Path(tempfile.mkdtemp(prefix="statistics_"))
    try:
        found = measure(options, args.rounds, args.turn, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{'variant':26}{'ms':>9}{'ratio':>8}  {'least - most':16}{'goal':>7}{'files':>7}{'MB':>8}")
        for name, row in found.items():
            spread = f"{row['least']:.3f} - {row['most']:.3f}"
            goal = f"{row['goal']:.3f}" if row["goal"] else ""
            print(f"{name:26}{row['seconds'] * 1e3:9.1f}{row['ratio']:8.3f}  {spread:16}{goal:>7}{row['files']:7}"
                  f"{row['bytes'] / 1e6:8.1f}")  # fmt: skip
    return int(any(row["goal"] and row["ratio"] > row["goal"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
