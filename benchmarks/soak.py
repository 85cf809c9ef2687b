"""Holds a long training to what it may hold on to: memory, files, threads and time must not grow with the steps.

`soak_training.py` runs on some ranks under torchrun; what it noted after every tenth step is held against the goals
below, from the step on by which everything has happened once. Then a short training is started and ended many times:
each must end with status 0 and without a warning of something that was left open.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SETTLED = 200
"""Steps after which everything of the training has happened once."""
MEMORY, TIME = 1.02, 1.05
"""Largest factors by which the anonymous memory, and the CPU time of a step, may grow from then on."""
_NOISE = re.compile(r"Traceback|Warning|warning|leaked|destroy_process_group|Segmentation|core dumped|terminate called")
_ACCEPTED = ("`loss_type=None` was set in the config",)
_SHARED = Path("/dev/shm")


def launch(folder: Path, steps: int, args: argparse.Namespace) -> tuple[int, str, float]:
    """Run the training under torchrun; return its status, what it printed and the seconds that it took."""
    script = Path(__file__).with_name("soak_training.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks),
               str(script), "--dir", str(folder), "--steps", str(steps), "--stage", str(args.stage),
               *(["--plain"] if args.plain else [])]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **os.environ}
    start = time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=args.timeout
    )
    return done.returncode, done.stdout, time.monotonic() - start


def shared_memory() -> set[str]:
    """Return the names of what lies in shared memory."""
    return {path.name for path in _SHARED.iterdir()} if _SHARED.is_dir() else set()


def noise_in(text: str) -> list[str]:
    """Return the lines of `text` that tell of something wrong, or of something that was left open."""
    return [line for line in text.splitlines() if _NOISE.search(line) and not any(known in line for known in _ACCEPTED)]


def growth_of(notes: list[dict[str, float]]) -> dict[str, Any]:
    """Return how what a rank holds has changed since everything had happened once."""
    later = [note for note in notes if note["step"] > SETTLED]
    tenth = max(5, len(later) // 10)
    first, last = later[:tenth], later[-tenth:]

    def ratio(name: str) -> float:
        return statistics.median(n[name] for n in last) / statistics.median(n[name] for n in first)

    return {
        "memory": max(n["rss_mib"] for n in later) / first[0]["rss_mib"],
        "used": max(n["used_mib"] for n in later) / first[0]["used_mib"],
        "mib": (first[0]["rss_mib"], last[-1]["rss_mib"]),
        "cpu": ratio("cpu"),
        "wall": ratio("seconds"),
        # a save in the background holds some for a moment
        **{name: min(n[name] for n in last) - min(n[name] for n in first)
           for name in ("descriptors", "python_threads", "shared")},
    }  # fmt: skip


def long_run(folder: Path, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Train for many steps; return the figures, and what did not hold."""
    before = shared_memory()
    status, text, seconds = launch(folder, args.steps, args)
    lost = [f"status {status}:\n{text[-3000:]}"] if status else []
    if not args.plain:  # PyTorch warns of DeepSpeed's calls
        lost += [f"printed: {line[:200]}" for line in noise_in(text)]
    lost += [f"left in shared memory: {name}" for name in sorted(shared_memory() - before)]
    if status:
        return {"seconds": seconds}, lost
    reports = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(args.ranks)]
    growth = [growth_of(report["notes"]) for report in reports]
    for rank, (report, grown) in enumerate(zip(reports, growth, strict=True)):
        model = report["status"]
        if not args.plain:
            runs = model["graph_runs"]
            if model["failures"] or runs.get("backward") != args.steps * len(model["units"]):
                lost.append(f"rank {rank}: not all steps ran in ONNX Runtime: {runs}, {model['failures']}")
        for name, what in (("memory", "memory"), ("used", "the heap in use")):
            if grown[name] > MEMORY:
                lost.append(f"rank {rank}: {what} grew to {grown[name]:.3f} of what it was at step {SETTLED}")
        if grown["cpu"] > TIME:
            lost.append(f"rank {rank}: a step takes {grown['cpu']:.3f} of the CPU time that it took")
        lost += [f"rank {rank}: {grown[name]} more {name.replace('_', ' ')}"
                 for name in ("descriptors", "python_threads", "shared") if grown[name] > 0]  # fmt: skip
    if reports[0]["losses"][-1] >= reports[0]["losses"][0]:
        lost.append("the loss did not fall")
    return {"seconds": seconds, "growth": growth, "reports": reports}, lost


def many_starts(root: Path, args: argparse.Namespace) -> list[str]:
    """Start and end a short training many times; return what did not hold."""
    lost, before = [], shared_memory()
    for number in range(1, args.starts + 1):
        folder = root / f"start_{number}"
        folder.mkdir()
        status, text, seconds = launch(folder, 2, args)
        bad = [f"status {status}: {text[-1500:]}"] if status else noise_in(text)
        lost += [f"start {number}: {line[:1500]}" for line in bad]
        print(f"start {number}/{args.starts}: status {status}, {seconds:.0f} s", file=sys.stderr, flush=True)
        shutil.rmtree(folder)
    return lost + [f"left in shared memory: {name}" for name in sorted(shared_memory() - before)]


def draw(path: Path, reports: list[dict[str, Any]]) -> None:
    """Draw memory and CPU time of a step over the steps."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ort_zero", "font.size": 10}):
        figure = Figure(figsize=(9, 3.6))
        FigureCanvasAgg(figure)
        for place, (name, factor, title) in enumerate(
            [("rss_mib", 1, "anonymous memory of a rank, MiB"), ("cpu", 1e3, "CPU time of a step, ms")]
        ):
            axes = figure.add_subplot(1, 2, place + 1)
            for rank, report in enumerate(reports):
                steps = [note["step"] for note in report["notes"]]
                axes.plot(steps, [note[name] * factor for note in report["notes"]], label=f"rank {rank}", linewidth=1)
            if name == "cpu":  # what is compiled and saved stands out by far
                values = sorted(note["cpu"] * factor for report in reports for note in report["notes"])
                axes.set_ylim(0, 3 * values[len(values) // 2])
            else:
                axes.set_ylim(bottom=0)
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("step")
            axes.legend(fontsize=8, loc="lower right")
            axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    """Print what grew; return 1 if a goal is not kept."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--starts", type=int, default=50, help="how often a short training is started and ended")
    parser.add_argument("--plain", action="store_true", help="train in PyTorch, without the section of ort_zero")
    parser.add_argument("--plot", type=Path, help="file of the picture, .svg or .png")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one training may take")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.steps < 2 * SETTLED:
        parser.error(f"--steps must be at least {2 * SETTLED}, or nothing is settled before the end")
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "long"
        folder.mkdir()
        found, lost = long_run(folder, args)
        if args.plot and "reports" in found:
            draw(args.plot, found["reports"])
        lost += many_starts(Path(root), args)
    growth = found.get("growth", [])
    if args.json:
        print(json.dumps({"growth": growth, "seconds": found["seconds"], "lost": lost}))
        return int(bool(lost))
    for rank, grown in enumerate(growth):
        print(f"rank {rank}: {grown['mib'][0]:.1f} to {grown['mib'][1]:.1f} MiB ({grown['memory']:.3f}), of the "
              f"heap in use {grown['used']:.3f}, CPU time of a step {grown['cpu']:.3f}, wall time "
              f"{grown['wall']:.3f}, descriptors {grown['descriptors']:+d}, threads {grown['python_threads']:+d}, "
              f"mappings of shared memory {grown['shared']:+d}")  # fmt: skip
    print(f"{args.steps} steps in {found['seconds']:.0f} s, {args.starts} starts")
    for line in lost:
        print(f"NOT KEPT: {line}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
