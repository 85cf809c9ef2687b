"""Writes small checkpoints of our format, whole tensors in, shards out, without any engine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from ort_zero.checkpoint.files.dtypes import code_of
from ort_zero.checkpoint.files.storage import Folder, open_folder
from ort_zero.checkpoint.format import manifest
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT, File, Optimizer, ParamGroup, Piece, Source, Tensor

SAVED_ELSEWHERE = (MASTER, WEIGHT, BUFFER)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row-major."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some_tensors(seed: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """Return tensors by (kind, name): odd sizes, several dtypes, moments, a buffer, 0 dimensions, no elements."""
    make = torch.Generator().manual_seed(seed)
    found: dict[tuple[str, str], torch.Tensor] = {}
    for name, shape in {"emb.weight": (13, 7), "a.weight": (5, 3, 3), "a.bias": (5,), "scale": ()}.items():
        for kind in (MASTER, "exp_avg", "exp_avg_sq"):
            found[kind, name] = torch.randn(shape, generator=make)
    found[WEIGHT, "ice.weight"] = torch.randn((3, 11), generator=make).bfloat16()
    found[WEIGHT, "none"] = torch.zeros(0, 4)
    found[BUFFER, "bn.count"] = torch.tensor(12)
    found[BUFFER, "bn.mask"] = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
    return found


def write(
    path: str | Path,
    tensors: dict[tuple[str, str], torch.Tensor] | None = None,
    *,
    ranks: int = 3,
    **changes: Any,
) -> dict[tuple[str, str], torch.Tensor]:
    """Write a checkpoint into the folder (or URL) `path` and return its tensors.

    Each tensor of more than two elements is cut into one piece per rank, uneven ones; ranks keep masters and weights
    in one file and optimizer state in another. `changes` replace fields of the manifest, such as ``config`` or
    ``aliases``.
    """
    tensors = some_tensors() if tensors is None else tensors
    folder = open_folder(path)
    folder.make()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    pieces: dict[tuple[str, str], list[tuple[str, int]]] = {key: [] for key in tensors}
    for (kind, name), tensor in tensors.items():
        flat = tensor.reshape(-1)
        cuts = [flat.numel() * i // ranks for i in range(ranks + 1)] if flat.numel() > 2 else [0, flat.numel()]
        end = "master" if kind in SAVED_ELSEWHERE else "optimizer"
        for rank, (low, high) in enumerate(zip(cuts, cuts[1:])):
            file = f"rank_{rank:05d}_{end}.safetensors"
            shards.setdefault(file, {})[f"{kind}/{name}"] = flat[low:high].clone()
            pieces[kind, name].append((file, low))
    files, offsets = _write_shards(folder, shards)
    files += _write_extras(folder, ranks)
    records = []
    for (kind, name), tensor in tensors.items():
        own = []
        for file, start in pieces[kind, name]:
            offset, part = offsets[file, f"{kind}/{name}"], raw(shards[file][f"{kind}/{name}"])
            own.append(Piece(file, offset, len(part), start, xxhash.xxh3_64_digest(part)))
        records.append(
            Tensor(name=name, kind=kind, dtype=code_of(tensor.dtype), shape=tuple(tensor.shape), pieces=tuple(own))
        )
    fields: dict[str, Any] = {
        "format": "ort_zero",
        "root": "",
        "tensors": tuple(records),
        "files": {file.name: file for file in files},
        "optimizer": _optimizer(tensors),
        "tag": "global_step7",
        "step": 7,
        "world_size": ranks,
        "zero_stage": 1,
        "dtype": "F32",
        "run_id": "run",
        "save_id": "save",
        "aliases": {"head.weight": "emb.weight"} if (MASTER, "emb.weight") in tensors else {},
        "frozen": frozenset(name for kind, name in tensors if kind == WEIGHT),
        "config": {"config.json": "{}"},
    }
    folder.write(manifest.NAME, manifest.dump(Source(**{**fields, **changes}), {}), "t")
    return tensors


def _write_extras(folder: Folder, ranks: int) -> list[File]:
    """Write what each rank keeps beside its tensors."""
    files = []
    for rank in range(ranks):
        name = f"rank_{rank:05d}_extra.json"
        about = {"save_id": "save", "run_id": "run", "rank": str(rank), "tensor_shapes": []}
        values = dict.fromkeys(("client_state", "lr_scheduler", "loss_scaler", "extra_state"))
        data = json.dumps({**about, **values, "counters": {"global_steps": 7}}).encode()
        folder.write(name, data, "t")
        files.append(File(name=name, size=len(data), xxh3_128=xxhash.xxh3_128(data).hexdigest()))
    return files


def _write_shards(
    folder: Folder, shards: dict[str, dict[str, torch.Tensor]]
) -> tuple[list[File], dict[tuple[str, str], int]]:
    files, offsets = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, shard in shards.items():
            save_file(shard, f"{scratch}/{name}")
            data = Path(scratch, name).read_bytes()
            folder.write(name, data, "t")
            files.append(File(name=name, size=len(data), xxh3_128=xxhash.xxh3_128(data).hexdigest()))
            start = 8 + int.from_bytes(data[:8], "little")
            for key, entry in json.loads(data[8:start]).items():
                offsets[name, key] = start + entry["data_offsets"][0]
    return files, offsets


def _optimizer(tensors: dict[tuple[str, str], torch.Tensor]) -> Optimizer:
    names = tuple(name for kind, name in tensors if kind == "exp_avg")
    options = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    return Optimizer(
        class_name="AdamW",
        groups=(ParamGroup(names=names, options=options),),
        scalars={"step": dict.fromkeys(names, 7.0)},
    )
