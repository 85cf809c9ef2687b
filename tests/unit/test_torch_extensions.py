"""Programs that DeepSpeed starts: what is missing is named by the doctor."""

from __future__ import annotations

from ort_zero.cli.examinations import machine as doctor
from ort_zero.compat import torch_extensions


def test_the_doctor_names_a_clang_that_would_compile_deepspeeds_operators(monkeypatch, tmp_path):
    for name in ("clang++-14", "g++-12"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert torch_extensions.unsuitable_compiler() is None
    (tmp_path / "c++").symlink_to("g++-12")
    assert torch_extensions.unsuitable_compiler() is None
    monkeypatch.setenv("CXX", "clang++-14")
    assert torch_extensions.unsuitable_compiler() == "clang++-14"
    monkeypatch.delenv("CXX")
    (tmp_path / "c++").unlink()
    (tmp_path / "c++").symlink_to("clang++-14")
    (what,) = (problem.what for problem in doctor.examine().problems if "clang" in problem.what)
    assert what == "DeepSpeed's operators for CPUs do not compile with c++, which is a clang"


def test_without_a_compiler_deepspeed_compiles_no_operator_on_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert torch_extensions.compiler() is None
    assert torch_extensions.missing_for_operators() == "C++ compiler"
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert torch_extensions.missing_for_operators() is None
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    assert torch_extensions.missing_for_operators() is None
    monkeypatch.setattr(torch_extensions.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert torch_extensions.missing_for_operators() == "header Python.h"
