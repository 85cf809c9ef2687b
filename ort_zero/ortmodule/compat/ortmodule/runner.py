"""Who runs the forward calls of an ORTModule, and the call that runs at the moment."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ort_zero.ortmodule.compat.ortmodule.manager import Manager


class ModelRunner(Protocol):
    """Does what an ORTModule's two managers are called for; managers without a runner behave as upstream's."""

    def call(self, managers: Mapping[bool, Manager], args: tuple, kwargs: dict, run_in_torch: Callable[[], Any]) -> Any:
        """Do a whole forward call.

        Args:
            managers: the manager of graphs with gradients (True), and that of graphs without (False).
            args: positional arguments of the call.
            kwargs: named arguments of the call.
            run_in_torch: calls the user's module instead.
        """

    def run_module(self, module: Any, tensors: tuple) -> tuple[list, Any]:
        """Run the user's module on the tensors of the call; return the tensors of its result, and its structure."""

    def current(self, training: bool) -> Any:
        """Return the graph of the last call with gradients (`training`) or without; None before the first one."""


class _Thread(threading.local):
    """The forward calls that run in one thread."""

    def __init__(self) -> None:
        self.calls: list[ModelRunner | None] = []
        """The runners of the managers whose forward runs at the moment, innermost last."""


_thread = _Thread()


def runner_of(manager: Any) -> ModelRunner | None:
    """Return the runner of one of ORTModule's managers, None if it has none."""
    return getattr(manager, "_ort_zero_runner", None)


def set_runner(manager: Any, runner: ModelRunner) -> None:
    """Give one of ORTModule's managers its runner."""
    manager._ort_zero_runner = runner


def current_runner() -> ModelRunner | None:
    """Return the runner of the innermost call that runs: a flattened module knows no manager."""
    return _thread.calls[-1] if _thread.calls else None


@contextlib.contextmanager
def running(runner: ModelRunner | None) -> Iterator[None]:
    """Make `runner` the current one within the block."""
    _thread.calls.append(runner)
    try:
        yield
    finally:
        _thread.calls.pop()
