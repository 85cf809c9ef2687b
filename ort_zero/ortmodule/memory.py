"""Choose what the backward of a training graph computes again, from upstream's own table, by what it saves here.

Upstream's memory optimizer copies nodes of the forward for the backward. Its table says how many bytes each entry may
save. A copy that reads a value which would not be kept otherwise saves less, or nothing. So each entry is tried: the
graph is optimized with it and divided, and the forward shows the bytes that it keeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ort_zero import config, log
from ort_zero.errors import ConfigError
from ort_zero.utils.sizes import parse_share_or_size

KeptBytes = Callable[[onnx.ModelProto], int]
"""Returns the bytes that the forward half of a training graph keeps for the backward, besides inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a section asks for."""

    plan: tuple[str, ...] | None = None
    """Configurations of the user's; None takes what saves most of upstream's table."""
    share: float | None = None
    """The part of what is kept without recomputation at which no more is taken; None takes all that saves."""


def wanted_by(memory: config.MemoryConfig) -> Wanted | None:
    """Return what the section asks for; None keeps all.

    Raises:
        ConfigError: the budget is no percentage, or the file of a plan is no JSON list of configurations.
    """
    recompute = memory.recompute
    if recompute == "off":
        return None
    if recompute == "all":
        return Wanted()
    if recompute == "auto":
        try:
            share = parse_share_or_size(memory.budget or "")
        except ValueError as error:
            raise ConfigError(f"ort_zero.memory.budget: {error}") from None
        if not isinstance(share, float) or not 0 < share <= 1:
            raise ConfigError(
                f'ort_zero.memory.budget: {memory.budget!r} must be a percentage with "backend": "ortmodule", such as '
                '"60%" of what forwards keep; sizes belong to "backend": "compile"'
            )
        return Wanted(share=share)
    if isinstance(recompute, str) and recompute.endswith(".json"):
        recompute = config.read_json(Path(recompute), "the plan of ort_zero.memory.recompute,")
        if not isinstance(recompute, list) or not all(isinstance(each, str) for each in recompute):
            raise ConfigError(f'the plan {memory.recompute} is not a list of configurations such as "Gelu+:1:-1"')
    plan = recompute.split(",") if isinstance(recompute, str) else recompute
    wrong = [each for each in plan if not re.fullmatch(r"[\w+]+:[12]:-?\d+(,[\w+]+:[12]:-?\d+)*", each)]
    if wrong:
        raise ConfigError(
            f"ort_zero.memory.recompute: {wrong[0]!r} must be off, all, auto, a configuration such as "
            '"FastGelu+:1:-1", or the path of a JSON file with a list of them'
        )
    return Wanted(plan=tuple(plan))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of upstream's table."""

    configuration: str
    """As upstream writes it: ``"FastGelu+:1:-1"``, several of them joined by commas."""
    frequency: int
    """Number of places in the graph."""
    saved_bytes: int
    """Bytes that the graph keeps less with this entry and those above it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputation:
    """What the backward of one graph computes again."""

    unit: str
    kept_without: int
    """Bytes that the forward keeps without recomputation."""
    kept: int
    entries: tuple[Entry, ...]
    """The entries that are applied."""

    def text(self) -> str:
        """Return the choice as a table: configuration, frequency, saved bytes."""
        rows = [
            (f"computed again in {self.unit}", "frequency", "saved bytes"),
            *((each.configuration, str(each.frequency), f"{each.saved_bytes:,}") for each in self.entries),
            (f"kept: {self.kept:,} of {self.kept_without:,}", "", f"{self.kept_without - self.kept:,}"),
        ]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


def choose(
    unit: str,
    wanted: Wanted,
    table: Mapping[str, int],
    with_plan: Callable[[Sequence[str]], onnx.ModelProto],
    kept_bytes: KeptBytes,
) -> tuple[onnx.ModelProto, Recomputation]:
    """Return a training graph with the copies that a section asks for, and what they save.

    Args:
        unit: name of the units' class.
        wanted: what the section asks for.
        table: the configurations of upstream's table for this graph, and the number of their places.
        with_plan: returns the training graph with configurations applied.
        kept_bytes: see :data:`KeptBytes`.
    """
    model = with_plan(())
    without = kept = kept_bytes(model)
    entries = list[Entry]()
    for configuration in _in_order(wanted, table, lambda each: kept_bytes(with_plan([each]))):
        if wanted.share is not None and kept <= wanted.share * without:
            break
        tried = with_plan([*(entry.configuration for entry in entries), configuration])
        less = kept_bytes(tried)
        if less < kept or wanted.plan is not None:
            frequency = table.get(configuration, 0)
            entries.append(Entry(configuration=configuration, frequency=frequency, saved_bytes=kept - less))
            model, kept = tried, less
    if wanted.plan is not None and table and not entries:
        log.get_logger().warning(
            "ort_zero.memory.recompute: the plan has no configuration of a graph of %s; the graph has %s",
            unit,
            ", ".join(table),
        )
    return model, Recomputation(unit=unit, kept_without=without, kept=kept, entries=tuple(entries))


def _in_order(wanted: Wanted, table: Mapping[str, int], kept_with: Callable[[str], int]) -> list[str]:
    """Return the configurations to try: a plan's in its order, else upstream's table, what saves most first."""
    if wanted.plan is not None:
        names = {each.rpartition(":")[0] for configuration in table for each in configuration.split(",")}
        return [each for each in wanted.plan if each.rpartition(":")[0] in names]
    kept = {each: kept_with(each) for each in table}
    return sorted(kept, key=lambda each: (kept[each], each))
