"""Train small models under FSDP1, FSDP2, HSDP and tensor parallelism, and save them as torch and programs do.

Ranks run :func:`save_runs`. Each run's folder has the checkpoint of ``torch.distributed.checkpoint`` in ``dcp/``, the
folders of Accelerate in ``accelerate/``, one file a rank in ``ranks/``, the shards of ``HuggingFaceStorageWriter`` in
``safetensors/``, and ``whole.pt``: the tensors that torch gathers, the truth of the tests (not under FSDP1).
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SEQUENCE = 6


class Odd(nn.Module):
    """A model with uneven and empty shards, tied weights, and buffers of every kind of dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.up, self.down = nn.Linear(24, 38), nn.Linear(38, 24)
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.arange(5) % 2 == 0)
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("eighths", torch.arange(8.0).to(torch.float8_e4m3fn))
        self.register_buffer("bytes", torch.arange(9, dtype=torch.uint8))
        self.register_buffer("halves", torch.randn(4).to(torch.bfloat16))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.down(self.up(self.embedding(input_ids)).relu())) * self.scale


def model_of(name: str) -> nn.Module:
    """Return a small model with seeded weights."""
    import transformers

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 65, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "gpt2":
        more = {"vocab_size": 65, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**more))
    if name == "llama":
        more = {"intermediate_size": 40, "num_key_value_heads": 1}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))
    if name == "experts":
        more = {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more))
    model = Odd()
    if name == "frozen":
        model.up.requires_grad_(False)
    return model


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
}  # torch 2.13's Adafactor raises on DTensors: aten.pow_ in place on a partial norm


def sharded(model: nn.Module, mode: str) -> nn.Module:
    """Shard a model: "fsdp" over all ranks, "fsdp1", "hsdp" 2 x 2, or "tensor" with two tensor-parallel ranks."""
    size = dist.get_world_size()
    if mode == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    mesh: DeviceMesh = init_device_mesh("cpu", (size,))
    if mode == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards"))
    elif mode == "tensor":
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, both["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = both["data"]
    return fully_shard(model, mesh=mesh)


def save_runs(folder: str, runs: list[tuple[str, str, str]]) -> None:
    """Train and save each run, a (model, mode, optimizer), into a folder of its name."""
    dist.init_process_group("gloo")
    for name, mode, optimizer in runs:
        save_run(Path(folder, f"{name}-{mode}-{optimizer}"), name, mode, optimizer)
    dist.destroy_process_group()


def save_run(folder: Path, name: str, mode: str, optimizer_name: str) -> None:
    """Train two steps and save in every form."""
    model = model_of(name)
    config = getattr(model, "config", None)
    model = sharded(model, mode)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    batch = dist.get_rank() // 2 if mode == "tensor" else dist.get_rank()
    train(model, optimizer, range(2), batch)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states, "extra": {"step": 2}}, checkpoint_id=folder / "dcp")
    flat, states_flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({**flat, "optimizer": states_flat}, checkpoint_id=folder / "titan")
    dcp.save({"model": weights}, checkpoint_id=folder / "accelerate" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=folder / "accelerate" / "optimizer_0")
    rank, size = dist.get_rank(), dist.get_world_size()
    (folder / "ranks").mkdir(exist_ok=True)
    of_rank = (weights, states) if mode == "fsdp1" else (model.state_dict(), optimizer.state_dict())
    for kind, state in zip(("model", "optim"), of_rank):
        torch.save(state, folder / "ranks" / f"{kind}_world_size_{size}_rank_{rank}.pt")
    if mode == "fsdp1":  # torch's writer of safetensors takes no ShardedTensor, and gathering them on CPUs crashes
        return
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    tied = {"head.weight", "lm_head.weight"} if name in ("gpt2", "odd", "frozen") else set()
    storable = {
        key: value
        for key, value in weights.items()
        if value.dtype.is_floating_point and value.dim() and value.dtype.itemsize > 1 and key not in tied
    }
    (folder / "safetensors").mkdir(exist_ok=True)
    dcp.save(
        storable, storage_writer=HuggingFaceStorageWriter(os.fspath(folder / "safetensors"), save_distributed=True)
    )
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
        if config is not None:
            for form in ("dcp", "accelerate", "ranks"):
                config.save_pretrained(folder / form)
    losses = train(model, optimizer, range(2, 5), batch)
    torch.save(losses, folder / f"losses_{rank}.pt")
    dist.barrier()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, batch: int) -> list[float]:
    """Train on a batch that depends on a number and the step; return the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, batch, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return the loss of a model on the batch of a rank and a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    result = model(torch.randint(50, (2, SEQUENCE), generator=generator))
    return getattr(result, "logits", result).float().square().mean()


def load_and_train(checkpoint: str, name: str, mode: str) -> tuple[list[float], Any]:
    """Load a converted checkpoint into a new model under FSDP2; return the losses of further steps, and the state."""
    dist.init_process_group("gloo")
    model = model_of(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sharded(model, mode)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    # steps are the optimizer's own tensors, which it changes in place
    whole = copy.deepcopy(
        get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    )
    losses = train(model, optimizer, range(2, 5), dist.get_rank())
    dist.destroy_process_group()
    return losses, whole


def deepspeed_from(checkpoint: str, saves: str, name: str, stage: int) -> tuple[list[float], dict[str, Any]]:
    """Load a checkpoint of FSDP2 into a DeepSpeed engine, save it, and train on.

    Returns:
        The losses of further steps, and the values that were loaded, by kind and name, on rank 0.
    """
    import deepspeed

    from ort_zero import checkpoint as ort_zero_checkpoint

    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True}},
        "ort_zero": {"backend": "torch"},
    }
    model = model_of(name)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    ort_zero_checkpoint.load(engine, checkpoint)
    engine.save_checkpoint(saves, tag="loaded")
    losses = []
    for step in range(2, 5):
        loss = loss_of(engine, dist.get_rank(), step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    dist.destroy_process_group()
    return losses, {"lr": engine.get_lr(), "steps": engine.global_steps - 3}
