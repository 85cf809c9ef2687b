"""Writes files in the structure of DeepSpeed's checkpoints, without DeepSpeed and without ranks."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

GROUPS = (
    {"embed.weight": (5, 3), "a.bias": (3,)},
    {"scale": (), "tail": (2, 1, 3)},
)
"""Shapes of the trained parameters of each group; one has no dimensions."""
FROZEN = {"ice": (3, 2)}
MASTERS = ("master", "exp_avg", "exp_avg_sq")


class fragment_address:
    def __init__(self, start: int, numel: int):
        self.start, self.numel = start, numel


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0


class ZeroStageEnum(int):
    def __reduce__(self) -> tuple:
        return ZeroStageEnum, (int(self),)


_HOMES = {
    "deepspeed.utils.tensor_fragment": fragment_address,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
}


@contextmanager
def deepspeed_names() -> Iterator[None]:
    """Let the classes above be pickled under DeepSpeed's names, whether DeepSpeed is loaded or not."""
    parents = {".".join(name.split(".")[:n]) for name in _HOMES for n in range(1, 4)}
    stubs = {name: types.ModuleType(name) for name in (*_HOMES, *(p for p in parents if p not in sys.modules))}
    for name, cls in _HOMES.items():
        cls.__module__ = name
        setattr(stubs[name], cls.__name__, cls)
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:  # only these: what else was imported meanwhile cannot be imported a second time
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def values(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Return masters and moments by kind and name."""
    make = torch.Generator().manual_seed(seed)
    return {
        kind: {name: torch.randn(shape, generator=make) for group in GROUPS for name, shape in group.items()}
        for kind in MASTERS
    }


def module_values() -> dict[str, torch.Tensor]:
    """Return what only the module file holds: frozen parameters (one is a transposed view) and a buffer."""
    return {"ice": torch.arange(6.0).reshape(2, 3).t(), "count": torch.tensor(7)}


def write(
    folder: str | Path,
    stage: int,
    world: int,
    *,
    step: int = 4,
    lr: float = 0.1,
    paddings: bool = False,
    change: Callable[[str, dict[str, Any]], None] = lambda name, content: None,
) -> dict[str, dict[str, torch.Tensor]]:
    """Write a checkpoint into `folder` and return its masters and moments.

    Args:
        folder: is made.
        stage: 1, 2 or 3.
        world: number of ranks.
        step: steps done.
        lr: learning rate.
        paddings: put one element after each parameter but the last (ZeRO-1 and 2).
        change: is called with each file's name and content before it is written.
    """
    path = Path(folder)
    path.mkdir(parents=True)
    held = values(step)
    contents: dict[str, dict[str, Any]] = {}
    for rank in range(world):
        build = _rank3 if stage == 3 else _rank12
        contents[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": build(held, stage, world, rank, step, lr, int(paddings)),
            "ds_config": {"optimizer": {"type": "AdamW"}},
            "ds_version": "0.19.8",
        }
        if stage == 3:
            contents[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = _module(stage, world, rank, step)
    if stage < 3:
        contents["mp_rank_00_model_states.pt"] = _module(stage, world, 0, step)
        contents["mp_rank_00_model_states.pt"]["module"].update(held["master"])
    with deepspeed_names():
        for name, content in contents.items():
            change(name, content)
            torch.save(content, path / name)
    return held


def _base(state: list[dict[str, torch.Tensor]], step: int, lr: float) -> dict[str, Any]:
    return {
        "state": {n: {"step": torch.tensor(float(step)), **entry} for n, entry in enumerate(state)},
        "param_groups": [{"lr": lr, "betas": (0.9, 0.95), "params": [n]} for n in range(len(state))],
    }


def _rank12(held: dict, stage: int, world: int, rank: int, step: int, lr: float, pad: int) -> dict[str, Any]:
    flats: dict[str, list[torch.Tensor]] = {kind: [] for kind in held}
    slices, pads = [], []
    for group in GROUPS:
        extra = [pad] * (len(group) - 1) + [0]
        total = sum(held["master"][name].numel() for name in group) + sum(extra)
        part = -(-total // (2 * world)) * 2
        for kind, flat in flats.items():
            row = []
            for name, after in zip(group, extra):
                row += [held[kind][name].flatten(), torch.full((after,), 9e9)]
            # the masters end with the last parameter, the moments go on to the end of the part
            whole = torch.cat([*row, torch.full((part * world - total,), 9e9)])
            end = min(total, (rank + 1) * part) if kind == "master" else (rank + 1) * part
            flat.append(whole[rank * part : max(end, rank * part)].clone())
        position, mine = 0, OrderedDict()
        for name, after in zip(group, extra):
            size = held["master"][name].numel()
            begin, end = max(position, rank * part), min(position + size, (rank + 1) * part)
            if begin < end:
                mine[name] = fragment_address(begin - rank * part, end - begin)
            position += size + after
        slices.append(mine)
        pads.append(extra)
    moments = [{kind: flats[kind][n] for kind in MASTERS[1:]} for n in range(len(GROUPS))]
    return {
        "loss_scaler": LossScaler(),
        "base_optimizer_state": _base(moments, step, lr),
        "single_partition_of_fp32_groups": flats["master"],
        "zero_stage": ZeroStageEnum(stage),
        "param_alignment_paddings": pads,
        "partition_count": [world] * len(GROUPS),
        "param_slice_mappings": slices,
    }


def _rank3(held: dict, stage: int, world: int, rank: int, step: int, lr: float, pad: int) -> dict[str, Any]:
    flats = {
        kind: [torch.cat([_piece(held[kind][name], world, rank) for name in group]) for group in GROUPS]
        for kind in held
    }
    moments = [{kind: flats[kind][n] for kind in MASTERS[1:]} for n in range(len(GROUPS))]
    return {
        "zero_stage": ZeroStageEnum(3),
        "loss_scaler": LossScaler(),
        "partition_count": world,
        "optimizer_state_dict": _base(moments, step, lr),
        "fp32_flat_groups": flats["master"],
    }


def _piece(value: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    part = -(-value.numel() // world)
    padded = torch.full((part * world,), 9e9)
    padded[: value.numel()] = value.flatten()
    return padded[rank * part : (rank + 1) * part].clone()


def _module(stage: int, world: int, rank: int, step: int) -> dict[str, Any]:
    own = module_values()
    content: dict[str, Any] = {
        "module": OrderedDict(own),
        "buffer_names": ["count"],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in GROUPS],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {"head.weight": "tied.weight", "tied.weight": "embed.weight"},
        "global_steps": step,
        "skipped_steps": 0,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
    }
    if stage == 3:
        content["module"]["ice"] = torch.zeros(0)
        content["frozen_param_shapes"] = {n: torch.Size(s) for n, s in FROZEN.items()}
        content["frozen_param_fragments"] = {n: _piece(own[n], world, rank) for n in FROZEN}
    return content
