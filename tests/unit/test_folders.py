"""Where built code goes: the user's cache, or elsewhere where that cannot be written to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ort_zero import env
from ort_zero.compat import torch_extensions


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


def test_the_cache_lies_in_the_home(home):
    assert env.cache_dir() == env.user_cache_dir() == home / ".cache/ort_zero"


@pytest.mark.parametrize("case", ["read-only", "no home", "a file"])
def test_the_cache_lies_among_temporary_files_where_the_home_cannot_be_written_to(home, monkeypatch, request, case):
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


def test_torch_compiles_elsewhere_where_the_home_is_read_only(read_only, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    torch_extensions.prepare()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(env.cache_dir() / "torch_extensions")


def test_torch_compiles_where_it_did_and_a_choice_of_the_users_stays(home, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    torch_extensions.prepare()
    assert "TORCH_EXTENSIONS_DIR" not in os.environ
    os.environ["TORCH_EXTENSIONS_DIR"] = "/mine"
    torch_extensions.prepare()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/mine"


def test_the_ninja_beside_the_interpreter_is_found_behind_all_others(home, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": str(tmp_path)})
    monkeypatch.setattr(torch_extensions.sys, "executable", str(tmp_path / "bin/python"))
    (tmp_path / "bin").mkdir()
    torch_extensions.prepare()
    assert os.environ["PATH"] == str(tmp_path)
    (tmp_path / "bin/ninja").write_text("#!/bin/sh\n")
    (tmp_path / "bin/ninja").chmod(0o755)
    torch_extensions.prepare()
    assert os.environ["PATH"] == f"{tmp_path}{os.pathsep}{tmp_path / 'bin'}"


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
