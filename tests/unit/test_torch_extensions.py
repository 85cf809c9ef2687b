"""DeepSpeed's compiled operators: the compiler that is missing, and where built code goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ort_zero import env
from ort_zero.cli.examinations import machine as doctor
from ort_zero.compat import torch_extensions

# -- compilers ---------------------------------------------------------------------------------------------------------


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


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Give a home of its own, with no variable set that names a cache."""
    for name in ("ORT_ZERO_CACHE_DIR", "XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def read_only(home, monkeypatch):
    """Make the home read-only, as a file system is: root is refused too."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not Path(path).is_relative_to(home))
    return home


@pytest.mark.parametrize("case", ["read-only", "no home", "a file"])
def test_the_cache_lies_among_temporary_files_where_the_home_cannot_be_written_to(home, monkeypatch, request, case):
    assert env.cache_dir() == env.user_cache_dir() == home / ".cache/ort_zero"
    if case == "read-only":
        request.getfixturevalue("read_only")
    elif case == "a file":
        (home / ".cache").write_text("")
    else:
        monkeypatch.delenv("HOME")

        def no_home(path):
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "expanduser", no_home)
        assert env.user_cache_dir() is None
    assert env.cache_dir() == Path(tempfile.gettempdir()) / f"ort_zero-{os.geteuid()}"


def test_a_folder_that_the_user_names_is_never_replaced(read_only, monkeypatch):
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(read_only / "own"))
    assert env.cache_dir() == read_only / "own"


@pytest.fixture
def environment(monkeypatch) -> dict[str, str]:
    """Let what is set in the environment be set in a dict."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return os.environ


def test_torch_compiles_elsewhere_where_the_home_is_read_only(read_only, environment):
    torch_extensions.prepare()
    assert environment["TORCH_EXTENSIONS_DIR"] == str(env.cache_dir() / "torch_extensions")


def test_torch_compiles_where_it_did_and_a_choice_of_the_users_stays(home, environment):
    torch_extensions.prepare()
    assert "TORCH_EXTENSIONS_DIR" not in environment
    environment["TORCH_EXTENSIONS_DIR"] = "/mine"
    torch_extensions.prepare()
    assert environment["TORCH_EXTENSIONS_DIR"] == "/mine"


def test_the_ninja_beside_the_interpreter_is_found_behind_all_others(home, environment, monkeypatch, tmp_path):
    environment["PATH"] = str(tmp_path)
    monkeypatch.setattr(torch_extensions.sys, "executable", str(tmp_path / "bin/python"))
    (tmp_path / "bin").mkdir()
    torch_extensions.prepare()
    assert environment["PATH"] == str(tmp_path)
    (tmp_path / "bin/ninja").write_text("#!/bin/sh\n")
    (tmp_path / "bin/ninja").chmod(0o755)
    torch_extensions.prepare()
    assert environment["PATH"] == f"{tmp_path}{os.pathsep}{tmp_path / 'bin'}"


def test_torch_links_through_a_link_where_its_own_path_has_a_space(home, monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    package = tmp_path / "two words" / "torch"
    (package / "lib").mkdir(parents=True)
    spec = SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr(torch_extensions.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(package / "lib"))
    for _ in range(2):
        torch_extensions.prepare()
        assert " " not in cpp_extension.TORCH_LIB_PATH
        assert Path(cpp_extension.TORCH_LIB_PATH).resolve() == package / "lib"
