"""Writes checkpoints with DeepSpeed itself, many variants in one launch, and what the live engines held."""

from __future__ import annotations

import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_once import once
from older_versions import older
from rank_processes.ranks import run_on_ranks

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.records import Source, Tensor

STEPS = 3
TRAINED = "trained"
"""The state with the parameters that the optimizer updates, as the module has them, by name."""
FAILED = "failed"
"""What a variant has in place of states if DeepSpeed itself failed to train or save it: the traceback."""


@dataclass(frozen=True)
class Variant:
    """One way to train; the name is the folder the checkpoint is written to."""

    name: str
    stage: int
    dtype: str = "fp32"
    groups: int = 2
    zero: tuple[tuple[str, Any], ...] = ()
    """More keys of ``zero_optimization``."""
    extra: tuple[tuple[str, Any], ...] = ()
    """More top-level keys of the config."""
    steps: int = STEPS


BF16_OPTIMIZER = "bf16_optimizer"
"""Name of the variant that trains with DeepSpeed's BF16_Optimizer, whose files zero_to_fp32 refuses."""
ALIGNMENT = 4
"""Elements of fp32 at whose multiples each parameter begins with "parameter_alignment": 16 bytes."""
_CPU = (("offload_optimizer", {"device": "cpu"}),)
_SMALL = (("sub_group_size", 40), ("stage3_param_persistence_threshold", 0))
PLAIN = tuple(Variant(f"stage{stage}", stage) for stage in (1, 2, 3))
ALL = (
    *PLAIN,
    Variant("stage1_bf16", 1, "bf16"),
    Variant("stage2_bf16", 2, "bf16"),
    Variant("stage3_bf16", 3, "bf16", zero=_SMALL),
    Variant("stage2_offload", 2, "bf16", zero=_CPU),
    Variant("stage3_offload", 3, "bf16", zero=_CPU + _SMALL),
    Variant("stage2_elastic", 2, "bf16", zero=(("elastic_checkpoint", True),)),
    Variant("stage2_round_robin", 2, zero=(("round_robin_gradients", True),)),
    *(() if older("deepspeed", "0.19.8") else (Variant("stage2_aligned", 2, zero=(("parameter_alignment", True),)),)),
    Variant(BF16_OPTIMIZER, 1, "bf16", extra=(("data_types", {"grad_accum_dtype": "fp32"}),)),
    Variant("stage0_bf16", 0, "bf16"),
    Variant("stage0", 0),
    Variant("no_steps", 2, "bf16", steps=0),
    Variant("one_group", 2, groups=1),
    *(Variant(f"stage{stage}_fp16", stage, "fp16") for stage in (1, 2, 3)),
)
FEW = (*PLAIN, Variant("stage3_bf16", 3, "bf16", zero=_SMALL))


_roots: dict[int, Path] = {}


def written(tmp_path_factory: Any, world: int) -> tuple[Path, dict[str, dict[str, dict[str, torch.Tensor]]]]:
    """Return the folder with one checkpoint folder per variant, and what :func:`write` returned on rank 0.

    One launch per world size and test session, with :data:`ALL` variants for 2 ranks and 3 and :data:`FEW` for others.
    The files are shared: copy a folder before you change it.
    """
    if world not in _roots:
        _roots[world] = tmp_path_factory.mktemp(f"deepspeed_{world}")
    return _roots[world], _launch(world, str(_roots[world]))


@once
def _launch(world: int, root: str) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    variants, folder = ALL if world in (2, 3) else FEW, Path(root)
    for _ in variants:  # each further launch is for those that come after one with which DeepSpeed itself fails
        left = [v for v in variants if not (_held(folder, v).exists() or _failures(folder, v))]
        if not left:
            break
        for variant in left:
            shutil.rmtree(folder / variant.name, ignore_errors=True)
        try:
            run_on_ranks(write, world, root, left, timeout=300)
        except RuntimeError:
            if not any(_failures(folder, variant) for variant in left):
                raise
    return {
        v.name: {FAILED: failed[0].read_text()} if (failed := _failures(folder, v)) else torch.load(_held(folder, v))
        for v in variants
    }


def _held(folder: Path, variant: Variant) -> Path:
    """Return the file in which rank 0 keeps what :func:`write` has found of a variant."""
    return folder / f"{variant.name}.held"


def _failures(folder: Path, variant: Variant) -> list[Path]:
    """Return the files in which ranks have written with what error DeepSpeed ended with a variant."""
    return sorted(folder.glob(f"{variant.name}.failed_*"))


def read(source: Source, tensor: Tensor) -> torch.Tensor:
    """Return a tensor put together from its pieces."""
    folder, dtype = open_folder(source.root), dtypes.torch_dtype(tensor.dtype)
    data = bytearray(sum(piece.length for piece in tensor.pieces))
    if not data:
        return torch.zeros(tensor.shape, dtype=dtype)
    for piece in tensor.pieces:
        at = piece.start * dtype.itemsize
        folder.read_into(piece.file, piece.offset, memoryview(data)[at : at + piece.length])
    flat = torch.frombuffer(data, dtype=dtype)
    return flat.reshape(tensor.shape) if tensor.strides is None else flat.as_strided(tensor.shape, tensor.strides)


def values(source: Source, kind: str) -> dict[str, torch.Tensor]:
    return {name: read(source, tensor) for name, tensor in source.by_name(kind).items()}


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert set(mine) == set(theirs)
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype and value.shape == theirs[name].shape, name
        assert bits(value) == bits(theirs[name]), name


class Odd(torch.nn.Module):
    """Sizes that no world size divides, a frozen layer, tied weights, buffers of two types.

    `empty` adds a parameter without elements, which DeepSpeed cannot gather in ZeRO-3.
    """

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 7)
        self.first = torch.nn.Linear(7, 5)
        self.frozen = torch.nn.Linear(5, 5, bias=False)
        self.frozen.requires_grad_(False)
        if empty:
            self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        self.last = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(41, dtype=torch.int64))
        self.register_buffer("table", torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.first(self.embed(tokens)).relu())
        logits = self.head(self.norm(self.last(hidden) * self.scale))
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def write(root: str, variants: list[Variant]) -> None:
    """Train and save every variant under `root`, and beside it what the engines held, by state and name.

    States: "master", "exp_avg", "exp_avg_sq" from the live optimizer, "module" from the live module (below ZeRO-3), and
    "zero_to_fp32", what DeepSpeed's own converter makes of the files, where it can. All ranks must call.
    """
    os.environ["ORT_ZERO_DISABLE"] = "1"
    # the converter of DeepSpeed before 0.16 reads its own files so, whatever torch.load's default is
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    # DeepSpeed refuses fp16 on processors without instructions for it; torch computes it on all
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    rank = torch.distributed.get_rank()
    for variant in variants:
        try:
            held = _train(variant, Path(root) / variant.name)
        except Exception:
            # the other ranks may wait in the middle of a step: nothing goes on in these processes
            Path(root, f"{variant.name}.failed_{rank}").write_text(traceback.format_exc())
            raise
        if rank == 0:
            unfinished = _held(Path(root), variant).with_suffix(".unfinished")
            torch.save(held, unfinished)
            unfinished.rename(_held(Path(root), variant))


def checkpoint_of(tmp_path_factory: Any, world: int, variant: Variant) -> tuple[Path, dict[str, dict]]:
    """Return the folder with the checkpoint of a variant, and what :func:`write` returned for it on rank 0.

    Fails the test where DeepSpeed itself cannot write it.
    """
    root, held = written(tmp_path_factory, world)
    if FAILED in held[variant.name]:
        pytest.fail(f"DeepSpeed itself does not write {variant.name}: {held[variant.name][FAILED]}", pytrace=False)
    return root / variant.name, held[variant.name]


def _config(variant: Variant) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": variant.stage, **dict(variant.zero)},
        **dict(variant.extra),
    }
    if variant.dtype != "fp32":
        config[variant.dtype] = {"enabled": True}
    if variant.dtype == "fp16":
        config["fp16"]["initial_scale_power"] = 4  # the default makes the first steps overflow, and be skipped
    return config


def _train(variant: Variant, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    import deepspeed

    torch.manual_seed(5)
    model = Odd(empty=variant.stage < 3)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1, "betas": (0.9, 0.98)}]
    rest = [p for p in trained if p.ndim <= 1]
    if variant.groups == 1:
        groups[0]["params"] = trained
    else:
        groups.append({"params": rest, "weight_decay": 0.0})
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=_config(variant)
    )
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(variant.steps):
        engine.backward(engine(torch.randint(0, 11, (2, 3), generator=generator)))
        engine.step()
    engine.save_checkpoint(str(folder), client_state={"epoch": 2, "best": 0.5, "seen": ["a", None]})
    held = live_state(engine, variant) if variant.steps else {}
    held[TRAINED] = {
        engine.param_names[p]: p.detach().clone() for group in _groups(engine.optimizer, variant) for p in group
    }
    if variant.stage < 3:
        held["module"] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if variant.stage and variant.name != BF16_OPTIMIZER and torch.distributed.get_rank() == 0:
        held["zero_to_fp32"] = {name: value.clone() for name, value in _converted(folder).items()}
    engine.destroy()
    return held


def _converted(folder: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder))


def live_state(engine: Any, variant: Variant) -> dict[str, dict[str, torch.Tensor]]:
    """Return masters and moments by name, put together from all ranks' live tensors; empty for what has none."""
    optimizer = engine.optimizer
    names = engine.param_names
    world = torch.distributed.get_world_size()
    states: dict[str, dict[str, torch.Tensor]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    if variant.stage == 0:
        return {}
    for kind, held in states.items():
        if variant.stage == 3:
            mine = [_stage3(optimizer, group, kind) for group in range(len(_groups(optimizer, variant)))]
        else:
            flat = getattr(optimizer, "single_partition_of_fp32_groups", None)
            flat = optimizer.fp32_groups_flat_partition if flat is None else flat
            mine = [(f if kind == "master" else optimizer.optimizer.state[f][kind]).detach().clone() for f in flat]
        everyone: list[Any] = [None] * world
        torch.distributed.all_gather_object(everyone, mine)
        for group, members in enumerate(_groups(optimizer, variant)):
            position = 0
            whole = torch.cat([parts[group] for parts in everyone])
            for param in members:
                if variant.stage == 3:
                    size = -(-param.ds_numel // world)
                    pieces = [parts[group][position : position + size] for parts in everyone]
                    value = torch.cat(pieces)[: param.ds_numel].reshape(param.ds_shape)
                    position += size
                else:
                    value = whole[position : position + param.numel()].reshape(param.shape)
                    position += param.numel()
                    if variant.name == "stage2_aligned":
                        position = -(-position // ALIGNMENT) * ALIGNMENT
                held[names[param]] = value.clone()
    return states


def _groups(optimizer: Any, variant: Variant) -> list[list[torch.nn.Parameter]]:
    """Return the parameters that an optimizer updates, as it holds them; none without ZeRO."""
    if variant.stage == 0:
        return []
    if variant.stage == 3:
        return optimizer.fp16_groups
    return getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups


def _stage3(optimizer: Any, group: int, kind: str) -> torch.Tensor:
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return (flat if kind == "master" else optimizer.optimizer.state[flat][kind]).detach().clone()
