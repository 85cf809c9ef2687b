"""Choose what the forwards of a model keep for their backwards, so that a memory budget holds.

Torch's partitioner chooses which values of a graph are kept and which are computed again (a knapsack over bytes and
floating-point operations). A budget is a share of what all graphs keep without recomputation, and each graph gets the
largest fraction of the partitioner's own budget that keeps this share of it. So the budget holds from the first forward
on. Of bytes the share is known after the first step, in which all is computed again. Without a budget the bytes are
most of the memory that is free after that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ort_zero import env, log
from ort_zero.compat.torch_graphs import copied, module_path
from ort_zero.compile.flops import flops_of
from ort_zero.compile.partition import computed_again, kept_by, partition
from ort_zero.errors import ConfigError
from ort_zero.utils.host_memory import free_memory
from ort_zero.utils.sizes import binary_size, parse_share_or_size

_LEAST = 0.001
"""The smallest fraction: with 0, torch's partitioner also draws random numbers a second time, and they differ."""
_OF_FREE_MEMORY = 0.8
"""Part of the free memory that values for backwards may take; optimizer states, buckets and caches still grow."""
_FRACTIONS = (*(number / 20 for number in range(19, 0, -1)), _LEAST)


@dataclass(slots=True)
class Kept:
    """What one captured graph keeps from its forward to its backward, in the first step."""

    unit: str = ""
    """Class of the unit."""
    forwards: int = 0
    """Number of forwards."""
    values: dict[Node, int] = field(default_factory=dict)
    """The values that one forward keeps without recomputation, and their bytes."""
    fraction: float = 1.0
    """Fraction of the partitioner's budget that :meth:`fit` has found."""
    fitted: int = 0
    """Bytes that one forward keeps with that fraction."""
    bytes_at: dict[float, int] = field(default_factory=dict)
    """Bytes that one forward keeps, by the fractions that were tried."""
    joint: GraphModule | None = None
    """The graph of forward and backward, before it was divided; None without a backward."""
    inputs: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes that one forward keeps without recomputation."""
        return sum(self.values.values())

    def divided_at(self, fraction: float) -> tuple[GraphModule, GraphModule]:
        """Return forward and backward, divided for a fraction of the partitioner's budget."""
        assert self.joint is not None, "the graph has a backward"
        return partition(copied(self.joint), self.inputs, fraction=fraction, **self.options)

    def kept_by(self, forward: GraphModule) -> dict[Node, int]:
        """Return the bytes that a divided forward keeps, by node."""
        return kept_by(forward, self.options["num_fwd_outputs"])

    def fit(self, share: float) -> None:
        """Choose how much of the graph the backward computes again, so that a forward keeps at most a share of it.

        The fraction is the largest one that does, or else the smallest of all.
        """
        self.fraction, self.fitted = 1.0, self.size
        rest = [] if self.joint is None else list(_FRACTIONS)
        while self.fitted > share * self.size and rest:
            self.fraction = rest.pop(0)
            if self.fraction not in self.bytes_at:
                forward, _ = self.divided_at(self.fraction)
                self.bytes_at[self.fraction] = sum(self.kept_by(forward).values())
            self.fitted = self.bytes_at[self.fraction]


class MemoryBudget:
    """The budget of one model for what its compiled units keep from forward to backward.

    Args:
        recompute: ``off`` keeps all, ``auto`` keeps what the budget allows, ``all`` keeps the units' inputs alone.
        budget: the most bytes for ``auto``, such as ``"6GiB"``, or a part of what is kept without recomputation:
            ``"55%"``. None: most of the memory that is free after the first step.

    Raises:
        ConfigError: the budget is neither a percentage nor a size.
    """

    def __init__(self, recompute: str | list[str] = "off", budget: str | int | None = None):
        self.recompute, self.budget = recompute, budget
        self._limit = None if budget is None else _parsed(budget)
        """A share of what is kept without recomputation, as a float, or bytes, as an int; None is not known yet."""
        self.fraction = 1.0 if recompute == "off" else _LEAST
        """Fraction of the partitioner's budget with which graphs are divided; with a budget, the smallest of them."""
        self.graphs: list[Kept] = []
        """The graphs of the first step."""
        self._part = 1.0
        """Part of the budget's share that each graph gets: below 1 where a graph must keep more than its share."""
        self.before: int | None = None
        """Bytes that one forward of the model's units keeps without recomputation; None before the first step."""
        self.after: int | None = None
        """Bytes that one forward is predicted to keep with recomputation; None before the first step."""

    @property
    def is_open(self) -> bool:
        """Whether it is still to be seen what the first step keeps."""
        return self.recompute == "auto" and self.before is None

    def new_graph(self, unit: str) -> Kept | None:
        """Return a new entry for a graph; None if there is no budget and no plan was asked for."""
        if self.recompute != "auto" and env.request(env.MEMORY_TRIAL) is None:
            return None
        kept = Kept(unit)
        if self.before is None:
            self.graphs.append(kept)
        return kept

    def divide(
        self, kept: Kept | None, joint: GraphModule, inputs: Any, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Divide a joint graph into forward and backward, as AOTAutograd's ``partition_fn``."""
        fraction = self.fraction
        if kept is not None:
            kept.joint, kept.inputs, kept.options = copied(joint), inputs, options
            kept.values = kept.kept_by(kept.divided_at(1.0)[0])
            if (share := self._share()) is not None:
                kept.fit(share * self._part)
                fraction = kept.fraction
            if self.before is not None:
                kept.joint = None  # it was needed to fit
        return partition(joint, inputs, fraction=fraction, **options)

    def _share(self) -> float | None:
        """Return the share of a budget; None without a budget, and before the first step with a budget in bytes."""
        if not isinstance(self._limit, int):
            return self._limit
        return None if self.before is None else _share_of(self._limit, self.before)

    def choose(self) -> bool:
        """Note what the first step keeps; return True if the units must be compiled again for a budget in bytes."""
        self.before = sum(kept.forwards * kept.size for kept in self.graphs)
        free = _free_memory(self.graphs) if self.budget is None else 0
        if self._limit is None:
            self._limit = int(_OF_FREE_MEMORY * free)
        share = self._share()
        assert share is not None, "a limit has a share once it is known what the first step keeps"
        self._part = _fit_together(self.graphs, share)
        self.fraction, self.after = _together(self.graphs)
        kept_of_all = f"{binary_size(self.after)} of {binary_size(self.before)}"
        if self.after > share * self.before:
            limit = f"{binary_size(free)} of free memory" if self.budget is None else f"memory.budget {self.budget}"
            log.get_logger().warning(
                "%s is below what the units keep if they compute all again: %s", limit, kept_of_all
            )
        elif self.budget is None:
            log.get_logger().info("%s are free: forwards keep %s for backwards", binary_size(free), kept_of_all)
        is_new = isinstance(self._limit, int) or self._part < 1
        must_compile_again = is_new and any(kept.fraction > _LEAST for kept in self.graphs)
        for kept in self.graphs:
            kept.joint = kept.inputs = None  # what runs the graph holds this object
        self.graphs.clear()
        return must_compile_again

    def plan(self, budget: str) -> dict[str, Any]:
        """Return what a budget would have the units keep and compute again in each step, as plain values.

        ``modules`` has the modules whose values are not kept or are computed again: the bytes that are freed, the calls
        of each operator, and their share of the floating-point operations of forwards and backwards.
        """
        before = sum(kept.forwards * kept.size for kept in self.graphs)
        share = _share_of(_parsed(budget), before)
        _fit_together(self.graphs, share)
        fraction, after = _together(self.graphs)
        modules: dict[tuple[str, str], dict[str, Any]] = {}
        total = 0
        for kept in self.graphs:
            if kept.joint is None or not kept.forwards:
                continue
            total += kept.forwards * sum(flops_of(node) for node in kept.joint.graph.nodes)
            forward, backward = kept.divided_at(kept.fraction)
            still = {node.name for node in kept.kept_by(forward)}
            for node, size in kept.values.items():
                if node.name not in still:
                    _entry(modules, kept, node)["freed"] += kept.forwards * size
            for node in computed_again(forward, backward):
                entry = _entry(modules, kept, node)
                entry["operators"][str(node.target).removeprefix("aten.").removesuffix(".default")] += kept.forwards
                entry["flops"] += kept.forwards * flops_of(node)
        entries = sorted(modules.values(), key=lambda entry: -entry["freed"])
        for entry in entries:
            entry["flops_share"] = entry["flops"] / total if total else 0.0
        return {
            "budget": budget,
            "fits": after <= share * before,
            "kept_without": before,
            "kept": after,
            "fraction": fraction,
            "flops_share": sum(entry["flops_share"] for entry in entries),
            "modules": entries,
        }

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


def _together(graphs: Iterable[Kept]) -> tuple[float, int]:
    """Return the smallest fraction of graphs that keep something, and the bytes that all forwards of a step keep."""
    running = [kept for kept in graphs if kept.forwards and kept.size]
    return min((kept.fraction for kept in running), default=1.0), sum(kept.forwards * kept.fitted for kept in running)


def _fit_together(graphs: Sequence[Kept], share: float) -> float:
    """Fit graphs so that all together keep a share at most, if they can; return the part of it that each gets."""
    most = share * sum(kept.forwards * kept.size for kept in graphs)
    for part in (1 - number / 20 for number in range(21)):
        for kept in graphs:
            kept.fit(share * part)
        if _together(graphs)[1] <= most:
            break
    return part


def _free_memory(graphs: Iterable[Kept]) -> int:
    """Return the bytes that this rank can still take of the device on which the graphs keep values."""
    values = (node.meta.get("val") for kept in graphs for node in kept.values)
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), torch.device("cpu"))
    if device.type != "cuda":
        return free_memory() // env.local_world_size()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _share_of(limit: float | int, before: int) -> float:
    """Return a limit as a share of the bytes that are kept without recomputation."""
    return limit / max(before, 1) if isinstance(limit, int) else limit


def _entry(modules: dict[tuple[str, str], dict[str, Any]], kept: Kept, node: Node) -> dict[str, Any]:
    path = module_path(node)
    new = {"unit": kept.unit, "module": path, "freed": 0, "flops": 0, "operators": Counter()}
    return modules.setdefault((kept.unit, path), new)


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
