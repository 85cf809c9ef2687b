"""Ends a rank that has failed between two collectives while the others have not: they would wait for it for ever.

A run of a graph that gathers weights is a row of collectives. Memory that runs out on one rank, or any other error of
it alone, leaves the row there, and whatever that rank does next meets the others in another collective than theirs. If
the error ends the script, its connections are closed and the others learn why. If the script catches it and goes on,
nobody does. So a rank that has failed tells the store how often; where all ranks have failed alike, training may go
on, and where they have not after :data:`SECONDS`, this process ends, which ends what the others wait for.
"""

from __future__ import annotations

import atexit
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ort_zero import env
from ort_zero.compat.torch_distributed import default_store, is_collective_error
from ort_zero.distributed.missing_ranks import error_key, failures_key
from ort_zero.masking import masked

SECONDS = 30.0
"""Time in seconds in which the other ranks must have failed as well."""
_STORE_SECONDS = 10.0
"""Longest wait in seconds for an answer of the store when the process ends."""
_EXIT_STATUS = 1
_failures = 0
"""Number of runs that have failed on this rank."""
_watches: queue.SimpleQueue[_Watch | None] | None = None
"""What the thread that watches takes its work from, None for its end; None before there is a thread."""
_ends = threading.Event()
"""Set when this process ends by itself."""


def prepare() -> None:
    """Start the thread that waits for failures: when memory has run out, none can be started. Only the first call does.

    Does nothing on one rank.
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
    while (watch := watches.get()) is not None and not _ends.is_set():  # a later failure is not the reason
        watch.run()


def _stop(thread: threading.Thread, watches: queue.SimpleQueue[_Watch | None]) -> None:
    """End the thread: one that is inside the store while the interpreter ends, aborts the process (status -6)."""
    _ends.set()
    watches.put(None)
    thread.join(_STORE_SECONDS)


@contextmanager
def ended_unless_shared() -> Iterator[None]:
    """Run a block that is between two collectives of all ranks; if it fails on some ranks alone, end these.

    An error that a rank which is gone has caused is not counted: that rank is the one that has failed.
    """
    try:
        yield
    except Exception as error:
        report(error)
        raise


def report(error: BaseException) -> None:
    """Note that this rank has failed between two collectives, and end it unless the others fail as well.

    Returns at once. Does nothing before :func:`prepare`, and for the error of a collective.

    Args:
        error: its first line is what the other ranks will print as the reason.
    """
    global _failures
    if _watches is None or is_collective_error(error):
        return
    _failures += 1
    first = (str(error).strip() or "no message").partition("\n")[0]
    _watches.put(_Watch(_failures, masked(f"{type(error).__name__}: {first}")))


class _Watch:
    """Waits for the other ranks to fail as this one has.

    Args:
        number: how many runs have failed on this rank, this one included.
        reason: what has happened here, one line.
    """

    def __init__(self, number: int, reason: str):
        import torch.distributed as dist

        self._number, self._reason = number, reason
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._store = default_store()

    def run(self) -> None:
        """Tell the store; return once all ranks have failed as often or the process ends by itself, else end it."""
        deadline = time.monotonic() + SECONDS
        with suppress(Exception):  # a store that is gone: its host, and with it the job
            self._store.set(error_key(self._rank), self._reason)
            self._store.set(failures_key(self._rank), str(self._number))
            if self._wait(deadline):
                self._store.delete_key(error_key(self._rank))
                return
        if _ends.wait(max(0.0, deadline - time.monotonic())):
            return
        _end(f"this rank has failed, and others have not: {self._reason}; they wait for it in a collective, so that "
             "this process ends")  # fmt: skip

    def _wait(self, deadline: float) -> bool:
        """Return whether all ranks have failed as often as this one before the deadline and before this one ends."""
        while not all(self._failures_of(rank) >= self._number for rank in range(self._size)):
            if time.monotonic() > deadline or _ends.wait(0.2):
                return False
        return True

    def _failures_of(self, rank: int) -> int:
        """Return how many runs have failed on another rank."""
        key = failures_key(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _end(text: str) -> None:
    """Print a line and end the process without its exit handlers, which may wait for the other ranks."""
    print(f"[ort_zero rank {env.rank()} on {socket.gethostname()}] {text}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(_EXIT_STATUS)
