"""docs/compatibility.md shows every program of tests/clients, and says what their files of results say."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "tests/clients"
ALL = sorted(CLIENTS.glob("test_*.py"))


@pytest.fixture(scope="module")
def programs_page():
    spec = importlib.util.spec_from_file_location("programs_page", CLIENTS / "programs_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def marked(path: Path) -> bool:
    assigned = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    return any(ast.unparse(node) == "pytestmark = pytest.mark.clients" for node in assigned)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_what_needs_other_packages_is_marked(path):
    assert marked(path)


def test_every_row_is_that_of_a_program(programs_page):
    for path in (CLIENTS / "results").glob("*.json"):
        rows = json.loads(path.read_text())["rows"]
        assert {row["test"] for row in rows} <= programs_page.names_in(CLIENTS / f"{path.stem}.py"), path


def test_the_page_says_what_the_tests_found(programs_page):
    for name, section in (("architectures", programs_page.architectures()), ("programs", programs_page.programs())):
        begin, end = programs_page.MARKS[name]
        assert f"{begin}\n{section}{end}" in programs_page.PAGE.read_text()


def test_a_row_is_kept_in_place_of_an_earlier_one_and_rounded(programs_page, tmp_path, monkeypatch):
    monkeypatch.setattr(programs_page, "RESULTS", tmp_path)
    monkeypatch.setattr(programs_page, "ALWAYS", ("torch",))

    class Module:
        __name__ = "test_x"
        __doc__ = "A title.\n\nMore."
        PACKAGES = ("packaging",)

    row = {
        "test": "test_a",
        "case": "zero3",
        "program": "A | b.",
        "passed": True,
        "share": 97,
        "graphs": 2,
        "in_torch": list("abcdef"),
    }
    programs_page.keep(Module(), {**row, "difference": 0.1, "passed": False})
    programs_page.keep(Module(), {**row, "difference": 3.2e-6})
    page = programs_page.programs()
    assert "| **A title** |" in page and "packaging 2" in page
    assert page.count("test_a") == 1
    assert "| A \\| b | ZeRO-3 | as PyTorch | 1e-5 | 97 % | `test_a` |" in page
    programs_page.keep(Module(), {**row, "case": "zero2", "passed": False, "difference": 1.0, "share": 41})
    assert "| A \\| b | ZeRO-2, ZeRO-3 | fails: zero2 | 1e0 | 41-97 % | `test_a` |" in programs_page.programs()


@pytest.mark.parametrize(
    "difference, shown", [(0.0, "0"), (1e-9, "1e-7"), (1e-6, "1e-6"), (1.1e-6, "1e-5"), (float("inf"), "infinite")]
)
def test_a_difference_is_shown_as_a_bound(programs_page, difference, shown):
    assert programs_page.bound(difference) == shown
