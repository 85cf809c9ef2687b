"""Join the optimizers of several model ranks into one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from ort_zero.checkpoint.records import Optimizer, ParamGroup


def joined_optimizers(optimizers: Sequence[Optimizer | None]) -> Optimizer | None:
    """Return one optimizer, with the ranks' groups of equal hyper-parameters joined; None if a rank has none."""
    present = [optimizer for optimizer in optimizers if optimizer is not None]
    if not present or len(present) != len(optimizers):
        return None
    groups: dict[str, ParamGroup] = {}
    scalars: dict[str, dict[str, float]] = {}
    named: set[str] = set()
    for optimizer in present:
        seen: dict[str, int] = {}
        for group in optimizer.groups:
            options = json.dumps(group.options, sort_keys=True)
            seen[options] = seen.get(options, -1) + 1
            key = f"{seen[options]} {options}"  # equal groups of one rank stay separate
            names = tuple(name for name in group.names if name not in named)
            named.update(names)
            before = groups.get(key)
            groups[key] = replace(group, names=(*before.names, *names) if before else names)
        for kind, values in optimizer.scalars.items():
            scalars.setdefault(kind, {}).update({n: v for n, v in values.items() if n not in scalars.get(kind, {})})
    return Optimizer(class_name=present[0].class_name, groups=tuple(groups.values()), scalars=scalars)
