"""What is said of ranks that a collective waited for, by what the store and the processes tell."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from ort_zero import env
from ort_zero.compat.torch_distributed import is_collective_error

HERE = socket.gethostname()
MODULE = "ort_zero.distributed.missing_ranks"


class SilentStore:
    """A store on a host that is down: no request is answered before `over` is set, or a minute is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.over.wait(60)


@pytest.fixture
def module(monkeypatch) -> ModuleType:
    """Return the module as a new process has it: it knows no store and no ranks yet."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(fresh, "SECONDS", 0.3)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return fresh


@pytest.fixture
def store(module, monkeypatch) -> torch.distributed.HashStore:
    """Return the store of four ranks: this one, one more on this host, and two on another."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(module, "default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    store.set("ort_zero/ranks/at/0", f"{HERE} {os.getpid()}")
    store.set("ort_zero/ranks/at/1", f"{HERE} {os.getpid()}")
    store.set("ort_zero/ranks/at/2", "far 12")
    store.set("ort_zero/ranks/at/3", "far 13")
    return store


@pytest.fixture
def silent() -> Iterator[SilentStore]:
    store = SilentStore()
    yield store
    store.over.set()


def ended() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_process_of_this_host_that_is_gone_is_named_at_once(module, store):
    gone = ended()
    store.set("ort_zero/ranks/at/1", f"{HERE} {gone}")
    assert module.missing_ranks() == f"a collective failed: rank 1 ({HERE}, process {gone}) is gone"
    assert "is gone" in store.get("ort_zero/ranks/failed/0").decode()


def test_a_rank_that_has_said_why_it_ended_is_quoted(module, store):
    store.set("ort_zero/ranks/at/1", f"{HERE} {ended()}")
    store.set("ort_zero/ranks/error/1", "MemoryError: no message")
    store.set("ort_zero/ranks/error/3", "RuntimeError: can't allocate memory")
    text = module.missing_ranks()
    assert "process" in text and "failed: MemoryError: no message" in text and "is gone" not in text
    assert "rank 3 (far, process 13) failed: RuntimeError: can't allocate memory" in text


def test_ranks_of_other_hosts_say_what_they_see(module, store):
    store.set("ort_zero/ranks/failed/2", "rank 3 (far, process 13) is gone")
    assert module.missing_ranks() == (
        "a collective failed: rank 2 (far, process 12) says: rank 3 (far, process 13) is gone"
    )


def test_a_store_that_does_not_answer_is_named(module, store, silent, monkeypatch):
    monkeypatch.setattr(module, "STORE_SECONDS", 0)
    monkeypatch.setattr(module, "SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    module.note_this_rank()
    monkeypatch.setattr(module, "default_store", lambda: silent)
    assert module.missing_ranks() == (
        "a collective failed, and node0:29500, where the ranks meet, does not answer: that host or the network is down"
    )


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4"), True),
        (RuntimeError("Timed out waiting 4000ms for recv operation to complete"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed"), False),
    ],
)
def test_errors_of_collectives_are_told_from_others(error, wanted):
    assert is_collective_error(error) is wanted
    outer = ValueError("while training")
    outer.__cause__ = error
    assert is_collective_error(outer) is wanted


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({}, False),
        ({"WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, True),
        ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True),
    ],
)
def test_the_launcher_says_whether_there_are_several_hosts(monkeypatch, variables, several):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.several_hosts() is several
