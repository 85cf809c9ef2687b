"""Functions on several ranks: results, failures and ends, of new interpreters and of forked ones."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rank_processes.ranks import run_on_ranks


def fail_on_one():
    """Fail on rank 1 while the others wait for it."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        raise ValueError("the data of this rank is bad")
    dist.barrier()


def wait_for_nobody():
    """Sleep on one rank for longer than anybody waits."""
    if os.environ["RANK"] == "1":
        time.sleep(600)


def die():
    """End rank 0 the way the kernel does when memory runs out."""
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def build_for_ever():
    """Hold what torch holds while it builds a C++ extension."""
    lock = Path(os.environ["TORCH_EXTENSIONS_DIR"], "py", "an_op", "lock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    another = lock.parents[1] / "built_beside"
    another.mkdir()
    holds = f"exec 3> {another / 'lock'}; echo $$ > {another / 'process'}; sleep 600"
    subprocess.Popen(["sh", "-c", holds], start_new_session=True)  # as a launch beside this one
    if os.environ["RANK"] == "0":
        time.sleep(600)


@pytest.mark.parametrize(
    "target, said",
    [
        (fail_on_one, "rank 1 of 2 failed(.|\n)*fail_on_one(.|\n)*data of this rank is bad"),
        (die, "rank 0 of 2 was ended by SIGKILL"),
        (wait_for_nobody, r"ranks \[1\] of 2 did not finish within 6 s(.|\n)*wait_for_nobody"),
    ],
    ids=["fails", "is killed", "waits"],
)
def test_an_error_names_the_rank_and_where_it_was(target, said):
    with pytest.raises(RuntimeError, match=said):
        run_on_ranks(target, 2, timeout=6 if target is wait_for_nobody else 400)


def test_a_killed_rank_leaves_no_lock_of_a_build(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "py" / "other").mkdir(parents=True)
    (tmp_path / "py" / "other" / "lock").touch()  # somebody else's
    with pytest.raises(RuntimeError, match="did not finish"):
        run_on_ranks(build_for_ever, 1, timeout=3, fresh=True)
    assert (tmp_path / "py" / "an_op").is_dir()
    os.killpg(int((tmp_path / "py" / "built_beside" / "process").read_text()), signal.SIGKILL)
    assert sorted(lock.parent.name for lock in tmp_path.rglob("lock")) == ["built_beside", "other"]
