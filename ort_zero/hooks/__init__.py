"""Actions around the modules of a model: ZeRO-3's own hooks, and what users subscribe to.

The names of onnxruntime-training's guide are here: ``GlobalSubscriberManager``, ``StatisticsSubscriber``,
``SubscriberBase``, ``inspect_activation``; ``python -m ort_zero.hooks.merge_activation_summary``.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "GlobalSubscriberManager": "ort_zero.statistics.collect.subscriber_manager",
    "SubscriberBase": "ort_zero.zero3_hooks.subscriber_base",
    "StatisticsSubscriber": "ort_zero.statistics.collect.subscriber",
    "inspect_activation": "ort_zero.statistics.collect.subscriber_manager",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # on demand: the plugin imports this package in every DeepSpeed process
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
