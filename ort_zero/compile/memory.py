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
from ort_zero.utils.sizes import binary_size, parse_share_or_size

_LEAST = 0.001
"""The smallest fraction: with 0, torch's partitioner also draws random numbers a second time, and they differ."""
_FRACTIONS = (*(number / 20 for number in range(19, 0, -1)), _LEAST)


@dataclass(slots=True)
class Kept:
    """What one captured graph keeps from its forward to its backward, in the first step."""

    forwards: int = 0
    """Number of forwards."""
    size: int = 0
    """Bytes that one forward keeps."""
    joint: GraphModule | None = None
    """The graph of forward and backward, before it was divided; None without a backward."""
    inputs: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def bytes_at(self, fraction: float) -> int:
        """Return the bytes that one forward would keep, divided for a fraction of the partitioner's budget."""
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
        self._limit = None if budget is None else _parsed(budget)
        """A share of what is kept without recomputation, as a float, or bytes, as an int."""
        self.fraction = _LEAST if recompute == "all" else 1.0
        """Fraction of the partitioner's budget with which graphs are divided."""
        self.graphs: list[Kept] = []
        self.before: int | None = None
        """Bytes that one forward of the model's units keeps without recomputation; None before the first step."""
        self.after: int | None = None
        """Bytes that one forward is predicted to keep with recomputation; None before the first step."""

    @property
    def is_open(self) -> bool:
        """Whether the fraction is still to be chosen."""
        return self.recompute == "auto" and self.before is None

    def new_graph(self) -> Kept | None:
        """Return the entry of a graph that is compiled now; None where no fraction is to be chosen."""
        if not self.is_open:
            return None
        self.graphs.append(Kept())
        return self.graphs[-1]

    def divide(
        self, kept: Kept | None, joint: GraphModule, inputs: Any, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Divide a joint graph into forward and backward, as AOTAutograd's ``partition_fn``."""
        if kept is not None:
            kept.joint, kept.inputs, kept.options = copy.deepcopy(joint), inputs, options
        divided = partition(joint, inputs, fraction=self.fraction, **options)
        if kept is not None:
            kept.size = kept_bytes(divided[0], options["num_fwd_outputs"])
        return divided

    def choose(self) -> bool:
        """Choose the fraction after the first step; return True if the units must be compiled again."""
        assert self._limit is not None, "the section asks for a budget where the fraction is open"
        run = [kept for kept in self.graphs if kept.forwards]
        self.before = self.after = sum(kept.forwards * kept.size for kept in run)
        target = self._limit if isinstance(self._limit, int) else int(self._limit * self.before)
        for fraction in _FRACTIONS:
            if self.after <= target:
                break
            self.fraction, self.after = fraction, sum(kept.forwards * kept.bytes_at(fraction) for kept in run)
        if self.after > target:
            log.get_logger().warning(
                "memory.budget %s is below what the units keep if they compute all again: %s of %s",
                self.budget, binary_size(self.after), binary_size(self.before),
            )  # fmt: skip
        self.graphs.clear()
        return self.fraction < 1.0

    def summary(self) -> list[tuple[str, str]]:
        """Return the rows of the summary after the first step."""
        if self.before is None or self.after is None:
            return []
        return [("kept for backwards", f"{binary_size(self.after)} of {binary_size(self.before)}")]

    def as_dict(self) -> dict[str, Any]:
        """Return the budget, the bytes kept without and with recomputation, and the fraction, as plain values."""
        return {
            "recompute": self.recompute,
            "budget": self.budget,
            "kept_without": self.before,
            "kept": self.after,
            "fraction": self.fraction,
        }


def _parsed(budget: str | int) -> float | int:
    """Return a share of 1 as a float, or bytes as an int.

    Raises:
        ConfigError: the text is neither a percentage from 1 to 100 nor a size.
    """
    try:
        limit = parse_share_or_size(budget)
    except ValueError as error:
        raise ConfigError(f"ort_zero.memory.budget: {error}") from None
    if isinstance(limit, float) and not 0 < limit <= 1:
        raise ConfigError(f"ort_zero.memory.budget: {budget!r} must be above 0 % and at most 100 %")
    return limit
