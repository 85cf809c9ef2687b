"""Set how many elements ZeRO-3 gathers ahead of their use, and how many stay gathered, from a DeepSpeed engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ort_zero.ortmodule.compat import deepspeed_engine


@dataclass(frozen=True, slots=True)
class GatherLimits:
    """How much may be gathered beside what is used, in elements; the defaults gather each weight for each use.

    Attributes:
        prefetch: that may be gathered ahead of their use, within one phase.
        reuse_distance: a weight stays if fewer than these are gathered before its next use.
        live: that may stay at one time, with those gathered ahead of their use.
    """

    prefetch: int = 0
    reuse_distance: int = 0
    live: int = 0


def limits_of(offload: Any) -> GatherLimits:
    """Return the limits that ``stage3_prefetch_bucket_size`` and its like set for an engine's DeepSpeedZeRoOffload."""
    distance, live = deepspeed_engine.limits_of_kept_weights(offload)
    return GatherLimits(deepspeed_engine.prefetch_window(offload), distance, live)
