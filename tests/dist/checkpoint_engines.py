"""Engines for the tests of checkpoints: a small model with all that has gone wrong somewhere, and how to compare it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ort_zero.compat.deepspeed_state import EngineState
from ort_zero.utils.atomic_write import PARTIAL


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
        "ort_zero": {"backend": "torch", "checkpoint": checkpoint or {}},
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


def made(
    stage: int = 1,
    optimizer: Callable[..., Any] | str = torch.optim.AdamW,
    scheduler: Callable[[Any], Any] | None = None,
    model: torch.nn.Module | None = None,
    accumulate: int = 1,
    sharded: bool = True,
    groups: Callable[[Any], list] | None = None,
    section: bool = True,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return an engine around :class:`Odd` with an optimizer of a kind, or made by DeepSpeed; `more` is config."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = model or Odd()
    trained = groups(model) if groups else [p for p in model.parameters() if p.requires_grad]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **(more or {}),
    }
    if section:
        config["ort_zero"] = {"backend": "torch", "checkpoint": {"sharded": sharded}}
    if isinstance(optimizer, str):
        config["optimizer"] = {"type": optimizer, "params": {"lr": 0.01, **options}}
        config["zero_optimization"]["reduce_scatter"] = False  # as DeepSpeed's Muon wants it
        return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]
    made_here = optimizer(trained, **{"lr": 0.01, **options})
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=made_here, lr_scheduler=scheduler(made_here) if scheduler else None, config=config
    )
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


@contextlib.contextmanager
def whole_parameters_untouched(engine: Any) -> Iterator[None]:
    """Fail if parameters of ZeRO-3 that are whole are dropped in the block: to read partitions nobody needs that."""
    if engine.zero_optimization_stage() != 3:
        yield
        return

    def drop() -> None:
        raise AssertionError("parameters are dropped, to be gathered again")

    engine.optimizer.checkpoint_event_prologue = drop
    yield
    del engine.optimizer.checkpoint_event_prologue


def valid(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the weight, or this rank's partition of it without the padding at its end."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach()
    partition = parameter.ds_tensor.detach().view(-1)
    start = partition.numel() * torch.distributed.get_rank()
    return partition[: max(0, min(partition.numel(), parameter.ds_numel - start))]


def values_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of what this rank trains with: parameters, masters, moments, buffers; not padding: it is noise."""
    state = EngineState(engine)
    found = {f"parameter {name}": valid(parameter).clone() for name, parameter in state.parameters.items()}
    for i, flat in enumerate(state.flats()):
        for key, value in {"master": flat.master, **state.state_of(flat)}.items():
            if torch.is_tensor(value) and value.numel() == flat.master.numel():
                for span in flat.places:
                    found[f"{key} of {span.name}"] = value.view(-1).narrow(0, span.offset, span.length).clone()
            elif torch.is_tensor(value):
                found[f"{key} {i}"] = value.clone()
    found |= {f"buffer {name}": buffer.clone() for name, buffer in state.buffers()}
    return found


def differences(engine: Any, before: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what is not bitwise what it was."""
    now = values_of(engine)
    return [n for n in {*before, *now} if n not in before or n not in now or not torch.equal(before[n], now[n])]


def listen_to_interrupts() -> None:
    """Let SIGINT raise KeyboardInterrupt, also where a shell started the tests in the background and has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """Run `action`; return the type and text of its error (None without one), and the seconds it took."""
    started = time.monotonic()
    kind, text = None, ""
    try:
        action()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    return {"type": kind, "text": text, "seconds": time.monotonic() - started}


def partials(folder: str) -> list[str]:
    """Return the incomplete files anywhere in `folder`."""
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(PARTIAL)]
