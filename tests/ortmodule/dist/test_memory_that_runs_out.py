"""Memory that runs out on one rank in the middle of a gather, or a rank that the kernel kills for it, ends all ranks.

Two processes train under ZeRO-3. The limit of one is a limit of its address space, or a cgroup's.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes.ranks import run_script_on_ranks

SCRIPT = """
import os, resource, sys, time
import torch
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from deepspeed_setup import ds_config, start

import deepspeed
import ort_zero
from ort_zero.distributed import lone_failures

_, _, backend, whose, then = sys.argv
lone_failures.SECONDS = 4.0
rank = start()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 2000), torch.nn.Linear(2000, 6000), torch.nn.Linear(6000, 2))
config = ds_config(3, ort=backend == "ort", stage3_param_persistence_threshold=0)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

def step(rows):
    engine.backward(engine(torch.ones(rows, 16)).sum())
    engine.step()

def use_up_memory():
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (16 << 20), resource.RLIM_INFINITY))

for number in range(2):
    step(4)
if backend == "ort":
    (status,) = ort_zero.status()["models"]
    assert status["backend"] == "onnxruntime" and not status["fallbacks"], status
print("trained", flush=True)
if whose == "cgroup":
    if rank == 1:
        with open(os.path.join(os.environ["TEST_CGROUP"], "cgroup.procs"), "w") as file:
            file.write(str(os.getpid()))
    held = []
    while True:
        step(4)
        held.append(torch.ones(1 << 24) if rank == 1 else 0)
if whose == "all" or rank == 1:
    use_up_memory()
try:
    step(8000)  # what a step of 4 rows takes is kept from the one before
except Exception as error:
    print("failed:", type(error).__name__, error, flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if then == "raise":
        raise
    engine.optimizer.zero_grad()
    step(4)
    time.sleep(6)
    step(4)
    print("goes on", flush=True)
"""
TOO_LITTLE = re.compile(r"memory|alloc", re.I)


def train(tmp_path: Path, backend: str, whose: str, then: str, **env: str) -> list:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    begin = time.monotonic()
    found = run_script_on_ranks(script, 2, __file__, backend, whose, then, timeout=120, fresh=True, env=env)
    print(f"{time.monotonic() - begin:.1f} s")
    for one in found:
        print(one.stdout, one.stderr[-3000:], sep="\n----\n")
        assert "trained" in one.stdout
    return found


@pytest.mark.parametrize(("backend", "then"), [("ort", "raise"), ("ort", "go on"), ("torch", "go on")])
def test_of_one_rank_ends_all_with_the_reason(tmp_path: Path, backend: str, then: str) -> None:
    first, second = train(tmp_path, backend, "one", then)
    assert first.returncode == 1 and second.returncode == 1, (first.returncode, second.returncode)
    reason = re.search(r"^failed: (.*)$", second.stdout, re.M)
    assert reason and TOO_LITTLE.search(reason[1])
    line = re.search(r"\[ort_zero rank 0 on .*\] a collective failed: rank 1 \(.*\) failed: (.*)", first.stderr)
    assert line and TOO_LITTLE.search(line[1])
    if backend == "ort":  # DeepSpeed's own gathers are not in a state to go on after an error
        assert ("this rank has failed, and others have not" in second.stderr) == (then == "go on")


def test_of_all_ranks_lets_training_go_on(tmp_path: Path) -> None:
    for one in train(tmp_path, "ort", "all", "go on"):
        assert one.returncode == 0 and TOO_LITTLE.search(one.stdout) and "goes on" in one.stdout


@contextlib.contextmanager
def limited_group() -> Iterator[Path]:
    """Make a cgroup whose processes may have 300 MiB; skip where this system lets nobody make one."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"ort_zero_test_{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(300 << 20))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no cgroup with a limit of memory can be made here: needs root and a writable /sys/fs/cgroup")


def test_a_rank_that_the_kernel_kills_is_named(tmp_path: Path) -> None:
    with limited_group() as group:
        first, second = train(tmp_path, "ort", "cgroup", "", TEST_CGROUP=str(group))
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert second.returncode == -9 and first.returncode == 1, (first.returncode, second.returncode)
    assert re.search(r"a collective failed: rank 1 \(.*, process \d+\) is gone", first.stderr)
