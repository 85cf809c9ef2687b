"""Check that a manifest of ort_zero's format is complete and consistent, without reading any other file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.records import MASTER, MAX_NAMED, Optimizer, Source
from ort_zero.utils.text import shortened

if TYPE_CHECKING:
    from ort_zero.checkpoint.format.manifest_schema import Manifest


_FINITE = frozenset(("lr", "initial_lr", "eps", "weight_decay", "betas", "momentum", "dampening", "alpha"))
"""Hyper-parameters whose numbers are finite in every optimizer."""


def problems_of_manifest(manifest: Manifest, source: Source) -> Iterator[str]:
    """Yield one sentence per entry that the manifest lacks or that contradicts another entry.

    Args:
        manifest: the manifest.
        source: the records of the manifest.
    """
    names = set(source.files)
    for rank in range(min(manifest.world_size, len(names) + 1)):
        start = f"rank_{rank:05d}_extra"
        if not any(name.startswith(start) and name.endswith(".json") for name in names):
            yield f"it lists no extra file of rank {rank}, of {manifest.world_size} ranks"
            break
    for name, text in manifest.config.items():
        if name.endswith(".json") and not _is_json(text):
            yield f"its {name} is no JSON"
    stored = source.weights()
    if not stored:
        yield "it lists no weights"
    for alias, name in source.aliases.items():
        if name not in stored:
            yield f"{alias} is tied to {name}, which it does not list"
        elif alias in stored:
            yield f"{alias} is tied to {name} and has a tensor of its own"
    lost = [name for name in source.frozen if name not in stored]
    if lost:
        yield f"it lacks the frozen parameters {shortened(sorted(lost), MAX_NAMED)}"
    if source.optimizer is not None:
        yield from _problems_of_optimizer(source, source.optimizer)


def _is_json(text: str) -> bool:
    try:
        json_text.loads(text)
    except ValueError:
        return False
    return True


def _may_lack_states(source: Source, optimizer: Optimizer, name: str) -> bool:
    """Return True if a parameter may have no optimizer states, since it never had a gradient."""
    has_number = any(name in by_name for by_name in optimizer.scalars.values())
    return not has_number and (source.zero_stage == 0 or bool(optimizer.scalars))


def _problems_of_optimizer(source: Source, optimizer: Optimizer) -> Iterator[str]:
    masters = source.by_name(MASTER)
    states: dict[str, set[str]] = {}
    for tensor in source.tensors:
        if tensor.is_optimizer_state:
            states.setdefault(tensor.name, set()).add(tensor.kind)
            if tensor.name not in masters:
                yield f"it lists {tensor.kind} of {tensor.name}, and no master weights of that name"
            elif tensor.shape != masters[tensor.name].shape:
                shapes = f"{list(tensor.shape)}, the master weights {list(masters[tensor.name].shape)}"
                yield f"{tensor.kind} of {tensor.name} has the shape {shapes}"
    grouped: set[str] = set()
    for index, group in enumerate(optimizer.groups):
        members = {source.aliases.get(name, name) for name in group.names}
        lost = sorted(members - masters.keys())
        if lost:
            yield f"parameter group {index} has {shortened(lost, MAX_NAMED)}, which have no master weights"
        expected = set().union(*(states.get(name, set()) for name in members))
        stepped = {name for name in members if states.get(name) or not _may_lack_states(source, optimizer, name)}
        short = sorted(name for name in stepped & masters.keys() if states.get(name, set()) != expected)
        if short:
            yield f"parameter group {index} lacks optimizer states of {shortened(short, MAX_NAMED)}"
        for key in _FINITE & group.options.keys():
            value = group.options[key]
            numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, float)]
            if not all(map(math.isfinite, numbers)):
                yield f"{key} of parameter group {index} cannot be {value}"
        grouped |= members
    alone = sorted(masters.keys() - grouped)
    if alone and optimizer.groups:
        yield f"no parameter group has {shortened(alone, MAX_NAMED)}"
    for key, by_name in optimizer.scalars.items():
        odd = [name for name, value in by_name.items() if not math.isfinite(value) or abs(value) >= 1 << 53]
        if odd:
            yield f"{key} of {shortened(sorted(odd), MAX_NAMED)} is no number that an optimizer can have"
