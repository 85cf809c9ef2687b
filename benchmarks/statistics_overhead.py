"""Measures what the collection of statistics costs a step of a GPT-2 of 4 x 256, in PyTorch and in ONNX Runtime.

All variants live in one process and take turns of a few steps, in an order that rotates from round to round: without
statistics, every module in every step, outside the range of steps, and, with the engine ortmodule, the subscriber of
onnxruntime-training 1.19.2 (in PyTorch). The first step of a turn finds the caches full of another variant's data, is
not counted. A step is forward, backward and optimizer step. Ratios are taken within a round; their median is printed
with the smallest and the largest.
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

ENGINES = ("torch", "compile", "ortmodule")
GOALS = {"on": 1.08, "out of range": 1.005}
"""Largest ratio to the CPU time of a step without statistics."""


class Variant:
    """One model that takes turns with the others."""

    def __init__(self, name: str, options: dict[str, Any], *, engine: str, folder: Path):
        import ort_zero
        from ort_zero.statistics.collect.subscriber import StatisticsSubscriber
        from ort_zero.statistics.collect.subscriber_manager import GlobalSubscriberManager

        self.name, self.engine = name, engine
        self.model = build("gpt2", options)
        self.model.config.use_cache = False  # upstream cannot take a cache apart
        self.run = self.model
        if engine != "torch":
            self.run = ort_zero.wrap(self.model, backend=engine, log_level="ERROR")
        self.number = len(ort_zero.status()["models"]) - 1
        self.folder = folder / f"{name.replace(' ', '_')}_{engine}"
        if name in GOALS:
            start = 0 if name == "on" else 1 << 40
            GlobalSubscriberManager.subscribe(self.run, [StatisticsSubscriber(str(self.folder), start_step=start)])
        elif name == "upstream":
            _subscribe_upstream(self.model, self.folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.seconds: list[tuple[float, float]] = []
        """CPU and wall seconds of a step, the mean of each turn."""

    def turn(self, arguments: dict[str, torch.Tensor], steps: int) -> None:
        """Train; keep the mean time of all steps but the first."""
        taken = []
        for _ in range(steps):
            started, cpu = time.perf_counter(), time.process_time()
            self.run(**arguments).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            taken.append((time.process_time() - cpu, time.perf_counter() - started))
        self.seconds.append(tuple(statistics.mean(column) for column in zip(*taken[1:], strict=True)))


def _subscribe_upstream(model: torch.nn.Module, folder: Path) -> None:
    import ort_zero

    ort_zero.enable()
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber

    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir=str(folder), override_output_dir=True)])


def measure(options: dict[str, Any], engines: list[str], rounds: int, turn: int, folder: Path) -> dict[str, Any]:
    """Return seconds and ratios of all variants."""
    import ort_zero

    arguments = batch(options, rank=0)
    names = [(name, engine) for engine in engines for name in ("off", "on", "out of range")]
    names += [("upstream", "torch")] if "ortmodule" in engines else []
    variants = [Variant(name, options, engine=engine, folder=folder) for name, engine in names]
    for variant in variants:
        variant.turn(arguments, 20 if variant.engine == "compile" else 2)  # segments are placed in the first steps
        variant.seconds.clear()
    for round_number in range(rounds):
        at = round_number % len(variants)
        for variant in variants[at:] + variants[:at]:
            variant.turn(arguments, turn)
    found = {}
    for variant in variants:
        base = next(v for v in variants if v.engine == variant.engine and v.name == "off")
        pairs = list(zip(variant.seconds, base.seconds, strict=True))
        ratios, walls = ([mine[clock] / other[clock] for mine, other in pairs] for clock in (0, 1))
        files = [path for path in variant.folder.rglob("*") if path.is_file()]
        found[f"{variant.engine} {variant.name}"] = {
            "seconds": statistics.median(cpu for cpu, _ in variant.seconds),
            "wall": statistics.median(walls),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "goal": GOALS.get(variant.name),
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
        }
        if variant.engine == "compile":
            status = ort_zero.status()["models"][variant.number]
            assert status["fallbacks"] == 0 and status["compiled"]["flop_share"] > 0.5, status
        elif variant.engine == "ortmodule":
            runs = ort_zero.status()["models"][variant.number]["graph_runs"]
            assert runs["forward"] == runs["backward"] >= 2 + rounds * turn, runs
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
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["torch", "compile"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = {name: getattr(args, name) for name in ("layers", "hidden", "vocab", "batch", "seq")}
    folder = Path(tempfile.mkdtemp(prefix="statistics_"))
    try:
        found = measure(options, args.engines, args.rounds, args.turn, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(
            f"{'variant':26}{'CPU ms':>9}{'ratio':>8}  {'least - most':16}{'wall':>7}{'goal':>7}{'files':>7}{'MB':>8}"
        )
        for name, row in found.items():
            spread = f"{row['least']:.3f} - {row['most']:.3f}"
            goal = f"{row['goal']:.3f}" if row["goal"] else ""
            print(f"{name:26}{row['seconds'] * 1e3:9.1f}{row['ratio']:8.3f}  {spread:16}{row['wall']:7.3f}{goal:>7}"
                  f"{row['files']:7}{row['bytes'] / 1e6:8.1f}")  # fmt: skip
    return int(any(row["goal"] and row["ratio"] > row["goal"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
