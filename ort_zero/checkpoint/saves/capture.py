"""Collect the part of one rank in a checkpoint: ranges of tensors, and values that are no tensors of the model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from ort_zero import log
from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.format import values
from ort_zero.checkpoint.records import (
    MASTER,
    MAX_NAMED,
    MODULE,
    WEIGHT,
    Optimizer,
    ParamGroup,
    Shape,
    Source,
    buffer_kind,
)
from ort_zero.checkpoint.saves.checkpoint_writer import Shard, ShardEntry
from ort_zero.compat.deepspeed_state import EngineState, Flat
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.text import shortened


def describe(state: EngineState, exclude_frozen: bool) -> tuple[Source, dict[str, Shape]]:
    """Return what the manifest says of the model, still without tag and files, and the shapes of all its tensors."""
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
    groups = tuple(ParamGroup(names=tuple(n), options=o) for n, o in zip(state.group_names(), options))
    about = Source(
        format="ort_zero",
        root="",
        step=state.counters()["global_steps"],
        zero_stage=state.stage,
        aliases={alias: name for alias, name in state.aliases().items() if name in shapes},
        frozen=frozenset(name for name in frozen if name in shapes),
        optimizer=base and Optimizer(class_name=type(base).__name__, groups=groups, scalars={}),
        config=_model_config(state.module),
        dtype=dtypes.code_of(state.dtype()),
        left_out=frozenset(name for name in frozen if name not in shapes),
    )
    return about, shapes


def shard_of(
    state: EngineState, rank: int, size: int, client_state: Mapping[str, Any], exclude_frozen: bool, buffers: set[str]
) -> Shard:
    """Return the part that `rank` of `size` ranks writes; its tensors are views of the live tensors.

    Rank 0 writes all buffers, another rank those in `buffers`.
    """
    weights: list[ShardEntry] = []
    moments: list[ShardEntry] = []
    scalars: dict[str, dict[str, float]] = {}
    for flat in state.flats():
        if flat.places:
            weights += _entries(flat, MASTER, flat.master)
            _add_optimizer_state(state, flat, moments, scalars)
    for index, part in enumerate(() if exclude_frozen else state.local_parts()):
        # this rank's partition, or of the parameters that are whole on each rank every `size`-th
        if part.length and (state.partitioned or index % size == rank):
            tensor = part.tensor.detach().contiguous().view(-1).narrow(0, 0, part.length)
            weights.append(ShardEntry(name=part.name, kind=WEIGHT, start=part.start, tensor=tensor))
    weights += [
        ShardEntry(name=name, kind=buffer_kind(rank), start=0, tensor=buffer.detach().contiguous().view(-1))
        for name, buffer in state.buffers()
        if not rank or name in buffers
    ]
    tensors: list[torch.Tensor] = []
    extra = {key: values.encode(value, key, tensors) for key, value in _extra(state, client_state).items()}
    return Shard(weights=weights, moments=moments, extra=extra, extra_tensors=tensors, scalars=scalars)


def _entries(flat: Flat, kind: str, whole: torch.Tensor) -> list[ShardEntry]:
    return [
        ShardEntry(name=place.name, kind=kind, start=place.start, tensor=whole.narrow(0, place.offset, place.length))
        for place in flat.places
    ]


def _add_optimizer_state(
    state: EngineState, flat: Flat, moments: list[ShardEntry], scalars: dict[str, dict[str, float]]
) -> None:
    elementwise = state.elementwise(flat)
    for key, value in state.existing_state_of(flat).items():
        if key in elementwise:
            moments += _entries(flat, key, value.detach().reshape(-1))
        elif isinstance(value, (int, float)) or (torch.is_tensor(value) and value.numel() == 1):
            scalars.setdefault(key, {}).update({place.name: float(value) for place in flat.places})
        else:
            shape = list(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise CheckpointError(
                f"optimizer state {key!r} of {flat.places[0].name} ({shape}) is neither a number nor one value per "
                'element, so it cannot be cut by parameter; set "checkpoint": {"sharded": false}'
            )


def _extra(state: EngineState, client_state: Mapping[str, Any]) -> dict[str, Any]:
    scaler, scheduler = state.loss_scaler(), state.engine.lr_scheduler
    extra: dict[str, Any] = {
        "counters": state.counters(),
        "client_state": dict(client_state),
        "lr_scheduler": None,
        "loss_scaler": None,
        "extra_state": {prefix: module.get_extra_state() for prefix, module in state.extra_states()},
    }
    if hasattr(scheduler, "state_dict"):
        extra |= {"lr_scheduler": scheduler.state_dict(), "lr_scheduler_class": type(scheduler).__name__}
    if scaler:
        numbers = {k: v for k, v in vars(scaler).items() if v is None or isinstance(v, (bool, int, float))}
        extra["loss_scaler"] = {"class": type(scaler).__name__, "state": numbers}
    parts = {"data_sampler": state.data_sampler(), "random_ltd": state.random_ltd_scheduler()}
    return extra | {key: part.state_dict() for key, part in parts.items() if part is not None}


def _stored_options(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a parameter group as JSON values; warn of each that cannot be stored."""
    options = {}
    for key, value in group.items():
        try:
            options[key] = _plain(value, str(key))
        except CheckpointError as error:
            text = "%r of the optimizer's parameter group %d is not stored; a load leaves it as configured: %s"
            log.get_logger().warning(text, key, index, error)
    return options


def _plain(value: Any, key: str) -> Any:
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


# ---- values that no master tells ------------------------------------------------------------------------------------

Digests = Mapping[str, tuple[str, str]]
"""Dtype and shape, and the checksum of the values, of tensors by name."""
_STEP = 1 << 17
"""Number of elements that are cast at a time: they stay in the processor's cache."""


MasterDigests = Sequence[tuple[str, int, int, str]]
"""Name, first element, number of elements and checksum of masters, cast to the dtype of the module's weights."""


def master_digests(weights: Mapping[str, torch.Tensor], entries: Iterable[ShardEntry]) -> MasterDigests:
    """Return the digests of the masters among `entries`, cast to the dtypes of the module's `weights`."""
    return [
        (entry.name, entry.start, entry.tensor.numel(), _cast_digest(entry.tensor, weights[entry.name].dtype))
        for entry in entries
        if entry.kind == MASTER and entry.name in weights
    ]


def weights_unlike_masters(
    weights: Mapping[str, torch.Tensor], masters: MasterDigests, ranks: RankGroup
) -> list[ShardEntry]:
    """Return on rank 0 its weights of the module that are not the masters, cast, with a warning. All ranks must call.

    As in DeepSpeed, the module of rank 0 is the one that is saved.
    """
    everyone = ranks.gather(masters) if weights else []
    differing: set[str] = set()
    with ranks.raise_on_all("comparing the module's weights"):
        for name, start, length, digest in itertools.chain(*everyone) if ranks.rank == 0 else ():
            live = weights[name].narrow(0, start, length)
            if name not in differing and _cast_digest(live, live.dtype) != digest:
                differing.add(name)
    if differing:
        log.get_logger().warning(
            "the module's weights of %s are not the masters, cast: the checkpoint stores both",
            shortened([name for name in weights if name in differing], MAX_NAMED),
        )
    return [ShardEntry(name=n, kind=MODULE, start=0, tensor=w) for n, w in weights.items() if n in differing]


def _cast_digest(values: torch.Tensor, dtype: torch.dtype) -> str:
    """Return the checksum of flat values in another dtype; any NaN counts as the same.

    DeepSpeed's vector code writes other NaN than its scalar code.
    """
    digest = xxhash.xxh3_64()
    for part in values.detach().split(_STEP):
        cast = part.to(dtype).cpu()
        missing = cast.isnan()
        cast = cast.masked_fill(missing, torch.nan) if missing.any() else cast
        digest.update(cast.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, str]]:
    found = {}
    for name, tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).cpu().view(torch.uint8).numpy().data
        found[name] = (f"{tensor.dtype} {list(tensor.shape)}", xxhash.xxh3_64_hexdigest(raw))
    return found


def buffers_unlike_first(everyone: list[Digests], rank: int) -> set[str]:
    """Return the names of the buffers of `rank` that differ from rank 0's; rank 0 warns of all ranks' buffers."""
    first, mine = everyone[0], everyone[rank]
    differing = [name for name in first if any(other.get(name, first[name]) != first[name] for other in everyone)]
    if rank == 0 and differing:
        log.get_logger().warning(
            "the buffers %s differ between the ranks: each comes back to its rank on as many ranks; on another number "
            "all get rank 0's",
            shortened(differing, MAX_NAMED),
        )
    return {name for name in first.keys() & mine if mine[name] != first[name] and mine[name][0] == first[name][0]}
