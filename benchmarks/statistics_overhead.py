"""Measures what statistics cost a step of a GPT-2 of 4 x 256, and what a comparison of two runs of 100 steps takes.

All variants live in one process and take turns of a few steps, in an order that rotates from round to round: without
statistics, every module in every step, outside the range of steps, and, with the engine ortmodule, the subscriber of
onnxruntime-training 1.19.2 (in PyTorch). The first step of a turn finds the caches full of another variant's data and
is not counted. A step is forward, backward and optimizer step. Ratios of CPU time are taken within a round; their
median is printed with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
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
COMPARED_STEPS = 100
TIME_GOAL, MEMORY_GOAL = 5.0, 300.0
"""Most seconds and MB of ``ort-zero stats compare`` on two runs of :data:`COMPARED_STEPS` steps on two ranks."""
COMPARISON = """
import re, sys, time
start = time.perf_counter()
from ort_zero.cli.main import main
main(["stats", "compare", *sys.argv[1:]])
print(time.perf_counter() - start, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


class Variant:
    """One model that takes turns with the others."""

    def __init__(self, name: str, options: dict[str, Any], *, engine: str, folder: Path):
        import ort_zero
        from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber

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
        self.seconds: list[float] = []
        """CPU seconds of a step, the mean of each turn."""

    def turn(self, arguments: dict[str, torch.Tensor], steps: int) -> None:
        """Train; keep the mean time of all steps but the first."""
        taken = []
        for _ in range(steps):
            started = time.process_time()
            self.run(**arguments).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            taken.append(time.process_time() - started)
        self.seconds.append(statistics.mean(taken[1:]))


def _subscribe_upstream(model: torch.nn.Module, folder: Path) -> None:
    import ort_zero

    ort_zero.enable()
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber

    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir=str(folder), override_output_dir=True)])


def measure(options: dict[str, Any], engines: list[str], rounds: int, turn: int, folder: Path) -> bool:
    """Print a line for each variant; return whether all goals are met."""
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
    met = True
    for variant in variants:
        base = next(v for v in variants if v.engine == variant.engine and v.name == "off")
        ratios = [mine / other for mine, other in zip(variant.seconds, base.seconds, strict=True)]
        ratio, goal = statistics.median(ratios), GOALS.get(variant.name)
        files = [path for path in variant.folder.rglob("*") if path.is_file()]
        print(f"{variant.engine + ' ' + variant.name:22} {statistics.median(variant.seconds) * 1e3:8.1f} ms, "
              f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f}){f', goal {goal}' if goal else ''}; {len(files)} "
              f"files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")  # fmt: skip
        met &= goal is None or ratio <= goal
        if variant.engine != "torch":
            status = ort_zero.status()["models"][variant.number]
            assert status["fallbacks"] == 0 and status["graph_runs"]["backward"], status
    return met


def record(folder: Path, rounding: float) -> None:
    """Train on each rank with statistics, weights moved by a part of their size, on data of the rank."""
    from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber

    options = {"layers": 6, "hidden": 32, "vocab": 200, "batch": 2, "seq": 16}
    model = build("gpt2", options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + rounding * torch.randn(parameter.shape))
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(folder))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    arguments = batch(options, rank=int(os.environ["RANK"]))
    for _ in range(COMPARED_STEPS):
        model(**arguments).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(folder: Path) -> bool:
    """Record runs on two ranks that differ by rounding, print what comparing takes; return whether goals are met."""
    from rank_launcher import run_on_ranks

    for name, rounding in (("a", 0.0), ("b", 1e-7)):
        run_on_ranks(record, 2, folder / name, rounding, timeout=600)
    command = [sys.executable, "-c", COMPARISON, str(folder / "a"), str(folder / "b")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    text, seconds, kilobytes = done.stdout.rsplit(maxsplit=2)
    print(f"{text}\nstats compare, 2 ranks, {COMPARED_STEPS} steps: {float(seconds):.2f} s (goal {TIME_GOAL}), "
          f"{int(kilobytes) / 1024:.0f} MB (goal {MEMORY_GOAL:.0f})")  # fmt: skip
    return float(seconds) <= TIME_GOAL and int(kilobytes) / 1024 <= MEMORY_GOAL


def main() -> int:
    """Return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    for name, default in (("layers", 4), ("hidden", 256), ("vocab", 8000), ("batch", 4), ("seq", 256), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--turn", type=int, default=4, help="steps in a row of one variant; the first is not counted")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["torch", "compile"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="statistics_") as folder:
        met = measure(vars(args), args.engines, args.rounds, args.turn, Path(folder))
        return int(not (compare(Path(folder)) and met))


if __name__ == "__main__":
    sys.exit(main())
