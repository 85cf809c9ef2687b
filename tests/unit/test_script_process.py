"""A script that is run with a request: its reports are read, and nothing of it outlives the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ort_zero.errors import ConfigError
from ort_zero.utils import script_process
from ort_zero.utils.script_process import command_line, run_with_request

REPORTS = """
import json, os, sys, time
request = json.load(open(os.environ["ASKED"]))
for rank in (10, 0, 2):
    open(f"{request['report']}.{rank}", "w").write(json.dumps([request["steps"], rank]))
print("said", *sys.argv[1:], flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("sleeps", "status"), [("0", 0), ("60", 0), ("no number", 1)])
def test_reports_come_in_the_order_of_ranks_and_a_script_that_goes_on_is_ended(monkeypatch, sleeps, status):
    monkeypatch.setattr(script_process, "GRACE_SECONDS", 0.5)
    command = [sys.executable, "-c", REPORTS, sleeps]
    done = run_with_request(command, "ASKED", {"steps": 3}, lambda reports: len(reports) == 3)
    assert done.status == status and done.reports == [[3, 0], [3, 2], [3, 10]]
    assert done.tail[0] == f"said {sleeps}" and (status == 0 or done.tail[-1].startswith("ValueError"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_script_ends_with_the_command(tmp_path: Path, number: int):
    script = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from ort_zero.utils.script_process import run_with_request as run\n"
        "run([sys.executable, '-c', sys.argv[1], sys.argv[2]], 'ASKED', {})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, script, tmp_path / "pid"], stderr=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(timeout=30) == (143 if number == signal.SIGTERM else -signal.SIGINT)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("words", ["", "deepspeed 'x"])
def test_a_launcher_that_is_no_command_is_refused(words):
    with pytest.raises(ConfigError, match="--launcher"):
        command_line(Path(__file__), (), words)
