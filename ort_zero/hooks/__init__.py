"""Subscribe to the modules of a model, with the names of onnxruntime-training's guide.

``GlobalSubscriberManager``, ``StatisticsSubscriber``, ``SubscriberBase``, ``inspect_activation``, and
``python -m ort_zero.hooks.merge_activation_summary``.
"""

from typing import TYPE_CHECKING

from ort_zero.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from ort_zero.statistics.collect.subscriber import StatisticsSubscriber
    from ort_zero.statistics.collect.subscriber_base import SubscriberBase
    from ort_zero.statistics.collect.subscriber_manager import GlobalSubscriberManager, inspect_activation
else:
    # imported on demand: statistics import numba and pyarrow
    __getattr__ = lazy_attributes(
        __name__,
        {
            "GlobalSubscriberManager": "ort_zero.statistics.collect.subscriber_manager",
            "StatisticsSubscriber": "ort_zero.statistics.collect.subscriber",
            "SubscriberBase": "ort_zero.statistics.collect.subscriber_base",
            "inspect_activation": "ort_zero.statistics.collect.subscriber_manager",
        },
    )

__all__ = ["GlobalSubscriberManager", "StatisticsSubscriber", "SubscriberBase", "inspect_activation"]
