"""Show on a terminal which unit is compiled, while a model's first step takes longer than three seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ort_zero import env
from ort_zero.backends import registry
from ort_zero.compat import torch_compile
from ort_zero.utils import progress

_SILENT_SECONDS = 3.0
_compiled = {"seconds": 0.0}
"""Seconds of compilations since the last model was announced."""


def begin() -> None:
    """Show what is compiled from now on; :func:`announced` begins a new count of seconds."""
    torch_compile.while_converting[:] = [_shown]


def announced() -> None:
    """Note that a model's first step is over."""
    _compiled["seconds"] = 0.0


@contextlib.contextmanager
def _shown(module: Any) -> Iterator[None]:
    """Show the class and the number of a unit while Dynamo converts a call of the unit."""
    units: list[Any] = []
    for runtime in registry.runtimes():
        of_model = getattr(runtime, "unit_modules", list)()
        units = of_model if any(unit is module for unit in of_model) else units
    number = next((number for number, unit in enumerate(units, 1) if unit is module), 0)
    shown, delay = number > 0 and env.rank() == 0, max(0.0, _SILENT_SECONDS - _compiled["seconds"])
    started, what = time.monotonic(), f"compiling {type(module).__name__}, unit"
    with progress.steps_bar(what, len(units), done=number, shown=shown, delay=delay):
        yield
    _compiled["seconds"] += time.monotonic() - started
