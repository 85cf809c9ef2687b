"""Ranks that are gone or fail alone: what is said of them, and how they end."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from ort_zero import env
from ort_zero.compat.torch_distributed import is_collective_error

HERE = socket.gethostname()
MODULE = "ort_zero.distributed.missing_ranks"


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
    for rank, place in enumerate((f"{HERE} {os.getpid()}", f"{HERE} {os.getpid()}", "far 12", "far 13")):
        store.set(f"ort_zero/ranks/at/{rank}", place)
    return store


def test_a_process_of_this_host_that_is_gone_is_named_and_one_that_said_why_is_quoted(module, store):
    process = subprocess.Popen(["true"])
    process.wait()
    store.set("ort_zero/ranks/at/1", f"{HERE} {process.pid}")
    assert module.missing_ranks() == f"a collective failed: rank 1 ({HERE}, process {process.pid}) is gone"
    assert "is gone" in store.get("ort_zero/ranks/failed/0").decode()
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


class SilentStore:
    """A store on a host that is down: no request is answered before `over` is set, or a minute is over."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.over.wait(60)


def test_a_store_that_does_not_answer_is_named(module, store, monkeypatch):
    silent = SilentStore()
    monkeypatch.setattr(module, "STORE_SECONDS", 0)
    monkeypatch.setattr(module, "SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    module.note_this_rank()
    monkeypatch.setattr(module, "default_store", lambda: silent)
    said = module.missing_ranks()
    silent.over.set()
    assert said.startswith("a collective failed, and node0:29500, where the ranks meet, does not answer: that host or")


@pytest.mark.parametrize(("error", "wanted"), [
    (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4"), True),
    (RuntimeError("Timed out waiting 4000ms for recv operation to complete"), True),
    (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (ValueError("connection closed"), False),
])  # fmt: skip
def test_errors_of_collectives_are_told_from_others(error, wanted):
    assert is_collective_error(error) is wanted
    outer = ValueError("while training")
    outer.__cause__ = error
    assert is_collective_error(outer) is wanted


@pytest.mark.parametrize(("variables", "ranks", "several"), [
    ({}, 1, False),
    ({"WORLD_SIZE": "4"}, 1, False),
    ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 4, False),
    ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2, True),
    ({"WORLD_SIZE": "4", "LOCAL_SIZE": "2"}, 2, True),
    ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4, False),
    ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2, True),
])  # fmt: skip
def test_the_launcher_says_how_many_ranks_share_a_machine(monkeypatch, variables, ranks, several):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.local_world_size() == ranks
    assert env.several_hosts() is several


# -- a failure on one rank alone ---------------------------------------------------------------------------------------


ENDS_WHILE_IT_WATCHES = """
import contextlib, datetime, sys, time
import torch.distributed as dist
from ort_zero.distributed import lone_failures

class SlowStore:
    '''A store on a busy host: it answers after a moment, and no other rank has failed.'''

    def __init__(self):
        self.real = dist.FileStore(sys.argv[1], 2)

    def set(self, key, value):
        self.real.set(key, value)

    def check(self, keys):
        try:
            self.real.wait(["never there"], datetime.timedelta(seconds=0.05))
        except dist.DistStoreError:
            return False

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.get_world_size = lambda: 2
store = SlowStore()
lone_failures.default_store = lambda: store
lone_failures.prepare()
with contextlib.suppress(ValueError), lone_failures.ended_unless_shared():
    raise ValueError("mine alone")
time.sleep(0.3)
print("ends")
"""


@pytest.mark.seconds
def test_a_rank_that_ends_while_its_failure_is_watched_ends_with_its_own_status(tmp_path):
    command = [sys.executable, "-c", ENDS_WHILE_IT_WATCHES, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo] ")]  # torch 2.8 prints such lines
    assert (done.returncode, said) == (0, ["ends"]), done.stderr


# -- open files --------------------------------------------------------------------------------------------------------


SCRIPT = """
import os, resource, sys
from ort_zero.distributed.side_channel import allow_open_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
raised = allow_open_files(500)
assert allow_open_files(1) == raised, "a limit that is high enough stays"
print(raised, len([os.open(os.devnull, os.O_RDONLY) for _ in range(int(sys.argv[2]))]))
"""


def test_as_many_files_as_asked_for_can_be_opened_within_the_systems_own_bound():
    for hard, opened, at_least in ((4000, 500, 501), (300, 200, 300)):
        command = [sys.executable, "-c", SCRIPT, str(hard), str(opened)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        limit, found = map(int, done.stdout.split())
        assert at_least <= limit <= hard and found == opened
