"""Writes checkpoints of pipeline, expert and tensor parallelism with DeepSpeed itself, and what the ranks held.

All variants are written in one launch of four ranks. What a rank holds is gathered by the ranks themselves: masters and
moments through DeepSpeed's own functions, each rank's part of a split parameter with its place.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed_setup import grid
from launch_once import once
from rank_processes.ranks import run_on_ranks

WORLD = 4
STEPS = 2
WIDTH = 6


@dataclass(frozen=True)
class Variant:
    """One way to train; the name is the folder the checkpoint is written to."""

    name: str
    train: str
    """Name of the function that builds and trains: "plain", "pipeline", "experts", "autotp" or "megatron"."""
    stage: int
    dtype: str = "fp32"
    options: tuple[tuple[str, Any], ...] = ()
    """More arguments of the function."""
    universal: bool = False
    """Convert it into a universal checkpoint as well, in the folder ``<name>_universal``."""


ALL = (
    Variant("plain_2_bf16", "plain", 2, "bf16", universal=True),
    Variant("plain_3", "plain", 3, universal=True),
    Variant("pipeline_1_bf16", "pipeline", 1, "bf16", universal=True),
    Variant("pipeline_0", "pipeline", 0),
    Variant("pipeline_0_bf16", "pipeline", 0, "bf16", options=(("tied", True),)),
    Variant("pipeline_tied", "pipeline", 1, options=(("tied", True),)),
    Variant("pipeline_model", "pipeline", 1, "bf16", options=(("model", 2),)),
    Variant("experts_1", "experts", 1),
    Variant("experts_2_bf16", "experts", 2, "bf16"),
    Variant("experts_0", "experts", 0),
    Variant("experts_groups", "experts", 1, options=(("second", 4),)),
    Variant("megatron_1_bf16", "megatron", 1, "bf16"),
    Variant("megatron_2", "megatron", 2),
    Variant("megatron_3", "megatron", 3),
    Variant("megatron_0", "megatron", 0),
    Variant("autotp_1_bf16", "autotp", 1, "bf16", universal=True),
    Variant("autotp_0", "autotp", 0),
    Variant("autotp_tied", "autotp", 1, options=(("tied", True),)),
)

Held = dict[str, dict[str, torch.Tensor]]
"""Whole tensors by kind ("master", "exp_avg", "exp_avg_sq", "module") and name."""

_root: list[Path] = []


def written(tmp_path_factory: Any) -> tuple[Path, dict[str, Held]]:
    """Return the folder with one checkpoint folder per variant, and what the ranks held, by variant.

    The files are shared: copy a folder before you change it.
    """
    if not _root:
        _root.append(tmp_path_factory.mktemp("parallel"))
    return _root[0], _launch(str(_root[0]))


@once
def _launch(root: str) -> dict[str, Held]:
    return run_on_ranks(write, WORLD, root, list(ALL), timeout=800)[0]


def write(root: str, variants: list[Variant]) -> dict[str, Held]:
    """Train and save every variant under `root`; return what the engines held, put together. All ranks must call."""
    os.environ["ORT_ZERO_DISABLE"] = "1"
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    held = {}
    for variant in variants:
        _forget_groups()
        torch.manual_seed(11)
        train: Callable[..., Held] = globals()[f"_{variant.train}"]
        held[variant.name] = train(variant, str(Path(root) / variant.name), **dict(variant.options))
    if torch.distributed.get_rank() == 0:
        for variant in variants:
            if variant.universal:
                _convert(Path(root) / variant.name / "step", Path(root) / f"{variant.name}_universal" / "step")
    return held


def _convert(source: Path, destination: Path) -> None:
    """Make a universal checkpoint with DeepSpeed's own converter."""
    from deepspeed.checkpoint.ds_to_universal import main

    if "mp_rank_01" not in "".join(os.listdir(source)) and not list(source.glob("*zero_pp_rank_0_mp_rank_00_model*")):
        # DeepSpeed notes how tensors are split for AutoTP only, and its converter wants the note of all
        path = source / "mp_rank_00_model_states.pt"
        if "universal_checkpoint_info" not in (state := torch.load(path, weights_only=False)):
            torch.save({**state, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}, path)
    destination.parent.mkdir()
    main(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=str(destination),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


# ---- one model on each rank -----------------------------------------------------------------------------------------


def _forget_groups() -> None:
    """Forget the process groups of the engine before: DeepSpeed keeps one set for the life of the process."""
    from deepspeed.utils import groups

    for name, value in vars(groups).items():
        if name.isupper() and isinstance(value, dict):
            value.clear()
    for name in ("mpu", "mesh_device", "_DATA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"):
        if hasattr(groups, name):
            setattr(groups, name, None)


def _config(variant: Variant, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": variant.stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    if variant.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def _local_state(engine: Any, stage: int) -> Held:
    """Return whole masters, moments and weights of this rank's model, by name. All ranks must call."""
    held: Held = {"module": {n: v.detach().clone() for n, v in engine.module.state_dict().items()}}
    if stage in (1, 2) or hasattr(engine.optimizer, "bf16_groups"):
        held |= _gathered_groups(engine)
    elif stage == 3:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        held |= {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                held["master"][name] = safe_get_full_fp32_param(param).clone()
                for kind in ("exp_avg", "exp_avg_sq"):
                    held[kind][name] = safe_get_full_optimizer_state(param, kind).clone()
    return held


def _gathered_groups(engine: Any) -> Held:
    """Return masters and moments by name, each group gathered from the ranks that share it. All ranks must call."""
    optimizer = engine.optimizer
    held: Held = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for kind, values in held.items():
        bf16 = hasattr(optimizer, "bf16_groups")  # BF16_Optimizer, which a pipeline without ZeRO has
        flat = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
        mine = [(f if kind == "master" else optimizer.optimizer.state[f][kind]).detach().clone() for f in flat]
        everyone = _everyone(mine)
        for group, members in enumerate(optimizer.bf16_groups if bf16 else optimizer.round_robin_bit16_groups):
            sharing = torch.distributed.get_process_group_ranks(optimizer.real_dp_process_group[group])
            whole, position = torch.cat([everyone[rank][group] for rank in sharing]), 0
            for param in members:
                values[engine.param_names[param]] = whole[position : position + param.numel()].reshape(param.shape)
                position += param.numel()
    return held


def _steps(engine: Any, seed: int) -> None:
    """Train on tokens."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        engine.backward(engine(torch.randint(0, 8, (2, 3), generator=generator)))
        engine.step()


def _everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def _plain(variant: Variant, folder: str) -> Held:
    import deepspeed

    net = _Plain()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2),
        config=_config(variant),
    )
    _steps(engine, torch.distributed.get_rank())
    engine.save_checkpoint(folder, tag="step")
    held = _local_state(engine, variant.stage)
    engine.destroy()
    return held


def resume(root: str, names: list[str]) -> dict[str, Held]:
    """Load each checkpoint into an engine with the whole model on each rank; return what that holds then, by name.

    All ranks must call.
    """
    os.environ["ORT_ZERO_DISABLE"] = "1"
    import deepspeed

    from ort_zero import checkpoint

    deepspeed.init_distributed("gloo", verbose=False)
    found = {}
    for name in names:
        net = _Plain(tied="tied" in name)
        trained = [p for p in net.parameters() if p.requires_grad]
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=_config(Variant(name, "plain", 2))
        )
        checkpoint.load(engine, str(Path(root) / name / "step"))
        found[name] = _local_state(engine, 2) | {"steps": {"global": torch.tensor(engine.global_steps)}}
        engine.destroy()
    return found


# ---- pipeline -------------------------------------------------------------------------------------------------------


class _Block(torch.nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, wide)
        self.second = torch.nn.Linear(wide, WIDTH)
        self.register_buffer("seen", torch.full((3,), float(wide)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).relu())


class _Embed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _unembed(module: _Embed, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


def _mse(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(x.float(), y.float())


def _pipeline(variant: Variant, folder: str, tied: bool = False, model: int = 1) -> Held:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

    layers: list[Any] = [LayerSpec(_Block, wide) for wide in (5, 7, 9, 3)]
    layers.insert(2, torch.tanh)
    if tied:
        layers = [TiedLayerSpec("embed", _Embed), *layers, TiedLayerSpec("embed", _Embed, forward_fn=_unembed)]
    topology = (
        PipeDataParallelTopology(num_pp=2, num_dp=2)
        if model == 1
        else PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    )
    net = PipelineModule(layers, topology=topology, loss_fn=_mse, partition_method="uniform", seed_layers=True)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2),
        config=_config(variant, train_batch_size=4 // model),
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[variant.dtype]

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(3)
        while True:
            x = torch.randn(2, WIDTH, generator=generator).to(dtype)
            yield x, x * 2

    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.save_checkpoint(folder, tag="step")
    held: Held = {}
    for one in _everyone(_local_state(engine, variant.stage)):
        for kind, values in one.items():
            held.setdefault(kind, {}).update(values)
    engine.destroy()
    return held


# ---- experts --------------------------------------------------------------------------------------------------------


class _Experts(torch.nn.Module):
    def __init__(self, second: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.ReLU(), torch.nn.Linear(5, WIDTH))
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=2, k=1, min_capacity=8)
        self.dense = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.dense.requires_grad_(False)
        self.more = MoE(WIDTH, expert, num_experts=second, ep_size=second, k=1, min_capacity=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, loss, _ = self.moe(self.first(x))
        hidden, more, _ = self.more(self.dense(hidden) + x)
        return (hidden.float() ** 2).mean() + 0.01 * (loss + more).float()


def _experts(variant: Variant, folder: str, second: int = 2) -> Held:
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    net = _Experts(second)
    groups = split_params_into_different_moe_groups_for_optimizer(
        [{"params": [p for p in net.parameters() if p.requires_grad], "name": "all"}]
    )
    # DeepSpeed takes the names of expert groups out of a set: their order differs from process to process
    groups = [groups[0], *sorted(groups[1:], key=lambda g: g["name"], reverse=torch.distributed.get_rank() % 2 == 1)]
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=_config(variant))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[variant.dtype]
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(STEPS):
        engine.backward(engine(torch.randn(8, WIDTH, generator=generator).to(dtype)))
        engine.step()
    engine.save_checkpoint(folder, tag="step")
    held: Held = {}
    for rank, one in enumerate(_everyone(_local_state(engine, variant.stage))):
        for kind, values in one.items():
            held.setdefault(kind, {}).update({_global_expert(n, rank, second): v for n, v in values.items()})
    engine.destroy()
    return held


def _global_expert(name: str, rank: int, second: int) -> str:
    """Return the name that an expert's parameter has in a model that is not spread over ranks."""
    before, found, after = name.partition("deepspeed_experts.")
    if not found:
        return name
    number, rest = after.split(".", 1)
    first = rank % 2 * 2 if before.startswith("moe.") else rank % second
    return f"{before}{found}{first + int(number)}.{rest}"


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    """A model with each kind of split: columns, rows, vocabulary, and two fused projections."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8 // ranks, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 8 // ranks)
        self.down = torch.nn.Linear(8 // ranks, WIDTH)
        self.gate_up = torch.nn.Linear(WIDTH, 12 // ranks, bias=False)
        self.out = torch.nn.Linear(6 // ranks, WIDTH, bias=False)
        self.frozen = torch.nn.Linear(WIDTH, 8 // ranks, bias=False)
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.arange(5.0))


SPLITS: dict[str, tuple[int, int]] = {
    "embed.weight": (0, 1),
    "up.weight": (0, 1),
    "up.bias": (0, 1),
    "down.weight": (1, 1),
    "gate_up.weight": (0, 2),
    "out.weight": (1, 1),
    "frozen.weight": (0, 1),
}
"""Dimension along which the ranks have a parameter of :class:`_Model`, and the number of projections fused in it."""


def _part(name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
    if name not in SPLITS:
        return value.clone()
    dim, fused = SPLITS[name]
    return torch.cat([whole.chunk(2, dim)[rank] for whole in value.chunk(fused, dim)], dim).clone()


def _join(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if name not in SPLITS:
        assert all(torch.equal(parts[0], other) for other in parts)
        return parts[0]
    dim, fused = SPLITS[name]
    return torch.cat([torch.cat(rows, dim) for rows in zip(*(part.chunk(fused, dim) for part in parts))], dim)


class _Split(_Model):
    """Ranks 0, 1 and ranks 2, 3 share the layers by hand, as Megatron does."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        group = _Reduce.group
        rank = torch.distributed.get_rank(group)
        local = tokens - rank * 4
        mine = (local >= 0) & (local < 4)
        hidden = _Reduce.apply(self.embed(local.clamp(0, 3)) * mine.unsqueeze(-1))
        copied = _Copy.apply(self.norm(hidden))
        hidden = hidden + _Reduce.apply(
            torch.nn.functional.linear((self.up(copied) + self.frozen(copied)).relu(), self.down.weight)
        )
        hidden = hidden + self.down.bias
        gate, up = self.gate_up(_Copy.apply(hidden)).chunk(2, -1)
        return (_Reduce.apply(self.out(gate * up)).float() ** 2).mean()


class _Reduce(torch.autograd.Function):
    """Sums over the tensor-parallel ranks; the gradient passes."""

    group: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        torch.distributed.all_reduce(x, group=_Reduce.group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Copy(torch.autograd.Function):
    """Passes; the gradient is summed over the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        torch.distributed.all_reduce(grad, group=_Reduce.group)
        return grad


def _megatron(variant: Variant, folder: str) -> Held:
    import deepspeed

    mpu = grid(2)  # two tensor-parallel ranks, two data-parallel
    _Reduce.group = mpu.get_model_parallel_group()
    whole = _Model()
    net = _Split(ranks=2)
    rank = mpu.get_model_parallel_rank()
    net.load_state_dict({name: _part(name, value, rank) for name, value in whole.state_dict().items()})
    engine, *_ = deepspeed.initialize(
        model=net,
        mpu=mpu,
        optimizer=torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2),
        config=_config(variant),
    )
    _steps(engine, mpu.get_data_parallel_rank())
    engine.save_checkpoint(folder, tag="step")
    held = _joined(_local_state(engine, variant.stage), variant)
    engine.destroy()
    return held


def _joined(local: Held, variant: Variant) -> Held:
    everyone = _everyone(local)[:2]  # ranks 2 and 3 hold the same once more
    return {
        kind: {
            name: _join(name, [one[kind][name] for one in everyone])
            for name in values
            if variant.stage < 3 or kind != "module"
        }
        for kind, values in everyone[0].items()
    }


class _Plain(_Model):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, WIDTH)
        if tied:
            self.head = torch.nn.Linear(WIDTH, 8, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = hidden + self.down((self.up(hidden) + self.frozen(hidden)).relu())
        gate, up = self.gate_up(hidden).chunk(2, -1)
        return (self.out(gate * up).float() ** 2).mean()


AUTOTP = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r"^(up|frozen)\.weight$"], "partition_type": "column"},
            {"patterns": [r"^(down|out)\.weight$"], "partition_type": "row"},
            {
                "patterns": [r"^gate_up\.weight$"],
                "partition_type": "column",
                "shape": [2, -1],
                "partition_dim": 0,
            },
        ],
    },
}


def _autotp(variant: Variant, folder: str, tied: bool = False) -> Held:
    import deepspeed

    net = _Plain(tied)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2),
        config=_config(variant, tensor_parallel=AUTOTP),
    )
    from deepspeed.utils import groups

    _steps(engine, groups.get_data_parallel_rank())
    engine.save_checkpoint(folder, tag="step")
    everyone = _everyone(_local_state(engine, variant.stage))[:2]
    held = {
        kind: {
            name: values[name]
            if name in ("embed.weight", "head.weight")
            else _join(name, [one[kind][name] for one in everyone])
            for name in values
        }
        for kind, values in everyone[0].items()
    }
    engine.destroy()
    return held
