"""Measure the work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock that measures work on a device: on a CPU with one thread the time of that thread."""
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def after_work() -> float:
        torch.get_device_module(device).synchronize()
        return time.perf_counter()

    return after_work
