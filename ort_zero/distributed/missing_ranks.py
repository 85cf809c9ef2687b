"""Name the ranks that are gone when a collective fails and the process ends with that error.

Each rank notes its host and process in the store of the default process group. A rank that ends with an error of a
collective looks at the processes of its own host, and at what other ranks have written to the store.
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
from ort_zero.compat.torch_distributed import default_store, is_collective_error, record_for_torchrun
from ort_zero.errors import ConfigError
from ort_zero.utils.masking import masked

T = TypeVar("T")

SECONDS = 5.0
"""Time in seconds that a rank waits for reports from other hosts before it calls their ranks silent."""
STORE_SECONDS = 10.0
"""Time in seconds to wait for an answer of the store."""
_ENDING_SECONDS = 2.0
"""Time in seconds that a process may take to end after its connections are closed."""
_PRINTING_SECONDS = 2.0
"""Time in seconds that rank 0 may take to print an error: a launcher kills it once another rank has ended."""
_noted: list[Any] = []
"""The store with the last note of this process, if any."""


class _Rank(NamedTuple):
    """The note of one rank in the store."""

    number: int
    host: str
    process: int

    def __str__(self) -> str:
        return f"rank {self.number} ({self.host}, process {self.process})"


def note_this_rank() -> None:
    """Note this rank's host and process in the store, once; name missing ranks if it ends in a failed collective."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank = default_store(), dist.get_rank()
    if not _noted:
        sys.excepthook = _with_missing_ranks(sys.excepthook)
    elif _noted[0] is store:
        return
    _noted[:] = [store]
    for what in ("error", "failed", "failures"):  # the store may outlive a restart of the ranks
        store.delete_key(key_of(rank, what))
    store.set(key_of(rank, "at"), f"{socket.gethostname()} {os.getpid()}")


def key_of(rank: int, what: str) -> str:
    """Return the key of a rank's note: ``"at"`` (its place), ``"error"``, ``"failures"``, ``"failed"`` (missing)."""
    return f"ort_zero/ranks/{what}/{rank}"


def _with_missing_ranks(show: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``excepthook`` that also names the ranks that are missing."""

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, ConfigError):
            _show_config_error(error, lambda: show(kind, error, traceback))
            return
        show(kind, error, traceback)
        if is_collective_error(error):
            say(missing_ranks())
        else:
            _within(STORE_SECONDS, lambda: _store_error(in_a_line(error)))

    return hook


def say(text: str) -> None:
    """Print a line to stderr, with this rank and its host."""
    print(f"[ort_zero rank {env.rank()} on {socket.gethostname()}] {text}", file=sys.stderr, flush=True)


def in_a_line(error: BaseException) -> str:
    """Return the class and the first line of an error, with secrets masked."""
    first = (str(error).strip() or "no message").partition("\n")[0]
    return f"{type(error).__name__}: {masked(first)}"


def _show_config_error(error: ConfigError, show: Callable[[], Any]) -> None:
    """Show an error that all ranks have alike on rank 0 alone, its line last, and in torchrun's last lines."""
    import torch.distributed as dist

    text = in_a_line(error)
    if dist.get_rank() == 0:
        _within(STORE_SECONDS, lambda: _store_error(text))
        show()
        print(f"[ort_zero rank 0] {text}", file=sys.stderr, flush=True)
    elif _within(STORE_SECONDS, lambda: default_store().get(key_of(0, "error")).decode()) == text:
        time.sleep(_PRINTING_SECONDS)
    else:
        show()
    record_for_torchrun(text)


def _store_error(text: str) -> None:
    """Store this rank's error for the ranks that wait for it, unless an earlier error, the cause, is stored."""
    import torch.distributed as dist

    default_store().compare_set(key_of(dist.get_rank(), "error"), "", text)


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`, None if it fails or takes longer: a store on a failed host never answers."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, name="ort_zero missing ranks", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def missing_ranks() -> str:
    """Return a sentence that names the ranks that are gone, stopped or silent, as far as this rank can tell."""
    where = f"{os.environ.get('MASTER_ADDR', 'the first host')}:{os.environ.get('MASTER_PORT', '')}"
    down = f"a collective failed, and {where}, where the ranks meet, does not answer: that host or the network is down"
    return _within(SECONDS + STORE_SECONDS, _look) or down


def _look() -> str:
    """Return the sentence of :func:`missing_ranks`, and store what this rank sees for the others."""
    import torch.distributed as dist

    store = default_store()
    others = _read(store)
    silent = [other for other in others if other.host != socket.gethostname()]
    mine = key_of(dist.get_rank(), "failed")
    store.set(mine, "")
    begin, heard = time.monotonic(), dict[_Rank, str]()
    while (waited := time.monotonic() - begin) < SECONDS and (silent or waited < _ENDING_SECONDS):
        statements = _statements_on(others, store)
        if statements:
            store.set(mine, "; ".join(statements))
            return f"a collective failed: {'; '.join(statements)}"
        keys = {other: key for other in silent if store.check([key := key_of(other.number, "failed")])}
        heard = {other: store.get(key).decode() for other, key in keys.items()}
        reports = [f"{other} says: {text}" for other, text in heard.items() if text]
        if reports:
            return f"a collective failed: {'; '.join(reports)}"
        time.sleep(0.1)
    silent = [other for other in silent if other not in heard]
    if silent:
        why = "its host or the network to it is down, or it waits elsewhere"
        return f"a collective failed, and nothing was heard of {', '.join(map(str, silent))}: {why}"
    return "a collective failed, and no rank is known to be gone: see the errors of the other ranks"


def _read(store: Any) -> list[_Rank]:
    """Return the notes of the other ranks."""
    import torch.distributed as dist

    others = []
    for number in range(dist.get_world_size()):
        if number != dist.get_rank() and store.check([key := key_of(number, "at")]):
            host, _, process = store.get(key).decode().rpartition(" ")
            others.append(_Rank(number, host, int(process)))
    return others


def _statements_on(others: list[_Rank], store: Any) -> list[str]:
    """Return statements on the ranks that have failed, are gone or are stopped."""
    failed = {other: key for other in others if store.check([key := key_of(other.number, "error")])}
    statements = [f"{other} failed: {store.get(key).decode()}" for other, key in failed.items()]
    for what in ("gone", "stopped"):
        names = [str(other) for other in others if other not in failed and _state_here(other) == what]
        if names:
            statements.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {what}")
    return statements


def _state_here(other: _Rank) -> str | None:
    """Return "gone" or "stopped" if the process of a rank on this host is in that state, else None."""
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
