"""Plans, checks and reshards a checkpoint of 405 billion parameters on one core, without its tensor data.

The shapes are those of a model with 126 layers and 405 billion parameters. Each stage runs in a process of its own,
through the code that real checkpoints take; files are sparse, with real headers, and no tensor's bytes are read.
Printed are the CPU time, and the anonymous memory of a stage beyond what its imports take.

* save: rank 0 takes the packed parts of all ranks and writes the manifest.
* open: the manifest is read, and all of it compared with the sizes of the files.
* aggregate: what goes where in the output, down to each read.
* load: what each rank of another world size reads, ZeRO-3.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HIDDEN, FEED_FORWARD, KEYS, VOCABULARY, LAYERS = 16384, 53248, 1024, 128256, 126
KINDS = {"master": ("master",), "optimizer": ("exp_avg", "exp_avg_sq")}
STAGES = ("save", "open", "aggregate", "load")
GOAL = 100e6
"""Most bytes of the manifest on disk, and of memory to have it open."""


def shapes_of(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model with `layers` layers."""
    inside = {
        "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "self_attn.k_proj.weight": (KEYS, HIDDEN),
        "self_attn.v_proj.weight": (KEYS, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    layer = {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in inside.items()}
    ends = {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    return {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), **layer, **ends}


class Meter:
    """Measures the CPU seconds of a stage, and the anonymous memory that it adds."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # puts the mark of the largest memory back
        self._before = self._status("RssAnon")
        self._start = time.process_time()

    @staticmethod
    def _status(key: str) -> float:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024 / 1e6

    def figures(self, **more: Any) -> dict[str, Any]:
        """Return seconds, MB at the most and MB that are still held."""
        seconds = time.process_time() - self._start
        # the high-water mark counts mapped files too, of which a stage brings none
        peak = self._status("VmHWM") - self._status("RssFile") - self._status("RssShmem") - self._before
        held = self._status("RssAnon") - self._before
        return {"seconds": round(seconds, 2), "peak_mb": round(peak), "held_mb": round(held), **more}


def write_rank(folder: Path, rank: int, options: dict[str, Any]) -> bytes:
    """Write the sparse files of one rank, with their headers; return its packed part."""
    from ort_zero.checkpoint.files import safetensors_header
    from ort_zero.checkpoint.files.safetensors_header import HeaderEntry
    from ort_zero.checkpoint.pieces import CHECK_BYTES, PieceRun
    from ort_zero.checkpoint.records import MASTER, File
    from ort_zero.checkpoint.saves.checkpoint_writer import RankPart, Written
    from ort_zero.compat.deepspeed_partitions import zero3_part

    shapes, draw, files, written = shapes_of(options["layers"]), random.Random(rank), [], []
    for label, kinds in KINDS.items():
        rows, places, position = [], [], 0
        for kind in kinds:
            for name, shape in shapes.items():
                start, length = zero3_part(math.prod(shape), rank, options["ranks"])
                key = name if kind == MASTER else f"{kind}/{name}"
                rows.append(HeaderEntry(key, "F32", (length,), position, 4 * length))
                places.append((kind, name, start))
                position += 4 * length
        header = safetensors_header.encode(rows, {"rank": str(rank)}, "")
        file = f"rank_{rank:05d}_{label}.safetensors"
        with open(folder / file, "wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + position)
        for (kind, name, start), row in zip(places, rows):
            check = draw.randbytes(CHECK_BYTES)
            run = PieceRun(len(files), len(header) + row.offset, row.nbytes, start, check)
            written.append(Written(kind, name, "F32", run))
        files.append(File(name=file, size=len(header) + position, xxh3_128=f"{draw.getrandbits(128):032x}"))
    return RankPart(files, written, {"step": dict.fromkeys(shapes, 1.0)}).packed()


def save(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Put the parts of all ranks together as rank 0 does."""
    from ort_zero.checkpoint.files.storage import open_folder
    from ort_zero.checkpoint.format import manifest
    from ort_zero.checkpoint.records import Optimizer, ParamGroup, Source
    from ort_zero.checkpoint.saves.checkpoint_writer import joined, manifest_bytes
    from ort_zero.utils.garbage import collection_paused

    shapes = shapes_of(options["layers"])
    groups = (ParamGroup(names=tuple(shapes), options={"lr": 1e-4}),)
    about = Source(
        format="ort_zero", root=str(folder), tag="t", step=1, world_size=0, zero_stage=3, tensors=(), files={},
        aliases={}, frozen=frozenset(), optimizer=Optimizer(class_name="AdamW", groups=groups, scalars={}),
        dtype="BF16", run_id="r", save_id="s",
    )  # fmt: skip
    before = time.process_time()
    packed = [write_rank(folder, rank, options) for rank in range(options["ranks"])]
    pack_seconds = (time.process_time() - before) / options["ranks"]
    meter = Meter()
    with collection_paused():
        content = manifest_bytes(joined(open_folder(folder), about, shapes, packed, all_here=True))
    figures = meter.figures(
        part_kb=round(sum(map(len, packed)) / len(packed) / 1e3),
        received_mb=round(sum(map(len, packed)) / 1e6),
        a_rank_packs_seconds=round(pack_seconds, 3),
        manifest_mb=round(len(content) / 1e6, 1),
    )
    (folder / manifest.NAME).write_bytes(content)
    return figures


def open_it(folder: Path) -> Any:
    """Return the checkpoint as its readers have it."""
    from ort_zero.checkpoint.finding import find_source

    return find_source(str(folder))


def open_stage(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Open the checkpoint."""
    import importlib

    for name in ("finding", "format.manifest_schema"):
        importlib.import_module(f"ort_zero.checkpoint.{name}")
    meter = Meter()
    source = open_it(folder)
    figures = meter.figures()
    return {**figures, "tensors": len(source.tensors), "pieces": sum(len(tensor.pieces) for tensor in source.tensors)}


def aggregate(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Plan an aggregation of the weights into files of 5 GB, down to each piece."""
    from ort_zero.checkpoint.aggregation.aggregation_plan import make_plan

    meter = Meter()
    plan = make_plan(open_it(folder))
    reads = size = 0
    for file in plan.files:
        for entry in file.entries:
            for piece in entry.tensor.pieces:
                reads += 1
                size += piece.length
    return meter.figures(files=len(plan.files), reads=reads, gb=round(size / 1e9))


def load(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Plan what every rank of another world size reads."""
    import torch

    from ort_zero.checkpoint.reads.checked_reads import ReadRequest, wanted_of
    from ort_zero.compat.deepspeed_partitions import zero3_groups

    meter = Meter()
    source = open_it(folder)
    opened = meter.figures()["seconds"]
    shapes = shapes_of(options["layers"])
    states = {kind: source.by_name(kind) for kinds in KINDS.values() for kind in kinds}
    new, reads, size, needed, files = options["to"], 0, 0, 0, 0
    for rank in range(new):
        by_file: dict[str, int] = {}
        for group in zero3_groups([list(shapes)], shapes, rank, new, 1_000_000_000):
            for place in group.places:
                target = torch.empty(place.length, device="meta")
                for tensors in states.values():
                    request = ReadRequest(tensors[place.name], target, place.start)
                    needed += 4 * place.length
                    for item in wanted_of(request):
                        reads += 1
                        size += item.piece.length if item.piece.check else item.wanted
                        by_file[item.piece.file] = by_file.get(item.piece.file, 0) + 1
        files += len(by_file)
    figures = meter.figures(reads=reads, files_of_a_rank=round(files / new), read_of_needed=round(size / needed, 3))
    return {**figures, "a_rank_seconds": round(opened + (figures["seconds"] - opened) / new, 2)}


def main() -> int:
    """Print the figures of each stage as a table or JSON; return 1 if the manifest is above the goal."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--to", type=int, default=64, help="world size that loads")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--dir", help="where the sparse files go; default: a temporary folder")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    options = vars(args)
    if args.stage:
        work = {"save": save, "open": open_stage, "aggregate": aggregate, "load": load}[args.stage]
        print(json.dumps(work(Path(args.dir), options)))
        return 0
    folder = Path(args.dir or tempfile.mkdtemp(prefix="large_checkpoint_"))
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    try:
        for stage in STAGES:
            words = [f"--{key}={options[key]}" for key in ("ranks", "to", "layers")]
            command = [sys.executable, __file__, "--stage", stage, "--dir", str(folder), *words]
            found[stage] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            print(f"{stage}: {json.dumps(found[stage])}", file=sys.stderr)
    finally:
        if not args.dir:
            shutil.rmtree(folder)
    parameters = sum(math.prod(shape) for shape in shapes_of(args.layers).values())
    if args.json:
        print(json.dumps({"parameters": parameters, "ranks": args.ranks, "to": args.to, **found}))
    else:
        print(f"{parameters:,} parameters, {args.ranks} ranks, to {args.to}")
        for stage, figures in found.items():
            print(f"{stage:10}", ", ".join(f"{key} {value}" for key, value in figures.items()))
    return int(found["save"]["manifest_mb"] * 1e6 > GOAL or found["open"]["peak_mb"] * 1e6 > GOAL)


if __name__ == "__main__":
    sys.exit(main())
