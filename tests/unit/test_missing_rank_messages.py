"""What is said of ranks that a collective waited for, by what the store and the processes tell."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest
import torch

from ort_zero import env
from ort_zero.compat.torch_distributed import is_collective_error
from ort_zero.distributed import missing_ranks

HERE = socket.gethostname()


class Store(dict):
    """A store in this process."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]


@pytest.fixture
def store(monkeypatch) -> Store:
    found = Store()
    monkeypatch.setattr(missing_ranks, "default_store", lambda: found)
    monkeypatch.setattr(missing_ranks, "SECONDS", 0.3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    found.set("ort_zero/ranks/at/0", f"{HERE} {os.getpid()}")
    found.set("ort_zero/ranks/at/1", f"{HERE} {os.getpid()}")
    found.set("ort_zero/ranks/at/2", "far 12")
    found.set("ort_zero/ranks/at/3", "far 13")
    return found


def ended() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_process_of_this_host_that_is_gone_is_named_at_once(store):
    gone = ended()
    store.set("ort_zero/ranks/at/1", f"{HERE} {gone}")
    assert missing_ranks._look() == f"a collective failed: rank 1 ({HERE}, process {gone}) is gone"
    assert "is gone" in store["ort_zero/ranks/failed/0"].decode()


def test_a_process_may_end_a_moment_after_its_connections(store, monkeypatch):
    monkeypatch.setattr(missing_ranks, "SECONDS", 5.0)
    process = subprocess.Popen(["sleep", "0.3"])
    store.set("ort_zero/ranks/at/1", f"{HERE} {process.pid}")
    assert missing_ranks._look() == f"a collective failed: rank 1 ({HERE}, process {process.pid}) is gone"
    process.wait()


def test_a_rank_that_has_said_why_it_ended_is_quoted(store):
    store.set("ort_zero/ranks/at/1", f"{HERE} {ended()}")
    store.set("ort_zero/ranks/error/1", "MemoryError: no message")
    store.set("ort_zero/ranks/error/3", "RuntimeError: can't allocate memory")
    text = missing_ranks._look()
    assert "process" in text and "failed: MemoryError: no message" in text and "is gone" not in text
    assert "rank 3 (far, process 13) failed: RuntimeError: can't allocate memory" in text


def test_ranks_of_other_hosts_say_what_they_see(store):
    store.set("ort_zero/ranks/failed/2", "rank 3 (far, process 13) is gone")
    assert missing_ranks._look() == (
        "a collective failed: rank 2 (far, process 12) says: rank 3 (far, process 13) is gone"
    )


def test_silent_ranks_of_other_hosts_are_named(store):
    store.set("ort_zero/ranks/failed/2", "")
    assert "nothing was heard of rank 3 (far, process 13)" in missing_ranks._look()
    store.set("ort_zero/ranks/failed/3", "")
    assert "no rank is known to be gone" in missing_ranks._look()


def test_a_store_that_does_not_answer_is_named(store, monkeypatch):
    monkeypatch.setattr(missing_ranks, "_STORE_SECONDS", 0)
    monkeypatch.setattr(missing_ranks, "SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(missing_ranks, "_look", lambda: __import__("time").sleep(5))
    assert missing_ranks.missing_ranks().endswith("does not answer: that host or the network is down")
    monkeypatch.setattr(missing_ranks, "_noted", [store])
    monkeypatch.setattr(missing_ranks, "_remembered", {})
    missing_ranks.remember_ranks()
    assert missing_ranks.missing_ranks() == (
        "a collective failed, and node0:29500, where the ranks meet, does not answer: that host or the network is "
        "down; on other hosts than this one: rank 2 (far, process 12), rank 3 (far, process 13)"
    )
    monkeypatch.setattr(missing_ranks, "_NAMED", 1)
    assert missing_ranks.missing_ranks().endswith(": rank 2 (far, process 12) and 1 more")


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
