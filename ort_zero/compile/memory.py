"""Choose what the forwards of a model keep for their backwards, so that a memory budget holds.

Torch's partitioner chooses which values of a graph are kept and which are computed again (a knapsack over bytes and
floating-point operations). This module sees what one step keeps, and finds the largest fraction that fits the budget.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from ort_zero import log
from ort_zero.compile.partition import kept_bytes, partition
from ort_zero.errors import ConfigError
from ort_zero.utils.sizes import binary_size, parse_size

_LEAST = 0.001
"""With 0, torch's partitioner also computes random numbers again, which come out otherwise."""
_FRACTIONS = (*(number / 20 for number in range(19, 0, -1)), _LEAST)


@dataclass(slots=True)
class Kept:
    """What one captured graph keeps from its forward to its backward."""

    unit: str
    """Name of the compiled module's class."""
    runs: int = 0
    """Number of forwards in the first step."""
    joint: GraphModule | None = None
    """The graph of forward and backward, before it was divided; None without a backward."""
    inputs: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def bytes_at(self, fraction: float) -> int:
        """Return the bytes that one forward keeps for a fraction of the partitioner's budget."""
        if self.joint is None:
            return 0
        divided = partition(copy.deepcopy(self.joint), self.inputs, fraction=fraction, **self.options)
        return kept_bytes(divided[0], self.options["num_fwd_outputs"])


class MemoryBudget:
    """The budget of one model for what its compiled units keep from forward to backward.

    Args:
        recompute: ``off`` keeps all, ``auto`` keeps what the budget allows, ``all`` keeps the units' inputs alone.
        budget: the most bytes for ``auto``, such as ``"6GiB"``, or a part of what is kept without recomputation:
            ``"55%"``.

    Raises:
        ConfigError: the budget is neither a percentage nor a size.
    """

    def __init__(self, recompute: str | list[str] = "off", budget: str | int | None = None):
        self.recompute, self.budget = recompute, budget
        self._share, self._limit = _parsed(budget)
        self.fraction = _LEAST if recompute == "all" else 1.0
        """Fraction of the partitioner's budget with which graphs are divided."""
        self.graphs: list[Kept] = []
        self.before: int | None = None
        """Bytes that one forward of the model's units keeps without recomputation; None until a step has shown it."""
        self.after: int | None = None
        """Predicted bytes with recomputation."""

    @property
    def is_open(self) -> bool:
        """Whether the fraction is still to be chosen."""
        return self.recompute == "auto" and self.before is None

    def new_graph(self, unit: str) -> Kept:
        """Return the entry of a graph that is compiled now."""
        kept = Kept(unit)
        if self.is_open:
            self.graphs.append(kept)
        return kept

    def divide(self, kept: Kept, joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        """Divide a joint graph into forward and backward, as AOTAutograd's ``partition_fn``."""
        if self.is_open:
            kept.joint, kept.inputs, kept.options = copy.deepcopy(joint), inputs, options
        return partition(joint, inputs, fraction=self.fraction, **options)

    def choose(self) -> bool:
        """Choose the fraction after the first step; return True if the units must be compiled again."""
        self.before = self.after = self._bytes_at(1.0)
        target = self._limit if self._share is None else int(self._share * self.before)
        for fraction in _FRACTIONS:
            if self.after <= target:
                break
            self.fraction, self.after = fraction, self._bytes_at(fraction)
        if self.after > target:
            log.get_logger().warning(
                "memory.budget %s is below what the units keep if they compute all again: %s of %s",
                self.budget, binary_size(self.after), binary_size(self.before),
            )  # fmt: skip
        self.graphs.clear()
        return self.fraction < 1.0

    def _bytes_at(self, fraction: float) -> int:
        return sum(kept.runs * kept.bytes_at(fraction) for kept in self.graphs if kept.runs)

    def summary(self) -> list[tuple[str, str]]:
        """Return the rows of the summary after the first step."""
        if self.before is None or self.after is None:
            return []
        return [("kept for backwards", f"{binary_size(self.after)} of {binary_size(self.before)}")]

    def as_dict(self) -> dict[str, Any]:
        """Return the budget and what came of it, as plain values; sizes in bytes."""
        return {
            "recompute": self.recompute,
            "budget": self.budget,
            "kept_without": self.before,
            "kept": self.after,
            "fraction": self.fraction,
        }


def _parsed(budget: str | int | None) -> tuple[float | None, int]:
    """Return a share and 0, or None and bytes.

    Raises:
        ConfigError: the text is neither a percentage nor a size.
    """
    if budget is None:
        return None, 0
    text = str(budget).strip()
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if not 0 < share <= 1:
                raise ValueError("the percentage must be above 0 and at most 100")
            return share, 0
        return None, parse_size(budget)
    except ValueError as error:
        raise ConfigError(f"ort_zero.memory.budget: {budget!r}: {error}") from None
