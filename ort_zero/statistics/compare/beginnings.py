"""List what two runs have otherwise to begin with: weights, batches, random states, settings, versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ort_zero.statistics.files import Run
from ort_zero.statistics.records import Phase, Table, decode_facts
from ort_zero.utils.text import shortened

SETTINGS = {
    "ds_config": "the DeepSpeed config",
    "model_config": "the model's config",
    "torch_settings": "torch's settings",
    "environment": "environment variables",
    "versions": "versions",
}
"""Settings in the manifest, the likelier cause of a difference first."""
_OF_DATA = ("python", "numpy")
"""Random generators that data is drawn from, and models are not: their states explain other batches alone."""
_OF_THE_RUN = ("ort_zero.statistics.", "_")
"""Beginnings of keys that tell runs apart and change no number: folders, names of files."""


def beginnings_of(a: Run, b: Run, first: tuple[Table, Table], other_batches: int | None) -> list[str]:
    """Return what two runs have otherwise to begin with, the likeliest cause of differing values first.

    `first` has the first step of both runs, `other_batches` is the first step with other batches.
    """
    one, two = (decode_facts(table.facts) for table in first)
    kinds, others = map(_kinds_of_parameters, first)
    comparable = {name for name, kind in kinds.items() if others.get(name) == kind}
    comparable -= {*one.frozen} ^ {*two.frozen}  # of a frozen one a sample is digested
    digests = two.parameters
    weights = [name for name, digest in one.parameters.items() if digests.get(name, digest) != digest]
    weights = [name for name in weights if name in comparable]
    listed = [f"other initial weights: {shortened(weights)}"] if weights else []
    if other_batches is not None:
        listed.append(f"other batches from step {other_batches} on")
    states = [name for name, state in one.random.items() if two.random.get(name, state) != state]
    states = [name for name in states if other_batches is not None or name not in _OF_DATA]
    if states:
        listed.append(f"other random states: {', '.join(states)}")
    if one.training != two.training:
        listed.append("other modes: one run trains, one evaluates")
    for key, what in SETTINGS.items():
        values = list(_differences(a.manifest.get(key) or {}, b.manifest.get(key) or {}))
        listed += [f"other values in {what}: {shortened(values, limit=6)}"] if values else []
    return listed


def _kinds_of_parameters(table: Table) -> dict[str, str]:
    """Return the dtypes of whole parameters: parts, and values of other dtypes, have other digests."""
    rows = np.flatnonzero((table.phase == Phase.PARAMETER) & ~table.partitioned).tolist()
    return {table.full_name(row): table.dtype[row] for row in rows}


def other_batch(a: Table, b: Table) -> bool:
    """Return True if a tensor that enters the model has other values in two tables of a step."""
    inputs, others = _inputs(a), _inputs(b)
    return any(
        slot in others and others[slot][:1] == value[:1] and others[slot] != value for slot, value in inputs.items()
    )


def _inputs(table: Table) -> dict[str, tuple]:
    return {
        table.slot[row]: (table.dtype[row], table.shape[row], table.sketch[row].tobytes()) for row in table.batch_rows()
    }


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key in sorted({*a, *b}):
        one, two, path = a.get(key), b.get(key), f"{above}{key}"
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from _differences(one, two, f"{path}.")
        elif one != two and not path.startswith(_OF_THE_RUN):
            yield f"{path} {_shown(one)} and {_shown(two)}"


def _shown(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
