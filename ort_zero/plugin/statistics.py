"""Starts the collection of statistics that a section asks for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ort_zero import config, log

_collecting: Counter[str | None] = Counter()
"""How many models collect statistics, by the folder of the section."""


def collect(model: Any, section: config.StatisticsConfig) -> Any:
    """Collect statistics of a model as the section says; return the session, None if it wants none. All ranks.

    Args:
        model: an engine, an ORTModule or a module.
        section: the part about statistics.
    """
    if not section.enabled:
        return None
    from ort_zero.statistics.collect.subscriber import StatisticsSubscriber
    from ort_zero.statistics.collect.subscriber_manager import GlobalSubscriberManager

    wanted = section.model_dump(exclude={"enabled"})
    # an actor and a critic under one config: each has a folder, by the order in which they are made
    before, _collecting[section.output_dir] = _collecting[section.output_dir], _collecting[section.output_dir] + 1
    if before:
        wanted["output_dir"] = f"{section.output_dir}_{before + 1}"
        log.get_logger().info("statistics of engine %d go to %s", before + 1, wanted["output_dir"])
    return GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(**wanted)])
