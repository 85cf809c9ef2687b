"""docs/compatibility.md shows every program of tests/clients, and says what their files of results say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / "tests/clients"


@pytest.fixture(scope="module")
def programs_page():
    spec = importlib.util.spec_from_file_location("programs_page", CLIENTS / "programs_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_is_that_of_a_program(programs_page):
    for path in (CLIENTS / "results").glob("*.json"):
        rows = json.loads(path.read_text())["rows"]
        assert {row["test"] for row in rows} <= programs_page.names_in(CLIENTS / f"{path.stem}.py"), path


def test_the_page_says_what_the_tests_found(programs_page):
    for name, section in (("architectures", programs_page.architectures()), ("programs", programs_page.programs())):
        begin, end = programs_page.MARKS[name]
        assert f"{begin}\n{section}{end}" in programs_page.PAGE.read_text()
