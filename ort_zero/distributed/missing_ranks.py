"""Names the ranks that are gone when a collective fails and the process ends with that error.

"Connection closed by peer" and "Timed out" do not say for whom a rank has waited. Each rank notes its host and process
in the store through which the ranks found each other. A rank that ends with an error of a collective looks at the
processes of its own host, asks the store for what ranks of other hosts have to say, and prints one line more, under the
traceback.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from ort_zero import env
from ort_zero.compat.torch_distributed import default_store, is_collective_error
from ort_zero.masking import masked

T = TypeVar("T")

SECONDS = 5.0
"""Time in seconds that a rank waits for those of other hosts before it calls them silent."""
_STORE_SECONDS = 10.0
"""Time in seconds after which a store that does not answer is given up."""
_ENDING_SECONDS = 2.0
"""Time in seconds that a process may take to end after its connections are closed."""
_PREFIX = "ort_zero/ranks"
"""The beginning of all keys. The store may outlive a restart of the ranks: each then clears its own keys."""
_noted: list[Any] = []
"""The store in which this process has noted itself last."""
_remembered: dict[int, _Rank] = {}
"""What other ranks had noted when this one last looked, for when the store is out of reach."""
_NAMED = 8
"""Largest number of ranks that may be out of reach and are named one by one."""


class _Rank(NamedTuple):
    """What a rank has noted of itself."""

    number: int
    host: str
    process: int

    def __str__(self) -> str:
        return f"rank {self.number} ({self.host}, process {self.process})"


def note_this_rank() -> None:
    """Let other ranks know where this one runs, and have it name those that are gone if it ends with their error.

    Does nothing on one rank, and at a second call.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank = default_store(), dist.get_rank()
    if not _noted:
        sys.excepthook = _with_missing_ranks(sys.excepthook)
    elif _noted[0] is store:
        return
    _noted[:] = [store]
    for key in (error_key(rank), f"{_PREFIX}/failed/{rank}", failures_key(rank)):
        store.delete_key(key)
    store.set(_place_key(rank), f"{socket.gethostname()} {os.getpid()}")


def remember_ranks() -> None:
    """Keep what other ranks have noted so far: where the store is on a host that is gone, nobody else can tell it.

    Does nothing before :func:`note_this_rank`.
    """
    if _noted:
        _remembered.update(_read(_noted[0]))


def _place_key(rank: int) -> str:
    return f"{_PREFIX}/at/{rank}"


def error_key(rank: int) -> str:
    """Return the key under which a rank leaves word of an error of its own."""
    return f"{_PREFIX}/error/{rank}"


def failures_key(rank: int) -> str:
    """Return the key under which a rank counts the failures of its own between two collectives."""
    return f"{_PREFIX}/failures/{rank}"


def _with_missing_ranks(show: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``excepthook`` that also names the ranks that are missing."""

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        show(kind, error, traceback)
        if is_collective_error(error):
            text = missing_ranks()
            print(f"[ort_zero rank {env.rank()} on {socket.gethostname()}] {text}", file=sys.stderr, flush=True)
        else:
            first = (str(error).strip() or "no message").partition("\n")[0]
            _within(_STORE_SECONDS, lambda: _say_why(f"{kind.__name__}: {masked(first)}"))

    return hook


def _say_why(text: str) -> None:
    """Leave word of an error of this rank's own for those that wait for it, unless an earlier one is its cause."""
    import torch.distributed as dist

    default_store().compare_set(error_key(dist.get_rank()), "", text)


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return what `work` returns, None if it fails or takes longer.

    A store whose host is gone answers nothing, and no timeout of torch ends every way of asking it.
    """
    found: list[T] = []

    def run() -> None:
        with suppress(Exception):
            found.append(work())

    thread = threading.Thread(target=run, name="ort_zero missing ranks", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def missing_ranks() -> str:
    """Return a sentence on which ranks are gone, stopped or silent, as far as this one can know.

    Takes up to :data:`SECONDS` if no rank of this host is gone, and :data:`_STORE_SECONDS` if the store is.
    """
    found = _within(SECONDS + _STORE_SECONDS, lambda: _look())
    if found is not None:
        return found
    where = f"{os.environ.get('MASTER_ADDR', 'the first host')}:{os.environ.get('MASTER_PORT', '')}"
    text = f"a collective failed, and {where}, where the ranks meet, does not answer: that host or the network is down"
    far = [str(other) for _, other in sorted(_remembered.items()) if other.host != socket.gethostname()]
    more = f" and {len(far) - _NAMED} more" if len(far) > _NAMED else ""
    return f"{text}; on other hosts than this one: {', '.join(far[:_NAMED])}{more}" if far else text


def _read(store: Any) -> dict[int, _Rank]:
    """Return what the other ranks have noted."""
    import torch.distributed as dist

    numbers = [number for number in range(dist.get_world_size()) if number != dist.get_rank()]
    if not store.check([_place_key(number) for number in numbers]):  # one request for all of them, as a rule
        numbers = [number for number in numbers if store.check([_place_key(number)])]
    others = {}
    for number, noted in zip(numbers, store.multi_get([_place_key(number) for number in numbers]), strict=True):
        host, _, process = noted.decode().rpartition(" ")
        others[number] = _Rank(number, host, int(process))
    return others


def _look() -> str:
    import torch.distributed as dist

    store, me = default_store(), dist.get_rank()
    others = _read(store)
    said = _known(store, others)
    deadline = time.monotonic() + min(SECONDS, _ENDING_SECONDS)
    while not said and time.monotonic() < deadline:
        time.sleep(0.1)
        said = _known(store, others)
    store.set(f"{_PREFIX}/failed/{me}", "; ".join(said))
    if said:
        return f"a collective failed: {'; '.join(said)}"
    return _hear(store, [other for other in others.values() if other.host != socket.gethostname()])


def _known(store: Any, others: dict[int, _Rank]) -> list[str]:
    """Return what is known of ranks that failed, are gone or stopped."""
    failed = {number: key for number in others if store.check([key := error_key(number)])}
    said = [f"{others[number]} failed: {store.get(key).decode()}" for number, key in failed.items()]
    for what in ("gone", "stopped"):
        ranks = [other for other in others.values() if other.number not in failed and _state_here(other) == what]
        said += [f"{_names(ranks)} {what}"] if ranks else []
    return said


def _names(ranks: list[_Rank]) -> str:
    return f"{', '.join(map(str, ranks))} {'is' if len(ranks) == 1 else 'are'}"


def _hear(store: Any, far: list[_Rank]) -> str:
    """Wait for what ranks of other hosts have to say, and return what follows from it."""
    deadline = time.monotonic() + SECONDS
    silent = list(far)
    reports: list[str] = []
    while silent and not reports and time.monotonic() < deadline:
        for other in list(silent):
            key = f"{_PREFIX}/failed/{other.number}"
            if store.check([key]):
                silent.remove(other)
                text = store.get(key).decode()
                reports += [f"{other} says: {text}"] if text else []
        time.sleep(0.1)
    if reports:
        return f"a collective failed: {'; '.join(reports)}"
    if silent:
        names = ", ".join(map(str, silent))
        why = "its host or the network to it is down, or it waits elsewhere"
        return f"a collective failed, and nothing was heard of {names}: {why}"
    return "a collective failed, and no rank is known to be gone: see the errors of the other ranks"


def _state_here(other: _Rank) -> str | None:
    """Return "gone" or "stopped" for a process of this host that is so, else None."""
    if other.host != socket.gethostname():
        return None
    try:
        with open(f"/proc/{other.process}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if os.path.isdir("/proc/self") else None
    except OSError:
        return None
    return {"Z": "gone", "X": "gone", "T": "stopped"}.get(state)
