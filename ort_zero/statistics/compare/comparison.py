"""What comparing two runs results in, as plain values: for the command line, the report and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ort_zero.statistics.records import Phase, RunInfo

KINDS = ("missing", "extra", "reordered", "shape", "dtype", "nan", "numeric")
"""How a record may differ; ``missing``: the second run lacks it, ``extra``: the first one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One record that differs by more than its tolerance."""

    step: int
    rank: int
    phase: Phase
    order: int
    module: str
    occurrence: int
    tensor: str
    """Kind and slot of the tensor, or a parameter's name: ``"output[0]"``, ``"input.hidden_states"``, ``"weight"``."""
    kind: str
    """Kind of the difference, one of :data:`KINDS`."""
    error: float
    """l2 norm of the difference, relative to the larger of the two tensors' (NaN where it has none)."""
    tolerance: float
    inherited: float
    """Largest relative error among what the value was computed from."""
    a: Mapping[str, Any] | None
    """Shape, dtype and statistics in the first run."""
    b: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDivergence:
    """The first divergence of two runs, or that they are the same."""

    same: bool
    module: str = ""
    """Path of the module that adds the error; empty for the root."""
    occurrence: int = 1
    direction: str = ""
    """``"forward"``, ``"backward"``, ``"input"`` (the model was given other data) or ``"update"`` (parameters changed
    differently from one step to the next)."""
    difference: Difference | None = None
    """The first record that differs for a reason of its own."""
    text: str = ""
    """The whole finding in a sentence or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The errors of one step, rank and phase, in execution order; the lists have one item for each record."""

    step: int
    rank: int
    phase: Phase
    modules: list[str]
    """Path of each record's module, with ``#2`` and so on where a module is called several times."""
    tensors: list[str]
    errors: list[float]
    tolerances: list[float]
    kinds: list[str]
    """Kind of each record's difference; an empty string where the record does not differ."""
    a: list[Mapping[str, Any] | None]
    b: list[Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two runs."""

    a: RunInfo
    b: RunInfo
    rtol: str
    """Relative tolerance: ``"auto"`` or the number given."""
    verdict: FirstDivergence
    """The first divergence of the runs, under its name in the output of ``--json``."""
    steps: tuple[int, ...]
    """Steps that both runs have, and that were compared."""
    records: int
    """Number of pairs of records that were compared."""
    counts: Mapping[str, int]
    """Number of records that differ, by kind of difference."""
    differences: list[Difference]
    """The first differences in execution order, at most 1,000."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the reader: records that only one run has without consequences, ranks left out, cut files."""
    series: list[Series] = field(default_factory=list)
    """Errors of at most a dozen steps for the report, those around the first divergence first."""
