"""A rank that failed alone and then ends by itself: its watching thread must be gone before the interpreter is."""

import subprocess
import sys

import pytest

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
