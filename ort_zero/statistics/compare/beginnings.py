"""List what two runs have otherwise to begin with: weights, batches, random states, settings, versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ort_zero.statistics.facts import decode
from ort_zero.statistics.records import Phase, Table
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


class Beginnings:
    """What two runs have otherwise to begin with, gathered from the tables of one rank."""

    def __init__(self) -> None:
        self._weights: list[str] = []
        self._states: list[str] = []
        """Names of the random generators whose states differ."""
        self._modes: list[str] = []
        self._batches: list[str] = []
        self._began = False

    def look(self, a: Table, b: Table) -> None:
        """Look at one step of both runs; steps come in ascending order."""
        if not self._began and a.facts and b.facts:
            self._compare_facts(a, b)
        self._began = True
        if not self._batches and _other_batch(a, b):
            self._batches = [f"other batches from step {a.step} on"]

    def _compare_facts(self, a: Table, b: Table) -> None:
        one, two = decode(a.facts), decode(b.facts)
        kinds = _kinds_of_parameters(b)
        comparable = {name for name, kind in _kinds_of_parameters(a).items() if kinds.get(name) == kind}
        comparable -= {*one.frozen} ^ {*two.frozen}  # of a frozen one a sample is digested
        other = [
            name
            for name, digest in one.parameters.items()
            if name in comparable and name in two.parameters and two.parameters[name] != digest
        ]
        self._weights = [f"other initial weights: {shortened(other)}"] if other else []
        self._states = [name for name, state in one.random.items() if two.random.get(name, state) != state]
        if one.training != two.training:
            self._modes = ["other modes: one run trains, one evaluates"]

    def listed(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
        """Return what differs, also in two manifests, the likeliest cause of differing values first."""
        states = [name for name in self._states if self._batches or name not in _OF_DATA]
        settings = [f"other random states: {', '.join(states)}"] if states else []
        settings += self._modes
        for key, what in SETTINGS.items():
            values = list(_differences(a.get(key) or {}, b.get(key) or {}))
            settings += [f"other values in {what}: {shortened(values, limit=6)}"] if values else []
        return [*self._weights, *self._batches, *settings]


def _kinds_of_parameters(table: Table) -> dict[str, str]:
    """Return the dtypes of whole parameters: parts, and values of other dtypes, have other digests."""
    rows = np.flatnonzero((table.phase == Phase.PARAMETER) & ~table.partitioned).tolist()
    return {table.full_name(row): table.dtype[row] for row in rows}


def _other_batch(a: Table, b: Table) -> bool:
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
