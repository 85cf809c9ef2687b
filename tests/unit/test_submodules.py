"""Packages whose first import fails half-way have their submodules as attributes after the second one."""

from __future__ import annotations

import importlib
import sys

import pytest

from ort_zero.compat.submodules import attach_submodules

FILES = {
    "__init__.py": "import halfway.inner.deep\nimport halfway.failing\ntaken = 'no module'\n",
    "inner/__init__.py": "",
    "inner/deep.py": "value = 3\n",
    "failing.py": "import builtins\nif not getattr(builtins, 'halfway_goes_on', False):\n    raise AttributeError\n",
    "taken.py": "",
}


@pytest.fixture
def halfway(tmp_path, monkeypatch):
    """A package that was imported twice: the first time it failed behind its first submodule."""
    for name, source in FILES.items():
        path = tmp_path / "halfway" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(AttributeError):
        importlib.import_module("halfway")
    monkeypatch.setattr("builtins.halfway_goes_on", True, raising=False)
    yield importlib.import_module("halfway")
    for name in [name for name in sys.modules if name.partition(".")[0] == "halfway"]:
        del sys.modules[name]


def test_submodules_of_a_failed_import_become_attributes(halfway):
    assert not hasattr(halfway, "inner")
    attach_submodules("halfway")
    assert halfway.inner.deep.value == 3
    assert halfway.failing is sys.modules["halfway.failing"]


def test_a_name_that_the_package_has_stays(halfway, monkeypatch):
    monkeypatch.setitem(sys.modules, "halfway.taken", object())
    attach_submodules("halfway")
    assert halfway.taken == "no module"
