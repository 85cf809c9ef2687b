"""A rank that is killed or stopped is named by those that waited for it, with its host and process."""

from __future__ import annotations

import datetime
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_processes.ranks import run_on_ranks, run_script_on_ranks

SCRIPT = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
from ort_zero.distributed.missing_ranks import note_this_rank

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
note_this_rank()
note_this_rank()
pids = [None] * dist.get_world_size()
dist.all_gather_object(pids, os.getpid())
print("pids", *pids, flush=True)
if dist.get_rank() == 1:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
try:
    dist.all_reduce(torch.ones(1))
finally:
    if sys.argv[1] == "SIGSTOP" and dist.get_rank() == 0:
        hook, own = sys.excepthook, pids[1]
        def wake(*args):
            hook(*args)
            os.kill(own, signal.SIGKILL)
        sys.excepthook = wake
"""


@pytest.mark.parametrize(("name", "state"), [("SIGKILL", "gone"), ("SIGSTOP", "stopped")])
def test_the_rank_that_does_not_answer_is_named(tmp_path: Path, name: str, state: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    first, second = run_script_on_ranks(script, 2, name, timeout=100, fresh=True)
    assert first.returncode == 1 and second.returncode == -9, (first, second)
    pid = first.stdout.split()[2]
    host = re.escape(socket.gethostname())
    line = rf"\[ort_zero rank 0 on {host}\] a collective failed: rank 1 \({host}, process {pid}\) is {state}"
    assert re.search(line, first.stderr), first.stderr
    assert first.stderr.count("a collective failed") == 1 and "Traceback" in first.stderr


def save_alone(folder: str) -> dict[str, Any]:
    """Let rank 0 save alone, before all ranks have saved together and after; return its errors, and whether all can."""
    import deepspeed
    import torch.distributed as dist
    from checkpoint_engines import engine_of, outcome

    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=5))
    engine = engine_of(2)
    found = {}

    def alone(which: str, action: Callable[[], Any]) -> None:
        """Let rank 0 alone do this, while rank 1 waits for a file: its collectives would end at the limit too."""
        done = Path(folder, which)
        if dist.get_rank() == 0:
            found[which] = outcome(action)
            done.touch()
        while not done.exists():
            time.sleep(0.1)

    alone("first", lambda: engine.save_checkpoint(folder, tag="alone"))
    engine.save_checkpoint(folder, tag="together")
    alone("later", lambda: engine.load_checkpoint(folder, tag="together"))
    return found


def test_a_save_or_load_on_one_rank_alone_ends_at_the_limit_of_the_process_group(tmp_path: Path) -> None:
    found, _ = run_on_ranks(save_alone, 2, str(tmp_path), timeout=200)
    for which in ("first", "later"):
        assert found[which]["type"] == "CheckpointError" and "called on all ranks" in found[which]["text"], found
        assert 4 < found[which]["seconds"] < 40, found
    assert not (tmp_path / "alone").exists() and (tmp_path / "together" / "manifest.json").exists()
