"""What ranks do in the checkpoint tests: train a small model with all that has gone wrong somewhere, save, load."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch


class Odd(torch.nn.Module):
    """Odd sizes, a tied weight, a frozen layer, a float and an integer buffer, one that is not persistent."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(13, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.hidden = torch.nn.Linear(7, 5)
        self.frozen = torch.nn.Linear(5, 7)
        self.head = torch.nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("calls", torch.tensor(0, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids))
        hidden = torch.tanh(self.frozen(torch.tanh(self.hidden(hidden)))) * self.gain * self.scale.mean()
        return torch.nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten())


def engine_of(
    stage: int,
    precision: str = "fp32",
    seed: int = 0,
    checkpoint: dict | None = None,
    accumulate: str | None = None,
    **zero: Any,
) -> Any:
    """Return an engine around :class:`Odd` with two parameter groups, executed by PyTorch."""
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    model = Odd(seed)
    decay = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() <= 1]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage, **zero},
        "ort_zero": {"ortmodule": {"enabled": False}, "checkpoint": checkpoint or {}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if accumulate is not None:
        config["data_types"] = {"grad_accum_dtype": accumulate}
    if zero.pop("offload", False):
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False
        del config["zero_optimization"]["offload"]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def train(engine: Any, steps: range) -> list[float]:
    """Return the loss of each step; every rank sees the same batch, so that the world size changes nothing."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(13, (4, 6), generator=generator)
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        engine.module.calls += 1
        losses.append(loss.item())
    return losses


def save_remote(url: str, plans: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Do as :func:`save_all` does, without DeepSpeed's own files, which go to local folders only."""
    return save_all(url, plans, compare=False)


def save_all(folder: str, plans: list[dict[str, Any]], compare: bool = True) -> dict[str, list[float]]:
    """Train each plan 4 steps, save under its name, train 3 more; return the losses of these.

    Args:
        compare: save in DeepSpeed's own format beside it too.
    """
    after = {}
    for plan in plans:
        engine = engine_of(**{k: v for k, v in plan.items() if k != "name"})
        train(engine, range(4))
        client = {"epoch": 3, "rng": torch.arange(3), "state": digest(engine)}
        engine.save_checkpoint(folder, tag=plan["name"], client_state=client)
        if compare and plan["stage"]:
            type(engine).save_checkpoint.__wrapped__(engine, f"{folder}/deepspeed/{plan['name']}", tag="own")
        after[plan["name"]] = train(engine, range(4, 7))
        engine.destroy()
    return after


def save_without_onnxruntime(folder: str) -> list[str]:
    """Save and load where onnxruntime cannot be imported; return the modules of it that are loaded nevertheless."""
    import sys

    sys.modules["onnxruntime"] = None  # an import of it raises ImportError
    engine = engine_of(2)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    before = digest(engine)
    train(engine, range(2, 3))
    engine.load_checkpoint(folder)
    assert digest(engine) == before
    return [name for name, module in sys.modules.items() if name.startswith("onnxruntime") and module is not None]


def load_all(folder: str, plans: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Load each plan's ``tag`` into a fresh engine with other weights, train 3 steps; return the losses."""
    after = {}
    for plan in plans:
        engine = engine_of(seed=1, **{k: v for k, v in plan.items() if k not in ("name", "tag", "same")})
        where, client = engine.load_checkpoint(folder, tag=plan["tag"])
        assert where.endswith(plan["tag"]) and client["epoch"] == 3 and client["rng"].tolist() == [0, 1, 2], client
        assert engine.global_steps == 4 and int(engine.module.calls) == 4
        assert engine.lr_scheduler.last_batch_iteration == 3
        if plan.get("same"):
            assert digest(engine) == client["state"], plan["name"]
        after[plan["name"]] = train(engine, range(4, 7))
        engine.destroy()
    return after


def digest(engine: Any) -> str:
    """Return a digest of every bit that this rank trains with: masters, moments, weights or their partitions."""
    from ort_zero.compat.deepspeed_state import EngineState

    state = EngineState(engine)
    parts = [valid(parameter) for parameter in state.parameters.values()]
    for flat in state.flats():
        tensors = [flat.master, *(v for v in state.state_of(flat).values() if v.numel() == flat.master.numel())]
        parts += [t.reshape(-1).narrow(0, s.offset, s.length) for t in tensors for s in flat.spans]
    joined = b"".join(p.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in parts)
    return hashlib.sha1(joined).hexdigest()


def valid(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the weight, or this rank's partition of it without the padding at its end."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    partition = parameter.ds_tensor.detach().view(-1)
    start = partition.numel() * torch.distributed.get_rank()
    return partition[: max(0, min(partition.numel(), parameter.ds_numel - start))]


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the masters of this rank, by name and first element."""
    from ort_zero.compat.deepspeed_state import EngineState

    return {
        f"{span.name}@{span.start}": flat.master.narrow(0, span.offset, span.length).clone()
        for flat in EngineState(engine).flats()
        for span in flat.spans
    }


def cross_precision(folder: str, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    """Save a bf16 and an fp32 engine, load each into one of the other precision; return all four's masters."""
    found = {}
    for precision in ("bf16", "fp32"):
        engine = engine_of(stage, precision)
        train(engine, range(4))
        engine.save_checkpoint(folder, tag=f"{precision}_{stage}")
        found[precision] = masters_of(engine)
        engine.destroy()
    for precision, other in (("bf16", "fp32"), ("fp32", "bf16")):
        engine = engine_of(stage, other, seed=1)
        engine.load_checkpoint(folder, tag=f"{precision}_{stage}")
        found[f"{precision} in {other}"] = masters_of(engine)
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        assert all(w.dtype == (torch.float32 if other == "fp32" else torch.bfloat16) for w in weights.values())
        train(engine, range(4, 6))
        engine.destroy()
    return found


def manifest_of(folder: str, tag: str) -> dict[str, Any]:
    """Return the manifest as JSON."""
    with open(f"{folder}/{tag}/manifest.json") as file:
        return json.load(file)
