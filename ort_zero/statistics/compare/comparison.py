"""Define the result of a comparison of two runs, as plain values for the command line and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ort_zero.statistics.records import Phase, RunInfo

KINDS = ("missing", "extra", "reordered", "shape", "dtype", "nan", "numeric")
"""The kinds of differences; ``missing``: only the first run has the record, ``extra``: only the second run has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRecord:
    """One record of both runs."""

    step: int
    rank: int
    phase: Phase
    order: int
    module: str
    occurrence: int
    tensor: str
    """Kind and slot of the tensor, or a parameter's name: ``"output[0]"``, ``"input.hidden_states"``, ``"weight"``."""
    kind: str
    """Kind of the difference, one of :data:`KINDS`; empty if the record does not differ."""
    error: float
    """l2 norm of the difference of the tensors, relative to the larger norm; NaN if the difference has no norm."""
    tolerance: float
    """The record differs if, and only if, its error is larger."""
    inherited: float
    """Largest relative error among the inputs of the computation."""
    a: Mapping[str, Any]
    """Shape, dtype and statistics in the first run."""
    b: Mapping[str, Any]

    @property
    def full_name(self) -> str:
        """The name of the tensor with its module: ``"h.0.attn.output[0]"``."""
        return ".".join(filter(None, (self.module, self.tensor)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDivergence:
    """The first divergence of two runs, or the verdict that the runs are the same."""

    same: bool
    module: str = ""
    """Path of the module whose code adds the error; empty for the root."""
    occurrence: int = 1
    direction: str = ""
    """``"forward"``, ``"backward"``, ``"input"`` (the runs got different data) or ``"update"`` (parameters changed
    differently from one step to the next)."""
    difference: ComparedRecord | None = None
    """The first record whose error does not come from its inputs."""
    text: str = ""
    """The divergence described in one or two sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two runs."""

    a: RunInfo
    b: RunInfo
    rtol: str
    """Relative tolerance: ``"auto"`` or a number."""
    verdict: FirstDivergence
    """The first divergence of the runs, under its name in the output of ``--json``."""
    steps: tuple[int, ...]
    """Numbers of the compared steps, which both runs have."""
    records: int
    """Number of pairs of records that were compared."""
    counts: Mapping[str, int]
    """Number of records that differ, by kind of difference."""
    differences: list[ComparedRecord]
    """The first differences in execution order, at most 1,000."""
    beginnings: list[str] = field(default_factory=list)
    """What the runs have otherwise before any value is computed, the likeliest cause of a difference first."""
    notes: list[str] = field(default_factory=list)
    """Remarks for the user: harmless records that only one run has, ranks left out, cut files."""
    series: list[Sequence[ComparedRecord]] = field(default_factory=list)
    """All records of a few steps for the report, one sequence for each step and rank, in order of execution; the steps
    around the first divergence come first."""
