"""DeepSpeed's C++ operators: a lock that a killed build has left, and a machine without a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rank_processes.ranks import free_port
from torch.utils.file_baton import FileBaton

from ort_zero.cli.examinations import machine as doctor
from ort_zero.compat import torch_extensions, versions
from ort_zero.runtimes import registry
from ort_zero.utils.patching import PatchSet

pytestmark = pytest.mark.skipif(versions.installed("deepspeed") is None, reason="deepspeed is not installed")
# as torch does: the file exists, and is open, as long as the operator is compiled
HOLDING = (
    "import sys; from torch.utils.file_baton import FileBaton; FileBaton(sys.argv[1]).try_acquire(); print(); input()"
)


@pytest.fixture
def lock(tmp_path, monkeypatch) -> Path:
    """The path of an operator's lock, in the folder of this test for extensions."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "deepspeed_shm_comm").mkdir()
    return tmp_path / "deepspeed_shm_comm" / "lock"


@pytest.fixture
def building(lock):
    """A process that holds the lock, as a build does; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_whoever_waits_reads_for_what_and_doctor_finds_the_lock_of_a_killed_build(lock, building, monkeypatch, capsys):
    monkeypatch.setattr(torch_extensions, "_SILENT_SECONDS", 0.3)
    is_applied = "compiled operators" in registry.patch_sets  # by the plugin, if a test before has enabled it
    registry.restore("compiled operators")
    patches = PatchSet("compiled operators", torch_extensions.patches())
    patches.apply()
    try:
        held = said_while_waiting(lock, capsys)
        made = time.strftime("%H:%M:%S", time.localtime(lock.stat().st_mtime))
        assert f"WARNING waiting for {lock} of {made}: process {building.pid} (" in held
        assert re.search(r" holds the file, and [\w+ ]+ runs$", held.rstrip()) and "rm " not in held
        assert torch_extensions.unheld_locks() == []
        building.kill()
        building.wait()
        left = said_while_waiting(lock, capsys)
        assert (
            "ERROR waiting" in left
            and "no process of this machine holds the file" in left
            and left.rstrip().endswith(f"rm {lock}")
        )
    finally:
        patches.restore()
        if is_applied:
            registry.apply("compiled operators", torch_extensions.patches)
    (problem,) = [each for each in doctor.examine().problems if str(lock) in each.what]
    subprocess.run(problem.fix, shell=True, check=True)
    assert not lock.exists() and not any(str(lock) in each.what for each in doctor.examine().problems)


def said_while_waiting(lock: Path, capsys: pytest.CaptureFixture) -> str:
    """Return what a process says that waits for the lock, until its first message; the lock stays."""
    baton = FileBaton(str(lock))
    aside = lock.with_name("aside")
    waiting = threading.Thread(target=baton.wait)
    waiting.start()
    said, end = "", time.monotonic() + 20
    while "\n" not in said and time.monotonic() < end:
        time.sleep(0.1)
        said += capsys.readouterr().err
    lock.rename(aside)
    waiting.join(timeout=20)
    assert not waiting.is_alive()
    aside.rename(lock)
    return said


ENGINE = """
import deepspeed, torch
model = torch.nn.Linear(2, 2)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "ort_zero": {}}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
"""


def test_one_rank_without_a_compiler_reads_the_way_out_before_deepspeeds_error(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ninja").symlink_to(Path(sys.executable).with_name("ninja"))
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    environment |= {
        "PATH": str(programs),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "DS_ACCELERATOR": "cpu",
    }
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", ENGINE], env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    ours, _, theirs = done.stderr.partition("Traceback")
    assert done.returncode and "deepspeed_shm_comm" in theirs
    assert "no C++ compiler, and DeepSpeed compiles its operator deepspeed_shm_comm" in ours
    assert "apt-get install g++" in ours
