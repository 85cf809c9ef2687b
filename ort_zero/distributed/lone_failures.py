"""End a rank that failed between two collectives while other ranks did not, since these would wait for it for ever.

After an error on one rank alone, such as a lack of memory, its next collective does not match that of the others. If
the script catches the error and continues, they hang. So each failed rank writes its number of failures to the store.
If all ranks have failed equally often, training may go on; if not after :data:`SECONDS`, this process ends.
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
from typing import Any

from ort_zero.compat.torch_distributed import default_store, is_collective_error
from ort_zero.distributed.missing_ranks import STORE_SECONDS, in_a_line, key_of, say

SECONDS = 30.0
"""Time in seconds within which all other ranks must fail as well."""
_failures = 0
"""Number of runs that have failed on this rank."""
_watches: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
"""What the thread that watches for failures calls :func:`_watch` with, in order; None ends the thread."""
_threads: list[threading.Thread] = []
"""The watching thread, once it is started."""
_ends = threading.Event()
"""Set when the interpreter of this process ends."""


def prepare() -> None:
    """Start the thread that waits for failures in advance: without memory no thread can be started.

    Does nothing in a job of one rank, and at a second call.
    """
    import torch.distributed as dist

    if _threads or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _threads.append(threading.Thread(target=_work, name="ort_zero lone failures", daemon=True))
    _threads[0].start()
    atexit.register(_stop)


def _work() -> None:
    while (failure := _watches.get()) is not None and not _ends.is_set():  # a failure after the end has no effect
        _watch(*failure)


def _stop() -> None:
    """End the thread: a thread that calls the store while the interpreter ends aborts the process (status -6)."""
    _ends.set()
    _watches.put(None)
    _threads[0].join(STORE_SECONDS)


@contextmanager
def ended_unless_shared() -> Iterator[None]:
    """Run a block between two collectives of all ranks, raise its error, and end ranks if it fails on some only.

    The error of a collective was caused by the end of another rank.
    """
    global _failures
    try:
        yield
    except Exception as error:
        if _threads and not is_collective_error(error):
            import torch.distributed as dist

            _failures += 1
            # what the script may destroy next is read now
            _watches.put((default_store(), dist.get_rank(), dist.get_world_size(), _failures, in_a_line(error)))
        raise


def _watch(store: Any, rank: int, size: int, number: int, reason: str) -> None:
    """Return once all ranks have failed as often as this one, `number` times; else end this process for a reason."""
    deadline = time.monotonic() + SECONDS
    with suppress(Exception):  # an unreachable store means that its host, and so the job, has ended
        store.set(key_of(rank, "error"), reason)
        store.set(key_of(rank, "failures"), str(number))
        failures = [key_of(other, "failures") for other in range(size)]
        while not all(store.check([key]) and int(store.get(key)) >= number for key in failures):
            if time.monotonic() > deadline or _ends.wait(0.2):
                break
        else:
            store.delete_key(key_of(rank, "error"))
            return
    if not _ends.wait(max(0.0, deadline - time.monotonic())):
        say(
            f"this rank has failed, and others have not: {reason}; they wait for it in a collective, so that this "
            "process ends"
        )
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)  # without exit handlers, which may wait for the other ranks
