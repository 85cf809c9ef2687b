"""Finds what a manifest of our format lacks or contradicts in itself, without reading any other file. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.records import MASTER, MOST_NAMED, Optimizer, Source
from ort_zero.utils.text import shortened

if TYPE_CHECKING:
    from ort_zero.checkpoint.format.manifest_schema import Manifest


_FINITE = frozenset(("lr", "initial_lr", "eps", "weight_decay", "betas", "momentum", "dampening", "alpha"))
"""Hyper-parameters that are finite in every optimizer."""


def incomplete(manifest: Manifest, source: Source) -> Iterator[str]:
    """Yield one sentence for each thing that a complete checkpoint has and this one has not.

    Args:
        manifest: the manifest.
        source: the same as records.
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
            yield f"{alias} is tied to {name} and listed itself"
    lost = [name for name in source.frozen if name not in stored]
    if lost:
        yield f"it lacks the frozen parameters {shortened(sorted(lost), MOST_NAMED)}"
    if source.optimizer is not None:
        yield from _incomplete_optimizer(source, source.optimizer)


def _is_json(text: str) -> bool:
    try:
        json_text.loads(text)
    except ValueError:
        return False
    return True


def _may_lack_states(source: Source, optimizer: Optimizer, name: str) -> bool:
    """Return True for a parameter that had no gradient so far, if the optimizer keeps each parameter by itself."""
    known = any(name in by_name for by_name in optimizer.scalars.values())
    return not known and (source.zero_stage == 0 or bool(optimizer.scalars))


def _incomplete_optimizer(source: Source, optimizer: Optimizer) -> Iterator[str]:
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
        own = {source.aliases.get(name, name) for name in group.names}
        lost = sorted(own - masters.keys())
        if lost:
            yield f"parameter group {index} has {shortened(lost, MOST_NAMED)}, which have no master weights"
        wanted = set().union(*(states.get(name, set()) for name in own))
        stepped = {name for name in own if states.get(name) or not _may_lack_states(source, optimizer, name)}
        short = sorted(name for name in stepped & masters.keys() if states.get(name, set()) != wanted)
        if short:
            yield f"parameter group {index} lacks optimizer states of {shortened(short, MOST_NAMED)}"
        for key in _FINITE & group.options.keys():
            value = group.options[key]
            numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, float)]
            if not all(map(math.isfinite, numbers)):
                yield f"{key} of parameter group {index} cannot be {value}"
        grouped |= own
    alone = sorted(masters.keys() - grouped)
    if alone and optimizer.groups:
        yield f"no parameter group has {shortened(alone, MOST_NAMED)}"
    for key, by_name in optimizer.scalars.items():
        odd = [name for name, value in by_name.items() if not math.isfinite(value) or abs(value) >= 1 << 53]
        if odd:
            yield f"{key} of {shortened(sorted(odd), MOST_NAMED)} is no number that an optimizer can have"
