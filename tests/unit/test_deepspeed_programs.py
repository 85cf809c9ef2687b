"""Programs that DeepSpeed starts: what is missing is named by the doctor."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from ort_zero import doctor
from ort_zero.compat import deepspeed_programs

PLAIN = "def get_numa_cores():\n    return subprocess.check_output(['numactl', '--hardware'])\n"
GUARDED = (
    "def get_numa_cores():\n    try:\n        return subprocess.check_output(['numactl'])\n"
    "    except OSError:\n        return []\n"
)


@pytest.fixture
def deepspeed_with(tmp_path, monkeypatch):
    """Let another source stand for the module of DeepSpeed that counts NUMA nodes."""

    class Distribution:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    def install(source: str) -> None:
        file = tmp_path / "deepspeed/utils/numa.py"
        file.parent.mkdir(parents=True)
        file.write_text(source)
        monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())

    return install


def test_a_deepspeed_that_fails_without_numactl_names_it(deepspeed_with, monkeypatch):
    deepspeed_with(PLAIN)
    monkeypatch.setenv("PATH", "")
    assert deepspeed_programs.missing_program() == "numactl"


def test_the_doctor_names_it(monkeypatch):
    monkeypatch.setattr(deepspeed_programs, "missing_program", lambda: "numactl")
    problems = [(problem.what, problem.fix) for problem in doctor.examine().problems]
    assert ("this DeepSpeed needs the program numactl on CPUs", "apt-get install numactl") in problems


@pytest.mark.parametrize("source", [GUARDED, "", "def get_numa_cores(:"])
def test_one_that_goes_on_without_it_needs_nothing(deepspeed_with, monkeypatch, source):
    deepspeed_with(source)
    monkeypatch.setenv("PATH", "")
    assert deepspeed_programs.missing_program() is None


def test_with_the_program_nothing_is_missing(deepspeed_with, monkeypatch, tmp_path):
    deepspeed_with(PLAIN)
    program = tmp_path / "numactl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert deepspeed_programs.missing_program() is None


def test_the_doctor_names_a_clang_that_would_compile_deepspeeds_operators(monkeypatch, tmp_path):
    for name in ("clang++-14", "g++-12"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert deepspeed_programs.unsuitable_compiler() is None
    (tmp_path / "c++").symlink_to("g++-12")
    assert deepspeed_programs.unsuitable_compiler() is None
    monkeypatch.setenv("CXX", "clang++-14")
    assert deepspeed_programs.unsuitable_compiler() == "clang++-14"
    monkeypatch.delenv("CXX")
    (tmp_path / "c++").unlink()
    (tmp_path / "c++").symlink_to("clang++-14")
    (what,) = (problem.what for problem in doctor.examine().problems if "clang" in problem.what)
    assert what == "DeepSpeed's operators for CPUs do not compile with c++, which is a clang"


def test_without_a_compiler_deepspeed_compiles_no_operator_on_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert deepspeed_programs.compiler() is None
    assert deepspeed_programs.missing_for_operators() == "C++ compiler"
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert deepspeed_programs.missing_for_operators() is None
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    assert deepspeed_programs.missing_for_operators() is None
    monkeypatch.setattr(deepspeed_programs.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert deepspeed_programs.missing_for_operators() == "header Python.h"
