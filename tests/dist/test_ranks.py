"""Functions on several ranks: results, failures and ends, of new interpreters and of forked ones."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_processes.ranks import run_on_ranks, run_script_on_ranks


def begun(farewell):
    """Return how this rank began, and leave a file behind at its end."""
    loaded = "deepspeed" in sys.modules
    atexit.register(Path(farewell).write_text, "good-bye")
    return {
        "loaded": loaded,
        "folder": os.getcwd(),
        "cache": os.environ["ORT_ZERO_CACHE_DIR"],
        "leads": os.getsid(0) == os.getpid(),
    }


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


def rank_and(value):
    """Return what a launcher would have set."""
    return [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")], value


@pytest.mark.parametrize("fresh", [True, False])
def test_results_come_in_the_order_of_ranks(fresh):
    assert run_on_ranks(rank_and, 2, {"a": 1}, timeout=200, fresh=fresh) == [
        (["0", "0", "2", "2"], {"a": 1}),
        (["1", "1", "2", "2"], {"a": 1}),
    ]


def test_a_script_runs_as_main(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nassert __name__ == '__main__'\nprint(sys.argv[1:])\nsys.exit('bad')\n")
    for rank in run_script_on_ranks(script, 2, 3, timeout=200):
        assert (rank.returncode, rank.stdout, rank.stderr) == (1, "['3']\n", "bad\n")


@pytest.mark.parametrize(
    "target, said",
    [
        (fail_on_one, "rank 1 of 2 failed(.|\n)*fail_on_one(.|\n)*data of this rank is bad"),
        (die, "rank 0 of 2 was ended by SIGKILL"),
        (wait_for_nobody, r"ranks \[1\] of 2 did not finish within 6 s(.|\n)*wait_for_nobody"),
    ],
    ids=["fails", "is killed", "waits"],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_an_error_names_the_rank_and_where_it_was(target, said, fresh):
    with pytest.raises(RuntimeError, match=said):
        run_on_ranks(target, 2, timeout=6 if target is wait_for_nobody else 400, fresh=fresh)


def test_a_killed_rank_leaves_no_lock_of_a_build(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "py" / "other").mkdir(parents=True)
    (tmp_path / "py" / "other" / "lock").touch()  # somebody else's
    with pytest.raises(RuntimeError, match="did not finish"):
        run_on_ranks(build_for_ever, 1, timeout=3, fresh=True)
    assert (tmp_path / "py" / "an_op").is_dir()
    os.killpg(int((tmp_path / "py" / "built_beside" / "process").read_text()), signal.SIGKILL)
    assert sorted(lock.parent.name for lock in tmp_path.rglob("lock")) == ["built_beside", "other"]


def test_a_function_that_no_other_process_can_find_is_refused():
    with pytest.raises(ValueError, match="not at the top level"):
        run_on_ranks(lambda: None, 1)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_rank_is_a_process_of_its_own(tmp_path, monkeypatch, fresh):
    monkeypatch.chdir(tmp_path)
    env = {"ORT_ZERO_CACHE_DIR": str(tmp_path / "cache")}
    (found,) = run_on_ranks(begun, 1, str(tmp_path / "end"), timeout=400, env=env, fresh=fresh)
    assert found["loaded"] is not fresh, "a rank has been forked, or not, against what was asked for"
    assert found["folder"] == str(tmp_path) and found["cache"] == str(tmp_path / "cache") and found["leads"]
    assert (tmp_path / "end").read_text() == "good-bye"


def test_an_environment_of_its_own_begins_afresh(tmp_path, monkeypatch):
    env = {"ORT_ZERO_CACHE_DIR": str(tmp_path), "OF_THIS_LAUNCH": "1"}
    assert not run_on_ranks(begun, 1, str(tmp_path / "end"), timeout=400, env=env)[0]["loaded"]
    monkeypatch.setenv("SET_BY_A_LIBRARY", "1")
    del env["OF_THIS_LAUNCH"]
    assert run_on_ranks(begun, 1, str(tmp_path / "end"), timeout=400, env=env)[0]["loaded"]
