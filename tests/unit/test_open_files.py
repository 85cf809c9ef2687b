"""The limit of open files is raised for many connections, and never lowered."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

SCRIPT = """
import os, resource, sys
from ort_zero.distributed.side_channel import allow_open_files
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
print(allow_open_files(500), len([os.open(os.devnull, os.O_RDONLY) for _ in range(int(sys.argv[2]))]))
"""


def test_as_many_files_as_asked_for_can_be_opened_within_the_systems_own_bound():
    for hard, opened, at_least in ((4000, 500, 501), (300, 200, 300)):
        command = [sys.executable, "-c", SCRIPT, str(hard), str(opened)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        limit, found = map(int, done.stdout.split())
        assert at_least <= limit <= hard and found == opened


def test_a_limit_that_is_high_enough_stays():
    from ort_zero.distributed.side_channel import allow_open_files

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert before[0] - len(os.listdir("/proc/self/fd")) > 300
    assert allow_open_files(1) == before[0] and resource.getrlimit(resource.RLIMIT_NOFILE) == before
