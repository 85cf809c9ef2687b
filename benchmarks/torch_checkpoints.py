"""Measures what it takes to make one model of torch's sharded checkpoints: wall time and memory, beside torch's routes.

python benchmarks/torch_checkpoints.py --gib 2 --ranks 4 --rounds 3

FSDP2's shards (gloo ranks) lie in memory (/dev/shm). Each measurement runs in a process of its own after its imports,
ours and the peer's in turn. Memory is the largest anonymous memory beyond what the imports took, sampled every 5 ms.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ort_zero.checkpoint import aggregate

COLUMNS = 4096


def save(folder: str, gib: float) -> None:
    """Save matrices of `gib` GiB in all, cut along their rows, in torch's two forms; on each rank."""
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    rows = 4096 // size
    count = max(1, round(gib * 2**30 / (rows * size * COLUMNS * 4)))
    state = {
        f"layers.{i}.weight": DTensor.from_local(torch.randn(rows, COLUMNS), mesh, [Shard(0)], run_check=False)
        for i in range(count)
    }
    dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
    writer = HuggingFaceStorageWriter(f"{folder}/safetensors", save_distributed=True)
    dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


def torch_save(folder: str) -> None:
    """Run torch's route for shards of its own format."""
    dcp_to_torch_save(f"{folder}/dcp", f"{folder}/out/model.pt")


def torch_consolidate(folder: str) -> None:
    """Run torch's route for shards in safetensors."""
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names: set[str] = set()
    for file in Path(folder, "safetensors").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    one_file = dict.fromkeys(names, 1)
    consolidate_safetensors_files(f"{folder}/safetensors", f"{folder}/out", one_file, num_threads=2)


ROUTES: dict[str, Callable[[str], object]] = {
    "ours, dcp": lambda folder: aggregate(f"{folder}/dcp", f"{folder}/out", progress=False),
    "dcp_to_torch_save": torch_save,
    "ours, safetensors": lambda folder: aggregate(f"{folder}/safetensors", f"{folder}/out", progress=False),
    "consolidate_safetensors_files": torch_consolidate,
}


def anonymous() -> int:
    """Return the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def measure(route: str, folder: str) -> dict[str, float]:
    """Run one route; return seconds of wall and CPU time, and the memory in MiB."""
    Path(folder, "out").mkdir()
    before = highest = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    wall, cpu = time.perf_counter(), time.process_time()
    ROUTES[route](folder)
    result = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    done.set()
    thread.join()
    shutil.rmtree(f"{folder}/out")
    return {**result, "memory": (highest - before) / 2**20}


def main() -> None:
    """Save, measure all routes in turn, print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--route", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save:
        return save(args.save, args.gib)
    if args.route:
        print(json.dumps(measure(*args.route)))
        return None
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        launch = ["torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}", __file__]
        subprocess.run([sys.executable, "-m", *launch, "--save", folder, "--gib", str(args.gib)], check=True)
        found: dict[str, list[dict[str, float]]] = {route: [] for route in ROUTES}
        for _ in range(args.rounds):
            for route, results in found.items():
                command = [sys.executable, __file__, "--route", route, folder]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                results.append(json.loads(output.splitlines()[-1]))
    medians = {
        route: {key: statistics.median(result[key] for result in results) for key in results[0]}
        for route, results in found.items()
    }
    for route, figures in medians.items():
        print(f"{route:30} wall {figures['wall']:6.2f} s  CPU {figures['cpu']:6.2f} s  {figures['memory']:7.0f} MiB")
    for ours, peer in zip(list(ROUTES)[::2], list(ROUTES)[1::2]):
        print(f"{ours} over {peer}: wall {medians[ours]['wall'] / medians[peer]['wall']:.2f}")
    return None


if __name__ == "__main__":
    main()
