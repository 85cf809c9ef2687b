"""Measures what it takes to make one model out of shards: time, memory and bytes read, beside DeepSpeed's zero_to_fp32.

The checkpoints are made up, in the very structure that DeepSpeed writes (its own converter reads them), so that no
engine is needed to have gigabytes. Each measurement runs in a process of its own, ours and the peer's in turn, and
begins with the imports done; outputs are removed after each. Source files are on the disk itself before the first
measurement, so that nobody waits for writes of another.

Memory is the largest anonymous memory (RssAnon, sampled every 10 ms) beyond what the imports took.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20
SHARD = "500MB"
"""Largest output file where the output is sharded."""
TAG = "global_step1"
PEER_GOAL = 0.5
"""Largest ratio of our time to that of zero_to_fp32, below ZeRO-3."""
LAZY_GOAL = 1.0
"""The same for ZeRO-3, where zero_to_fp32 is lazy."""
LAZY_MEMORY_GOAL = 0.5
"""Largest ratio of our memory to that of zero_to_fp32 for ZeRO-3."""
COPY_GOAL = 1.3
"""Largest ratio of our time to that of writing the same bytes from memory."""
READ_GOAL = 1.05
"""Largest ratio of the bytes that are read for the weights to those of the masters."""
IMPORTS = (
    "torch",
    "torch._dynamo",
    "torch.utils.serialization.config",
    "deepspeed",
    "deepspeed.utils.zero_to_fp32",
    "safetensors.torch",
    "huggingface_hub",
    "ort_zero.checkpoint",
    "ort_zero.checkpoint.aggregation.aggregation",
    "ort_zero.checkpoint.deepspeed.reader",
    "ort_zero.checkpoint.format.manifest",
)
"""What no measurement pays for."""


@dataclass(frozen=True)
class Goal:
    """A figure, what it is compared with, and the largest ratio of both that is asked for."""

    label: str
    ours: float
    peer: float
    limit: float
    unit: str

    @property
    def ratio(self) -> float:
        """Ours over the peer's."""
        return self.ours / self.peer

    @property
    def met(self) -> bool:
        """True if the ratio is not above the goal."""
        return self.ratio <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


def show(goals: list[Goal]) -> None:
    """Print the table of goals."""
    print(f"{'':<60}{'ours':>10}{'peer':>10}{'unit':>5}{'ratio':>8}{'goal':>7}")
    for goal in goals:
        figures = f"{goal.ours:>10.3f}{goal.peer:>10.3f}{goal.unit:>5}{goal.ratio:>8.3f}{goal.limit:>7.2f}"
        print(f"{goal.label:<60}{figures}  {'PASS' if goal.met else 'FAIL'}")


def rss_anon() -> int:
    """Return the bytes of this process's anonymous memory (no file pages)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


class Sampler:
    """Samples the anonymous memory of this process every 10 ms while its block runs."""

    def __enter__(self) -> Sampler:
        self._before = self._peak = rss_anon()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._done.wait(0.01):
            self._peak = max(self._peak, rss_anon())

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self._peak = max(self._peak, rss_anon())

    @property
    def growth(self) -> int:
        """Bytes at the peak beyond those at the start."""
        return self._peak - self._before


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def shapes_of(weights: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model like GPT of about `weights` bytes in fp32; no matrix is above 64 MiB."""
    hidden = 2048 if weights >= 1e9 else 1024
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (8 * hidden, hidden)}
    layer = 12 * hidden**2 + 13 * hidden
    for i in range(max(1, round((weights / 4 - 8 * hidden**2) / layer))):
        for part, out, into in (("attn", 3, 1), ("proj", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes[f"h.{i}.{part}.weight"] = (out * hidden, into * hidden)
            shapes[f"h.{i}.{part}.bias"] = (out * hidden,)
        for norm in ("norm1", "norm2"):
            shapes[f"h.{i}.{norm}.weight"] = shapes[f"h.{i}.{norm}.bias"] = (hidden,)
    return shapes


def bytes_of(shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the bytes of all in fp32."""
    return 4 * sum(math.prod(shape) for shape in shapes.values())


def write_deepspeed(root: str, stage: int, ranks: int, weights: int) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint of DeepSpeed's into `root`, one parameter group; return the shapes."""
    import deepspeed
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    version = deepspeed.__version__
    shapes = shapes_of(weights)
    folder = Path(root) / TAG
    folder.mkdir(parents=True)
    (Path(root) / "latest").write_text(TAG)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    counts = [math.prod(shape) for shape in shapes.values()]
    if stage == 3:
        own = sum(-(-count // ranks) for count in counts)
    else:
        own = -(-sum(counts) // (2 * ranks)) * 2
    flats = []
    for rank in reversed(range(ranks)):  # rank 0 writes the module, of the masters of all
        generator = torch.Generator().manual_seed(rank)
        flat = torch.randn(own, generator=generator)
        flats.insert(0, flat if stage < 3 else flat[:0])
        moments = {"step": torch.tensor(1.0), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}
        states = {
            "state": {0: moments},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}],
        }
        zero = {
            "loss_scaler": LossScaler(scale=1.0),
            "dynamic_loss_scale": False,
            "overflow": False,
            "zero_stage": ZeroStageEnum(stage),
        }
        if stage == 3:
            zero |= {"partition_count": ranks, "optimizer_state_dict": states, "fp32_flat_groups": [flat]}
        else:
            slices, position = {}, 0
            for name, count in zip(shapes, counts, strict=True):
                low, high = max(position, rank * own), min(position + count, (rank + 1) * own)
                if low < high:
                    slices[name] = fragment_address(numel=high - low, start=low - rank * own)
                position += count
            padding = max(0, (rank + 1) * own - sum(counts))
            zero |= {
                "clip_grad": 0.0,
                "base_optimizer_state": states,
                "single_partition_of_fp32_groups": [flat[: own - padding] if rank == ranks - 1 else flat],
                "group_paddings": [padding if rank == ranks - 1 else 0],
                "param_alignment_paddings": [[0] * len(shapes)],
                "partition_count": [ranks],
                "ds_version": version,
                "param_slice_mappings": [slices],
            }
        content = {"optimizer_state_dict": zero, "ds_config": config, "ds_version": version}
        torch.save(content, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            name = f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt"
            if stage == 3:
                module = {name: torch.empty(0) for name in shapes}
            else:
                parts = torch.cat(flats).split([*counts, own * ranks - sum(counts)])
                module = {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}
            content = {
                "module": module,
                "buffer_names": [],
                "optimizer": None,
                "param_shapes": [{n: torch.Size(s) for n, s in shapes.items()}],
                "frozen_param_shapes": None,
                "shared_params": {},
                "frozen_param_fragments": None,
                "lr_scheduler": None,
                "data_sampler": None,
                "random_ltd": None,
                "skipped_steps": 0,
                "global_steps": 1,
                "global_samples": ranks,
                "dp_world_size": ranks,
                "mp_world_size": 1,
                "ds_config": config,
                "ds_version": version,
            }
            torch.save(content, folder / name)
    _settle(folder)
    return shapes


def write_ours(root: str, ranks: int, weights: int) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint of ours into `root`, cut as ZeRO-1 and ZeRO-2 cut; return the shapes."""
    import torch

    from ort_zero.checkpoint.files.storage import open_folder
    from ort_zero.checkpoint.format import manifest
    from ort_zero.checkpoint.records import MASTER, Optimizer, ParamGroup, Source
    from ort_zero.checkpoint.saves.checkpoint_writer import Shard, ShardEntry, joined, manifest_bytes, write_rank_files
    from ort_zero.compat.deepspeed_partitions import zero12_group

    shapes = shapes_of(weights)
    folder = open_folder(Path(root) / TAG)
    folder.make()
    (Path(root) / "latest").write_text(TAG)
    groups = (ParamGroup(names=tuple(shapes), options={"lr": 1e-3}),)
    about = Source(
        format="ort_zero", root=folder.url, tag=TAG, step=1, world_size=0, zero_stage=1, tensors=(), files={},
        aliases={}, frozen=frozenset(), optimizer=Optimizer(class_name="AdamW", groups=groups, scalars={}),
        dtype="F32", run_id="bench", save_id="bench",
    )  # fmt: skip
    packed = []
    for rank in range(ranks):
        group = zero12_group(0, list(shapes), shapes, rank, ranks)
        flat = torch.randn(group.size, generator=torch.Generator().manual_seed(rank))
        entries = {
            kind: [
                ShardEntry(name=p.name, kind=kind, start=p.start, tensor=flat.narrow(0, p.offset, p.length))
                for p in group.places
            ]
            for kind in (MASTER, "exp_avg", "exp_avg_sq")
        }
        shard = Shard(
            weights=entries[MASTER],
            moments=entries["exp_avg"] + entries["exp_avg_sq"],
            extra={},
            extra_tensors=[],
            scalars={"step": dict.fromkeys(shapes, 1.0)},
        )
        names: list[str] = []
        packed.append(write_rank_files(folder, about, shard, rank, ranks, names).packed())
        for name in names:
            folder.publish(name, about.save_id)
    folder.write(manifest.NAME, manifest_bytes(joined(folder, about, shapes, packed)), "bench")
    _settle(Path(root) / TAG)
    return shapes


def _settle(folder: Path) -> None:
    """Bring all files to the disk itself."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


# ---- measurements, each in a process of its own ---------------------------------------------------------------------


def alone(function: Any, *args: Any) -> Any:
    """Return what `function` returns in a new process, forked from one that only imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTS))
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def run_ours(source: str, out: str, options: dict[str, Any]) -> dict[str, float]:
    """Aggregate; return seconds, memory and bytes."""
    from ort_zero.checkpoint import aggregate

    gc.collect()
    with Sampler() as sampler:
        start = time.perf_counter()
        report = aggregate(source, out, progress=False, **options)
        seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "growth": sampler.growth,
        "bytes_read": report.bytes_read,
        "bytes": report.bytes,
        "parameters": report.parameters,
    }


def run_peer(source: str, out: str) -> dict[str, float]:
    """Convert with DeepSpeed; return seconds and memory."""
    from deepspeed.utils import zero_to_fp32

    gc.collect()
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        with Sampler() as sampler:
            start = time.perf_counter()
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
                source, out, safe_serialization=True, max_shard_size=SHARD
            )
            seconds = time.perf_counter() - start
    return {"seconds": seconds, "growth": sampler.growth}


def run_save_file(weights: int, out: str) -> dict[str, float]:
    """Write a model of this size from memory with safetensors; return the seconds."""
    import torch
    from safetensors.torch import save_file

    state = {name: torch.full(shape, 0.5) for name, shape in shapes_of(weights).items()}
    os.mkdir(out)
    start = time.perf_counter()
    save_file(state, f"{out}/model.safetensors")
    return {"seconds": time.perf_counter() - start}


def same(ours: str, peer: str) -> bool:
    """Return True if two folders hold the same tensors."""
    import torch
    from safetensors import safe_open

    def index(folder: str) -> dict[str, Any]:
        opened = [safe_open(path, "pt") for path in sorted(Path(folder).glob("*.safetensors"))]
        return {name: file for file in opened for name in file.keys()}

    one, other = index(ours), index(peer)
    return one.keys() == other.keys() and all(
        torch.equal(one[name].get_tensor(name), other[name].get_tensor(name)) for name in one
    )


def in_turn(ways: dict[str, tuple], rounds: int, out: str) -> dict[str, dict[str, float]]:
    """Run all ways in turn, in an order that rotates; return the medians of what each returned."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    labels = list(ways)
    for number in range(rounds):
        for label in labels[number % len(labels) :] + labels[: number % len(labels)]:
            function, first, *rest = ways[label]
            found[label].append(alone(function, first, out, *rest))
            shutil.rmtree(out)
    return {
        way: {key: statistics.median(result[key] for result in results) for key in results[0]}
        for way, results in found.items()
    }


# ---- scenes ---------------------------------------------------------------------------------------------------------


def speed(scratch: str, kind: str, weights: int, args: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """Compare times for one kind of checkpoint ("zero1", "zero3", "ours") with the peers'."""
    stage = 3 if kind == "zero3" else 1
    peer_source, out = f"{scratch}/deepspeed", f"{scratch}/out"
    shapes = alone(write_deepspeed, peer_source, stage, args.ranks, weights)
    source = peer_source
    if kind == "ours":
        source = f"{scratch}/ours"
        alone(write_ours, source, args.ranks, weights)
    options = {"max_shard_size": SHARD}
    ways: dict[str, tuple] = {"ours": (run_ours, source, options), "zero_to_fp32": (run_peer, peer_source)}
    if stage == 1:
        ways["save_file"] = (run_save_file, weights)
    alone(run_ours, source, out, options)
    if kind != "ours":  # other values, the masters of the two are not the same
        alone(run_peer, peer_source, f"{out}_peer")
        assert alone(same, out, f"{out}_peer"), "the two made different models"
        shutil.rmtree(f"{out}_peer")
    shutil.rmtree(out)
    result: dict[str, Any] = in_turn(ways, args.rounds, out)
    shutil.rmtree(source)
    shutil.rmtree(peer_source, ignore_errors=True)
    ours, peer = result["ours"], result["zero_to_fp32"]
    size = bytes_of(shapes)
    name = f"{kind}, {size / 1e9:.1f} GB of weights"
    goal = LAZY_GOAL if stage == 3 else PEER_GOAL
    goals = [Goal(f"{name}: time / zero_to_fp32", ours["seconds"], peer["seconds"], goal, "s")]
    if stage == 1:
        goals.append(Goal(f"{name}: time / save_file", ours["seconds"], result["save_file"]["seconds"], COPY_GOAL, "s"))
    else:
        label = f"{name}: memory / zero_to_fp32"
        goals.append(Goal(label, ours["growth"] / MIB, peer["growth"] / MIB, LAZY_MEMORY_GOAL, "MiB"))
    if kind == "ours":
        goals.append(Goal(f"{name}: bytes read / masters", ours["bytes_read"] / 1e9, size / 1e9, READ_GOAL, "GB"))
    return {"weights": size, **result}, goals


def show_speed(kind: str, result: dict[str, Any]) -> None:
    """Print what each way took."""
    for way in sorted(result.keys() - {"weights"}):
        got = result[way]
        extra = f", memory +{got['growth'] / MIB:.0f} MiB" if "growth" in got else ""
        rate = result["weights"] / 1e9 / got["seconds"]
        print(f"{kind:<6} {way:<13}{got['seconds']:8.3f} s, {rate:5.2f} GB/s{extra}", flush=True)


def main() -> int:
    """Print the figures; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="Time, memory and reads of aggregation, beside zero_to_fp32.")
    parser.add_argument("--weights", type=float, default=4.0, help="GB of fp32 weights, ZeRO-1 and ours")
    parser.add_argument("--zero3-weights", type=float, default=2.0, help="the same of the ZeRO-3 one")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", help="where to write; what is written is removed. Default: a temporary folder")
    parser.add_argument("--quick", action="store_true", help="one round of small checkpoints: that it runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.weights, args.zero3_weights, args.rounds = 0.1, 0.1, 1
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else every process warns that it found none
    results: dict[str, Any] = {}
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory(prefix="ort_zero_bench_", dir=args.dir) as scratch:
        for kind in ("zero1", "zero3", "ours"):
            size = args.zero3_weights if kind == "zero3" else args.weights
            results[kind], more = speed(scratch, kind, int(size * 1e9), args)
            goals += more
            if not args.json:
                show_speed(kind, results[kind])
    if args.json:
        print(json.dumps({**results, "goals": [goal.as_dict() for goal in goals]}))
    else:
        show(goals)
    return int(not args.quick and not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
