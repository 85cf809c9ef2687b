"""Where the C++ extensions of ORTModule lie: the user's cache, or elsewhere where that cannot be written to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ort_zero import env
from ort_zero.ortmodule.compat import extensions


@pytest.fixture
def read_only_home(tmp_path, monkeypatch) -> Path:
    """Return a new home that is read-only, as a file system is: root is refused too."""
    for name in ("ORT_ZERO_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    home, access = tmp_path / "home", os.access
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and not Path(path).is_relative_to(home))
    return home


def test_extensions_that_were_built_before_are_used_from_a_read_only_home(read_only_home):
    elsewhere = extensions.built_paths()
    assert all(path.is_relative_to(env.cache_dir()) for path in elsewhere.values())
    assert not env.cache_dir().is_relative_to(read_only_home) and not extensions.is_built()
    built = read_only_home / ".cache/ort_zero/extensions" / extensions.extension_dir().name
    built.mkdir(parents=True)
    for path in elsewhere.values():
        (built / path.name).write_text("")
    assert not extensions.is_built(), "libraries without digests are of a build that was killed"
    for path in elsewhere.values():
        (built / f"{path.name}.sha256").write_text("")
    assert extensions.extension_dir() == built and extensions.is_built()
    assert extensions.built_paths() == {name: built / path.name for name, path in elsewhere.items()}
