"""Subscribe to the modules of a model, with the names of onnxruntime-training's guide.

``GlobalSubscriberManager``, ``StatisticsSubscriber``, ``SubscriberBase``, ``inspect_activation``, and
``python -m ort_zero.hooks.merge_activation_summary``.
"""

from typing import TYPE_CHECKING

from ort_zero.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from ort_zero.statistics.collect.subscribed_model import GlobalSubscriberManager, inspect_activation
    from ort_zero.statistics.collect.subscriber import StatisticsSubscriber
    from ort_zero.statistics.collect.subscriber_base import SubscriberBase
else:
    # imported on demand: statistics import numba and pyarrow
    __getattr__ = lazy_attributes(
        __name__,
        {
            "GlobalSubscriberManager": "ort_zero.statistics.collect.subscribed_model",
            "StatisticsSubscriber": "ort_zero.statistics.collect.subscriber",
            "SubscriberBase": "ort_zero.statistics.collect.subscriber_base",
            "inspect_activation": "ort_zero.statistics.collect.subscribed_model",
        },
    )

__all__ = ["GlobalSubscriberManager", "StatisticsSubscriber", "SubscriberBase", "inspect_activation"]
