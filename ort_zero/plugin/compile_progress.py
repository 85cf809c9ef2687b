"""Show on a terminal which unit is compiled, while a model's first step takes longer than three seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ort_zero import env
from ort_zero.runtimes import registry
from ort_zero.utils import progress

_SILENT_SECONDS = 3.0
compiled = {"seconds": 0.0}
"""Seconds of compilations since the last model was announced."""


@contextlib.contextmanager
def shown(module: Any) -> Iterator[None]:
    """Show the class and the number of a unit while Dynamo converts a call of the unit."""
    started, units = time.monotonic(), list[Any]()
    for runtime in registry.runtimes():
        of_model: list[Any] = getattr(runtime, "unit_modules", list)()
        units = of_model if any(unit is module for unit in of_model) else units
    number = next((number for number, unit in enumerate(units, 1) if unit is module), 0)
    delay = max(0.0, _SILENT_SECONDS - compiled["seconds"])
    what, is_shown = f"compiling {type(module).__name__}, unit", number > 0 and env.rank() == 0
    with progress.bar(len(units), what, "unit", done=number, shown=is_shown, delay=delay):
        yield
    compiled["seconds"] += time.monotonic() - started
