"""Measures how what the ranks exchange grows with their number, and what checkpoints cost with ranks and parameters.

On one machine the ranks share its cores, so that the times of many ranks hold their waiting for a core as well: upper
bounds of what as many machines would take, the network aside. Each line is fitted by ``a + b * ranks``.

* vote: what every forward call under ZeRO-3 exchanges (three integers).
* report: what the ranks exchange of a graph that was built (a pickled object of 1 kB).
* agreement: one block of ``raise_on_all`` over the connection that saves use.
* save: a whole save, of which "manifest" is what the ranks tell rank 0 and what it makes of it.
* aggregate: all ranks write one file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TENSORS = 200
REPEATS = 60


def median_of(work: Callable[[], Any], repeats: int) -> float:
    """Return the median of the milliseconds that `work` takes, after one call that does not count."""
    work()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def measure(root: str, sizes: list[int]) -> dict[str, Any]:
    """Measure on each rank; the figures are rank 0's, in milliseconds."""
    import torch
    import torch.distributed as dist

    from ort_zero.checkpoint import aggregate
    from ort_zero.checkpoint.files.storage import open_folder
    from ort_zero.checkpoint.format.flat_groups import zero3_part
    from ort_zero.checkpoint.records import ParamGroup
    from ort_zero.checkpoint.saves import checkpoint_writer, manifest_parts
    from ort_zero.checkpoint.saves.capture import Model, Shard
    from ort_zero.checkpoint.saves.shard_writer import ShardEntry
    from ort_zero.distributed import collectives
    from ort_zero.distributed.raise_on_all_ranks import default_group
    from ort_zero.distributed.side_channel import SideChannelGroup

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = SideChannelGroup()
    report = {"digest": "0" * 900, "rank": rank}

    def agree() -> None:
        with ranks.raise_on_all("nothing"):
            pass

    found: dict[str, Any] = {
        "vote": median_of(lambda: collectives.exchange_integers((1, 2, 3)), REPEATS),
        "report": median_of(lambda: collectives.exchange(report), REPEATS),
        "agreement": median_of(agree, REPEATS),
    }
    for parameters in sizes:
        each = parameters // TENSORS
        shapes = {f"layer.{number}.weight": (each,) for number in range(TENSORS)}
        start, length = zero3_part(each, rank, size)
        entries = {
            kind: [ShardEntry(name=name, kind=kind, start=start, tensor=torch.ones(length)) for name in shapes]
            for kind in ("master", "exp_avg", "exp_avg_sq")
            if length
        }
        shard = Shard(
            weights=entries.get("master", []),
            moments=entries.get("exp_avg", []) + entries.get("exp_avg_sq", []),
            extra={},
            extra_tensors=[],
            scalars={"step": dict.fromkeys(shapes, 1.0)},
        )
        model = Model(
            shapes=shapes, dtype="F32", aliases={}, frozen=[], optimizer_class="AdamW", step=1, zero_stage=3,
            groups=[ParamGroup(names=tuple(shapes), options={"lr": 1e-3})],
        )  # fmt: skip
        job = checkpoint_writer.SaveJob(
            path=f"{root}/{parameters}", tag="t", save_id="5" * 16, run_id="r", suffix="", save_latest=True,
            durable=False, model=model, shard=shard,
        )  # fmt: skip
        dist.barrier()
        begin = time.perf_counter()
        checkpoint_writer.write_checkpoint(job, ranks)
        saved = time.perf_counter()
        folder = open_folder(job.path).child("again")
        folder.make()
        files, written = checkpoint_writer.write_rank_files(folder, job, rank, size, [])
        dist.barrier()
        middle = time.perf_counter()
        packed = ranks.gather_to_first(manifest_parts.pack(files, written, shard.scalars))
        if rank == 0:
            checkpoint_writer.manifest_of(folder, job, packed)
        told = time.perf_counter()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder.path())
        dist.barrier()
        before = time.perf_counter()
        aggregate(job.path, f"{root}/{parameters}_model", progress=False, workers=1, ranks=default_group())
        done = time.perf_counter()
        dist.barrier()
        if rank == 0:
            for name in (str(parameters), f"{parameters}_model"):
                shutil.rmtree(f"{root}/{name}")
        found[f"save {parameters:.0e}"] = (saved - begin) * 1e3
        found[f"manifest {parameters:.0e}"] = (told - middle) * 1e3
        found[f"aggregate {parameters:.0e}"] = (done - before) * 1e3
    return found


def fit(ranks: list[int], times: list[float]) -> tuple[float, float]:
    """Return a and b of ``a + b * ranks``, by least squares."""
    import numpy as np

    slope, constant = np.polyfit(ranks, times, 1)
    return float(constant), float(slope)


def draw(path: Path, table: dict[int, dict[str, float]]) -> None:
    """Draw each figure over the number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(next(iter(table.values())))
    figure = Figure(figsize=(10, 4.2))
    FigureCanvasAgg(figure)
    for place, (title, wanted) in enumerate(
        (("exchanges", lambda name: " " not in name), ("checkpoints", lambda name: " " in name))
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        styles = {"save": "-o", "manifest": "--s", "aggregate": ":^"}
        for name in filter(wanted, names):
            style = styles.get(name.split()[0], "-o")
            axes.plot(list(table), [row[name] for row in table.values()], style, label=name, markersize=4)
        axes.set(title=title, xlabel="ranks", ylabel="milliseconds", xscale="log", yscale="log")
        axes.set_xticks(list(table), [str(ranks) for ranks in table])
        axes.minorticks_off()
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    """Print the figures and their fits; draw them where asked."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--parameters", type=float, nargs="+", default=[1e5, 1e6, 1e7, 1e8])
    parser.add_argument("--dir", default=None, help="where checkpoints go, such as /dev/shm")
    parser.add_argument("--plot", type=Path, help="file of the picture, .svg or .png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from rank_launcher import run_on_ranks

    table: dict[int, dict[str, float]] = {}
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.dir) as root:
            sizes = [int(size) for size in args.parameters]
            table[ranks] = run_on_ranks(measure, ranks, root, sizes, timeout=1200)[0]
            print(f"{ranks} ranks: {json.dumps({k: round(v, 2) for k, v in table[ranks].items()})}", file=sys.stderr)
    fits = {name: fit(list(table), [row[name] for row in table.values()]) for name in next(iter(table.values()))}
    if args.plot:
        draw(args.plot, table)
    if args.json:
        print(json.dumps({"milliseconds": table, "fits": fits}))
        return 0
    print("milliseconds".ljust(20), *(f"{ranks:>9}" for ranks in table), "  a + b * ranks")
    for name, (constant, slope) in fits.items():
        print(
            name.ljust(20), *(f"{row[name]:9.2f}" for row in table.values()), f"  {constant:.2f} + {slope:.3f} * ranks"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
