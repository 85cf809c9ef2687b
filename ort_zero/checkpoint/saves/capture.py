"""Collect the part of one rank in a checkpoint: ranges of tensors, and values that are no tensors of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ort_zero import log
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.format import values
from ort_zero.checkpoint.records import MASTER, WEIGHT, Optimizer, ParamGroup, buffer_kind
from ort_zero.checkpoint.saves.shard_writer import ShardEntry
from ort_zero.compat.deepspeed_state import EngineState, Flat
from ort_zero.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of one rank in a checkpoint. Its tensors are the live tensors or copies."""

    weights: list[ShardEntry]
    """Masters, parameters without master, buffers."""
    moments: list[ShardEntry]
    """States of the optimizer with one value per element."""
    extra: dict[str, Any]
    """JSON values: counters, scheduler, loss scaler, the user's state."""
    extra_tensors: list[torch.Tensor]
    scalars: dict[str, dict[str, float]]
    """Numbers of this rank's parameters, such as ``step``: parameter name to number, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Facts about the model that are the same on every rank."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of all parameters and buffers by name."""
    dtype: str
    aliases: dict[str, str]
    frozen: list[str]
    left_out: list[str]
    """Names of the frozen parameters that are not stored."""
    optimizer_class: str | None
    groups: list[ParamGroup]
    step: int
    zero_stage: int
    config: dict[str, str] = field(default_factory=dict)

    def optimizer(self, scalars: Mapping[str, Mapping[str, float]]) -> Optimizer | None:
        """Return the optimizer's record with the numbers of all ranks."""
        if self.optimizer_class is None:
            return None
        return Optimizer(class_name=self.optimizer_class, groups=tuple(self.groups), scalars=scalars)


def describe(state: EngineState, exclude_frozen: bool) -> Model:
    """Return the facts about the model that the manifest stores."""
    optimized = state.optimized()
    frozen = [name for name in state.parameters if name not in optimized]
    kept = [name for name in state.parameters if name in optimized or not exclude_frozen]
    shapes = {name: state.shape(name) for name in kept}
    shapes |= {name: tuple(buffer.shape) for name, buffer in state.buffers()}
    odd = next((name for name in shapes if not name.isprintable()), None)
    if odd is not None:
        raise CheckpointError(
            f"{odd!r} holds characters that are not printable, which no name in a sharded checkpoint may have; set "
            '"checkpoint": {"sharded": false}'
        )
    base = state.base_optimizer()
    options = [_stored_options(index, group) for index, group in enumerate(state.group_options())]
    return Model(
        shapes=shapes,
        dtype=dtypes.code_of(state.dtype()),
        aliases={alias: name for alias, name in state.aliases().items() if name in shapes},
        frozen=[name for name in frozen if name in shapes],
        left_out=[name for name in frozen if name not in shapes],
        optimizer_class=None if base is None else type(base).__name__,
        groups=[ParamGroup(names=tuple(n), options=o) for n, o in zip(state.group_names(), options)],
        step=state.counters()["global_steps"],
        zero_stage=state.stage,
        config=_model_config(state.module),
    )


def shard_of(
    state: EngineState, rank: int, size: int, client_state: Mapping[str, Any], exclude_frozen: bool, buffers: set[str]
) -> Shard:
    """Return the part that `rank` of `size` ranks writes; its tensors are views of the live tensors.

    Rank 0 writes all buffers, another rank those in `buffers`.

    Raises:
        CheckpointError: an optimizer state belongs to no range of a parameter, or a value cannot be stored.
    """
    weights: list[ShardEntry] = []
    moments: list[ShardEntry] = []
    scalars: dict[str, dict[str, float]] = {}
    for flat in state.flats():
        if flat.spans:
            _add_flat(flat, state, weights, moments, scalars)
    if not exclude_frozen:
        weights += _without_master(state, rank, size)
    weights += [
        ShardEntry(name=name, kind=buffer_kind(rank), start=0, tensor=buffer.detach().contiguous().view(-1))
        for name, buffer in state.buffers()
        if not rank or name in buffers
    ]
    tensors: list[torch.Tensor] = []
    extra = {key: values.encode(value, key, tensors) for key, value in _extra(state, client_state).items()}
    return Shard(weights=weights, moments=moments, extra=extra, extra_tensors=tensors, scalars=scalars)


def _add_flat(
    flat: Flat, state: EngineState, weights: list[ShardEntry], moments: list[ShardEntry], scalars: dict[str, dict]
) -> None:
    elementwise = state.elementwise(flat)
    for span in flat.spans:
        part = flat.master.narrow(0, span.offset, span.length)
        weights.append(ShardEntry(name=span.name, kind=MASTER, start=span.start, tensor=part))
    for key, value in state.existing_state_of(flat).items():
        if key in elementwise:
            whole = value.detach().reshape(-1)
            moments += [
                ShardEntry(name=s.name, kind=key, start=s.start, tensor=whole.narrow(0, s.offset, s.length))
                for s in flat.spans
            ]
        elif isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1):
            scalars.setdefault(key, {}).update({s.name: float(value) for s in flat.spans})
        else:
            shape = list(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise CheckpointError(
                f"optimizer state {key!r} of {flat.spans[0].name} ({shape}) is neither a number nor one value per "
                'element, so it cannot be cut by parameter; set "checkpoint": {"sharded": false}'
            )


def _without_master(state: EngineState, rank: int, size: int) -> list[ShardEntry]:
    """Return the parameters without master: this rank's partitions; of whole parameters every `size`-th."""
    entries = []
    for index, part in enumerate(state.local_parts()):
        if not part.length or (not state.partitioned and index % size != rank):
            continue
        tensor = part.tensor.detach().contiguous().view(-1).narrow(0, 0, part.length)
        entries.append(ShardEntry(name=part.name, kind=WEIGHT, start=part.start, tensor=tensor))
    return entries


def _extra(state: EngineState, client_state: Mapping[str, Any]) -> dict[str, Any]:
    engine = state.engine
    scaler = state.loss_scaler()
    scheduler = engine.lr_scheduler
    return {
        "counters": state.counters(),
        "client_state": dict(client_state),
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "loss_scaler": scaler and {"class": type(scaler).__name__, "state": _numbers(scaler)},
        "extra_state": {prefix: module.get_extra_state() for prefix, module in state.extra_states()},
        **{key: part.state_dict() for key, part in _parts_with_state(state).items() if part is not None},
        **({"lr_scheduler_class": type(scheduler).__name__} if hasattr(scheduler, "state_dict") else {}),
    }


def _parts_with_state(state: EngineState) -> dict[str, Any]:
    """Return the engine's parts besides the scheduler that keep a state; None for a part that the engine lacks."""
    return {"data_sampler": state.data_sampler(), "random_ltd": state.random_ltd_scheduler()}


def _numbers(scaler: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(scaler).items() if v is None or isinstance(v, (bool, int, float))}


def _stored_options(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a parameter group as JSON values; warn of each that cannot be stored."""
    options = {}
    for key, value in group.items():
        try:
            options[key] = _plain(value, str(key))
        except CheckpointError as error:
            log.get_logger().warning(
                "%r of the optimizer's parameter group %d is not in the checkpoint, and stays as configured when the "
                "checkpoint is loaded: %s",
                key,
                index,
                error,
            )
    return options


def _plain(value: Any, key: str) -> Any:
    """Return the hyper-parameter `key` as a JSON value.

    Raises:
        CheckpointError: the value, or a part of it, has a type that no checkpoint holds.
    """
    if torch.is_tensor(value):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item, key) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return values.encode_in_json(value, key)


def _model_config(module: torch.nn.Module) -> dict[str, str]:
    """Return the files that ``from_pretrained`` needs beside the weights: content by name, empty for other models."""
    files = {}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        to_json = getattr(getattr(module, attribute, None), "to_json_string", None)
        if to_json is not None:
            table = json.loads(to_json())
            if attribute == "config":
                table.setdefault("architectures", None)
                table["architectures"] = table["architectures"] or [type(module).__name__]
            files[name] = json.dumps(table, indent=2) + "\n"
    to_json = getattr(module, "to_json_string", None)
    if "config.json" not in files and callable(to_json) and getattr(module, "config_name", None) == "config.json":
        files["config.json"] = str(to_json())  # diffusers, whose `config` is a table without this method
    return files | _adapter_config(module)


def _adapter_config(module: torch.nn.Module) -> dict[str, str]:
    """Return PEFT's configuration of the trained adapter, if the model has one and JSON can store it."""
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return {}
    active = getattr(module, "active_adapter", None)
    chosen = configs.get(active) if isinstance(active, str) else None
    to_dict = getattr(chosen or next(iter(configs.values())), "to_dict", None)
    if to_dict is None:
        return {}
    table = {key: sorted(value) if isinstance(value, set) else value for key, value in to_dict().items()}
    try:
        return {"adapter_config.json": json.dumps({**table, "inference_mode": True}, indent=2, sort_keys=True) + "\n"}
    except TypeError:  # JSON cannot store it: the user has to keep it beside the checkpoint
        return {}
