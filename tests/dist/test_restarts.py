"""Ranks and launchers that are killed in a training: torchrun starts again, with as many ranks as are left.

What comes out is what an uninterrupted training computes, within 1e-5.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rank_processes.ranks import free_port

SCRIPT = Path(__file__).with_name("resuming_training.py")
ROOT = Path(__file__).parents[2]
LIMIT = 150
"""Seconds in which ranks must have started, or ended."""


def agent(folder: Path, *words: object, name: str = "agent") -> subprocess.Popen:
    """Start torchrun, which prints into ``folder/name.log``."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": paths,
                "DS_ACCELERATOR": "cpu",
                # else ranks find the addresses of those before them in the store (torch 2.13)
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            start_new_session=True,
        )


@contextlib.contextmanager
def ended_with(*agents: subprocess.Popen) -> Iterator[None]:
    """End the sessions of launchers and ranks with the block."""
    try:
        yield
    finally:
        for one in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def wait_for(condition: Callable[[], object], folder: Path) -> None:
    """Wait until something is so; after :data:`LIMIT` seconds show what the launchers printed."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        texts = [f"{path}:\n{path.read_text()[-4000:]}" for path in folder.glob("*.log")]
        assert time.monotonic() < deadline, "\n".join(texts)
        time.sleep(0.02)


def losses(folder: Path) -> list[tuple[int, int, int, float]]:
    """Return (process of rank 0, world size, step, loss) of each step that was made."""
    path = folder / "losses"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [line.split() for line in lines if line.endswith("\n")]
    return [(int(process), int(world), int(step), float(loss)) for process, world, step, loss in rows]


def processes(folder: Path, rank: int) -> list[int]:
    """Return the processes that were a rank, the newest last."""
    names = sorted(path.name.split("_") for path in (folder / "started").glob("*"))
    return [int(process) for _, number, process in names if int(number) == rank]


def uninterrupted(folder: Path, steps: int) -> None:
    """Train on one rank without an interruption."""
    alone = agent(folder, "--standalone", "--nproc_per_node", 1, SCRIPT, folder, steps, "--every", steps)
    with ended_with(alone):
        wait_for(lambda: alone.poll() is not None, folder)
        assert alone.returncode == 0, (folder / "agent.log").read_text()[-4000:]


def same_as(expected: Path, found: Path, steps: int) -> None:
    """Compare each step's loss, also of steps made twice, and the parameters at the end."""
    wanted = {step: loss for _, _, step, loss in losses(expected)}
    assert len(wanted) == steps and abs(wanted[1] - wanted[steps]) > 0.01
    rows = losses(found)
    assert {step for _, _, step, _ in rows} == set(wanted)
    for _, world, step, loss in rows:
        assert loss == pytest.approx(wanted[step], abs=1e-5), (world, step)
    one, other = (torch.load(folder / "parameters.pt") for folder in (expected, found))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5, msg=name)


def test_restarts_with_as_many_ranks_as_are_left(tmp_path: Path) -> None:
    """A rank is killed and starts again; then a host is gone, and the other goes on at world size 1."""
    steps, found = 9, tmp_path / "found"
    uninterrupted(tmp_path / "expected", steps)
    words = ["--nnodes", "1:2", "--nproc_per_node", 1, "--max-restarts", 5, "--rdzv_backend", "c10d",
             "--rdzv_endpoint", f"localhost:{free_port()}", "--rdzv_id", "t",
             "--rdzv_conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120",
             SCRIPT, found, steps, "--pause", 0.3, "--fails", "1:3", "--every", 2]  # fmt: skip
    first = agent(found, *words, name="first")
    time.sleep(1)  # it is the one where the ranks meet
    second = agent(found, *words, name="second")
    with ended_with(first, second):
        wait_for(lambda: (found / "failed").exists() and any(step > 4 for *_, step, _ in losses(found)), found)
        os.killpg(second.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # torchrun gives each rank a session of its own
            os.kill(processes(found, 1)[-1], signal.SIGKILL)
        wait_for(lambda: first.poll() is not None, found)
    text = (found / "first.log").read_text()
    assert first.returncode == 0, text[-4000:]
    worlds = [world for _, world, *_ in losses(found)]
    assert worlds[0] == 2 and worlds[-1] == 1 and len({process for process, *_ in losses(found)}) > 2, losses(found)
    same_as(tmp_path / "expected", found, steps)
    text += (found / "second.log").read_text()
    assert re.search(r"a collective failed: rank 1 \(.*, process \d+\) is gone", text), text[-4000:]


@pytest.mark.slow
def test_grows_by_a_host_that_comes_later(tmp_path: Path) -> None:
    """One rank trains; a second host joins, and torchrun starts both with world size 2."""
    steps, found = 60, tmp_path / "found"
    uninterrupted(tmp_path / "expected", steps)
    words = ["--nnodes", "1:2", "--nproc_per_node", 1, "--max-restarts", 5, "--rdzv_backend", "c10d",
             "--rdzv_endpoint", f"localhost:{free_port()}", "--rdzv_id", "t", "--monitor-interval", 1,
             "--rdzv_conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120",
             SCRIPT, found, steps, "--pause", 0.5, "--every", 2]  # fmt: skip
    first = agent(found, *words, name="first")
    with ended_with(first):
        wait_for(lambda: any(step > 2 for *_, step, _ in losses(found)), found)
        second = agent(found, *words, name="second")
        with ended_with(second):
            wait_for(lambda: first.poll() is not None and second.poll() is not None, found)
    text = (found / "first.log").read_text()
    assert first.returncode == second.returncode == 0, text[-6000:]
    worlds = [world for _, world, *_ in losses(found)]
    assert worlds[0] == 1 and worlds[-1] == 2 and worlds == sorted(worlds), losses(found)
    same_as(tmp_path / "expected", found, steps)
