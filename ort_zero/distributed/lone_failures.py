"""End a rank that failed between two collectives while other ranks did not, since these would wait for it for ever.

A graph that gathers weights runs a fixed sequence of collectives. After an error on one rank alone, such as a lack of
memory, the next collective of that rank does not match the collective of the others. If the error ends the script, its
connections close and the other ranks print the reason. If the script catches the error and continues, they hang. So
each failed rank writes its number of failures to the store. If all ranks have failed equally often, training may go on.
If they have not after :data:`SECONDS`, this process ends, and with it the collective for which the others wait.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ort_zero.compat.torch_distributed import default_store, is_collective_error
from ort_zero.distributed.missing_ranks import in_a_line, key_of, say

SECONDS = 30.0
"""Time in seconds within which all other ranks must fail as well."""
_STORE_SECONDS = 10.0
"""Maximum time in seconds to wait for an answer of the store when the process ends."""
_EXIT_STATUS = 1
_failures = 0
"""Number of runs that have failed on this rank."""
_watches: queue.SimpleQueue[_Watch | None] | None = None
"""The queue of the watching thread, in which None ends the thread; None before the thread starts."""
_ends = threading.Event()
"""Set when the interpreter of this process ends."""


def prepare() -> None:
    """Start the thread that waits for failures in advance: without memory no thread can be started.

    Does nothing in a job of one rank, and at a second call.
    """
    import torch.distributed as dist

    global _watches
    if _watches is not None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _watches = queue.SimpleQueue()
    thread = threading.Thread(target=_work, args=(_watches,), name="ort_zero lone failures", daemon=True)
    thread.start()
    atexit.register(_stop, thread, _watches)


def _work(watches: queue.SimpleQueue[_Watch | None]) -> None:
    while (watch := watches.get()) is not None and not _ends.is_set():  # a failure after the end has no effect
        watch.run()


def _stop(thread: threading.Thread, watches: queue.SimpleQueue[_Watch | None]) -> None:
    """End the thread: a thread that calls the store while the interpreter ends aborts the process (status -6)."""
    _ends.set()
    watches.put(None)
    thread.join(_STORE_SECONDS)


@contextmanager
def ended_unless_shared() -> Iterator[None]:
    """Run a block between two collectives of all ranks; if it fails on some ranks only, end these ranks.

    An error that the end of another rank has caused does not count: that other rank has failed.
    """
    try:
        yield
    except Exception as error:
        report(error)
        raise


def report(error: BaseException) -> None:
    """Note that this rank has failed between two collectives, and end it unless all other ranks fail as well.

    Returns at once. Does nothing before :func:`prepare`, and for the error of a collective.
    """
    global _failures
    if _watches is None or is_collective_error(error):
        return
    _failures += 1
    _watches.put(_Watch(_failures, in_a_line(error)))


class _Watch:
    """The wait for all other ranks to fail as often as this rank."""

    def __init__(self, number: int, reason: str):
        import torch.distributed as dist

        self._number, self._reason = number, reason
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = default_store()

    def run(self) -> None:
        """Write the failure to the store; return once all ranks have failed as often, else end this process."""
        deadline = time.monotonic() + SECONDS
        with suppress(Exception):  # an unreachable store means that its host, and so the job, has ended
            self._store.set(key_of(self._rank, "error"), self._reason)
            self._store.set(key_of(self._rank, "failures"), str(self._number))
            if self._wait(deadline):
                self._store.delete_key(key_of(self._rank, "error"))
                return
        if _ends.wait(max(0.0, deadline - time.monotonic())):
            return
        _end(f"this rank has failed, and others have not: {self._reason}; they wait for it in a collective, so that "
             "this process ends")  # fmt: skip

    def _wait(self, deadline: float) -> bool:
        """Return whether all ranks fail as often as this rank before the deadline and before this process ends."""
        while not all(self._failures_of(rank) >= self._number for rank in range(self._size)):
            if time.monotonic() > deadline or _ends.wait(0.2):
                return False
        return True

    def _failures_of(self, rank: int) -> int:
        """Return the number of runs that have failed on `rank`."""
        key = key_of(rank, "failures")
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _end(text: str) -> None:
    """Print a line and end the process without its exit handlers, which may wait for the other ranks."""
    say(text)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(_EXIT_STATUS)
