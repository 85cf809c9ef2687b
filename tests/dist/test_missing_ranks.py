"""A rank that is killed or stopped is named by those that waited for it, with its host and process."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from ort_zero.testing.ranks import run_script_on_ranks

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
