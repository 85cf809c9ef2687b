"""What several tests look at is launched once, also where the launch fails."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

from rank_processes.ranks import run_on_ranks


def once(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Let `launch` run once for the same arguments; all later calls return its result, or raise its error."""
    known: dict[tuple, tuple[Any, BaseException | None]] = {}

    @functools.wraps(launch)
    def remembered(*args: Any) -> Any:
        if args not in known:
            try:
                known[args] = launch(*args), None
            except Exception as error:
                known[args] = None, error
        result, error = known[args]
        if error is not None:
            raise error
        return result

    return remembered


@once
def launched(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Return what `function` returns on each of `ranks` ranks; its last argument is a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="ort_zero_") as folder:
        return run_on_ranks(function, ranks, *arguments, folder, timeout=580)
