"""What a user asks of the memory optimizer: the section's ``memory`` part, read and checked before training starts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ort_zero.config import MemoryConfig, read_json
from ort_zero.errors import ConfigError
from ort_zero.utils.sizes import binary_size, parse_share_or_size

OFF, ALL, AUTO, PLAN = "off", "all", "auto", "plan"
BLOCKS = "checkpointed blocks"
"""Mode in which the blocks that the module checkpoints are computed again."""
TOLERANCE = 0.1
"""Share of a predicted peak by which the measured one may differ before a warning is logged."""
SLACK = 16 << 20
"""Bytes by which a prediction may be wrong whatever its size: what a process takes besides varies by so much."""
_ITEM = re.compile(r"\s*([A-Za-z0-9_]+\+(?:[A-Za-z0-9_]+\+)*)\s*:\s*([12])\s*:\s*(-1|\d+)\s*")


@dataclass(frozen=True, slots=True)
class ClusterCount:
    """Part of a plan: how many places of one cluster are computed again."""

    name: str
    kind: int = 1
    """1: recompute, 2: with compromise."""
    count: int = -1
    """Number of places that are computed again, the first ones of the forward; -1 for all."""

    @property
    def key(self) -> str:
        """Name and kind of the cluster in ORT's notation, such as ``"FastGelu+:1"``."""
        return f"{self.name}:{self.kind}"

    def __str__(self) -> str:
        return f"{self.key}:{self.count}"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory that a training graph may take while it runs, on each rank."""

    size: float
    """Bytes, or a share of what it takes where nothing is computed again."""
    relative: bool = False

    def in_bytes(self, unconstrained: int) -> int:
        """Return the budget in bytes.

        Args:
            unconstrained: bytes that a step takes where nothing is computed again.
        """
        return int(self.size * unconstrained) if self.relative else int(self.size)


@dataclass(frozen=True, slots=True)
class RecomputeRequest:
    """What the user asks of the memory optimizer, read from the section's ``memory`` part."""

    mode: str
    cluster_counts: tuple[ClusterCount, ...] = ()
    budget: MemoryBudget | None = None
    level: int = 0
    """0: any recomputable sub-graph; 1: within transformer layers; 2: the same, with compromise."""
    source: str = ""
    """Path of the file that the plan was read from; empty for any other mode or a plan in the section."""
    by_default: bool = False
    """Whether nobody has asked for it, so that a model without checkpointed blocks has nothing to report."""
    replaces_checkpointing: bool = False
    """Whether torch's activation checkpointing in the model is left to this request: its calls are plain ones then."""

    @property
    def probe(self) -> str:
        """The level as ORT's probe setting writes it, see :class:`ort_zero.ortmodule.compat.ortmodule.Recompute`."""
        return "1:1" if self.level else "1:0"

    def __str__(self) -> str:
        budget = ""
        if self.budget is not None:
            size = self.budget.size
            budget = f", budget {size:.0%}" if self.budget.relative else f", budget {binary_size(int(size))}"
        return f"{', '.join(map(str, self.cluster_counts)) or self.mode}{budget}"


def read(config: MemoryConfig, *, folder: Path | None = None) -> RecomputeRequest:
    """Return the request of a section.

    Args:
        config: the section's ``memory`` part.
        folder: that a plan file's path is relative to; the working directory by default.

    Raises:
        ConfigError: names the key, its value and what is valid.
    """
    wanted, key = config.recompute, "ort_zero.memory.recompute"
    if config.checkpointing == "recompute":
        return RecomputeRequest(BLOCKS)
    budget = parse_budget(config.budget) if config.budget is not None else None
    if budget is not None and wanted != AUTO:
        raise ConfigError(f'ort_zero.memory.budget needs "recompute": "auto", not {wanted!r}')
    level = config.level if config.level is not None else 1 if wanted == ALL else 0
    if isinstance(wanted, str) and wanted in (OFF, ALL, AUTO):
        return RecomputeRequest(wanted, budget=budget, level=level)
    texts = [wanted] if isinstance(wanted, str) else list(wanted)
    if len(texts) == 1 and texts[0].endswith(".json"):
        path = Path(texts[0]) if folder is None else folder / texts[0]
        return RecomputeRequest(PLAN, read_plan(path), level=level, source=str(path))
    return RecomputeRequest(PLAN, parse_plan(texts, key), level=level)


def parse_budget(text: str | int, key: str = "ort_zero.memory.budget") -> MemoryBudget:
    """Return a budget such as ``"6GiB"``, ``"800 MB"`` or ``"65%"``.

    Raises:
        ConfigError: it is none, or more than the machine has.
    """
    try:
        size = parse_share_or_size(text)
    except ValueError:
        size = 0
    if not size:
        raise ConfigError(f'{key}: {text!r} is no amount of memory; write for example "6GiB", "800MB" or "65%"')
    if isinstance(size, float):
        if size > 1:
            raise ConfigError(f"{key}: {text!r} is more than the graph needs where nothing is computed again")
        return MemoryBudget(size, relative=True)
    have = machine_memory()
    if have and size > have:
        raise ConfigError(f"{key}: {text!r} is more than this machine has ({binary_size(have)})")
    return MemoryBudget(size)


def parse_plan(texts: Sequence[str], key: str) -> tuple[ClusterCount, ...]:
    """Return the items of ``["FastGelu+:1:12", ...]``, in which a text may hold several, separated by commas.

    Raises:
        ConfigError: names the first item that is none.
    """
    items: dict[str, ClusterCount] = {}
    for part in (part for text in texts for part in str(text).split(",") if part.strip()):
        match = _ITEM.fullmatch(part)
        if match is None:
            raise ConfigError(
                f'{key}: {part.strip()!r} is no plan; write "off", "all", "auto", the path of a .json file, or items '
                'such as "FastGelu+:1:12" (operators each followed by +, then 1 or 2 for with compromise, then how '
                "many, -1 for all)"
            )
        items[match[1]] = ClusterCount(match[1], int(match[2]), int(match[3]))
    if not items:
        raise ConfigError(f'{key}: the plan is empty; write "off" to compute nothing again')
    return tuple(items.values())


def read_plan(path: Path) -> tuple[ClusterCount, ...]:
    """Return the items of a file in the form that ORT reads: a JSON list of texts.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    content = read_json(path, "the plan file")
    if not isinstance(content, list) or not all(isinstance(text, str) for text in content):
        raise ConfigError(f'the plan file {path} does not hold a list of texts such as ["FastGelu+:1:-1"]')
    return parse_plan(content, f"plan file {path}")


def machine_memory() -> int:
    """Return bytes of memory of this machine, or of the control group if that allows less; 0 if unknown."""
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return 0
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            size = min(size, int(Path(file).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return size


def free_memory() -> int:
    """Return bytes of memory of this machine that nobody uses; 0 if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:  # not on Linux
        pass
    return 0


def is_wrong(predicted: int, measured: int) -> bool:
    """Return whether a measured peak differs from its prediction by more than can be expected."""
    return abs(measured - predicted) > max(TOLERANCE * predicted, SLACK)
