"""The table of source edits: exactly-once rule, versions, error text. Nothing is compiled."""

from __future__ import annotations

import dataclasses

import pytest

from ort_zero.compat import source_edits
from ort_zero.compat.source_edits import Edit, apply_edits, helpers, table_hash
from ort_zero.errors import BuildError

EDIT = Edit("a.cc", "old", "new", "old is gone from torch", since="2.13")


@pytest.fixture
def table(monkeypatch):
    def use(*edits: Edit) -> None:
        monkeypatch.setattr(source_edits, "EDITS", edits)

    return use


def test_applies_edit_that_matches_once(table):
    table(EDIT)
    assert apply_edits("a.cc", "int old;", "2.13.0") == "int new;"


@pytest.mark.parametrize(("text", "found"), [("nothing", 0), ("old old", 2)])
def test_other_number_of_matches_names_file_edit_and_reason(table, text, found):
    table(EDIT)
    with pytest.raises(BuildError) as error:
        apply_edits("a.cc", text, "2.13.0")
    message = str(error.value)
    for part in ("a.cc", "'old'", "'new'", "old is gone from torch", f"found {found}"):
        assert part in message


def test_declared_count_is_exact(table):
    table(dataclasses.replace(EDIT, count=2))
    assert apply_edits("a.cc", "old old", "2.13.0") == "new new"
    for text in ("old", "old old old"):
        with pytest.raises(BuildError, match=r"2 time\(s\)"):
            apply_edits("a.cc", text, "2.13.0")


def test_edits_of_one_file_apply_in_order(table):
    table(EDIT, Edit("a.cc", "this", "that", "reason"))
    assert apply_edits("a.cc", "old this", "2.13.0") == "new that"


def test_other_file_stays_as_it_is(table):
    table(EDIT)
    assert apply_edits("b.cc", "old old", "2.13.0") == "old old"


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0a0+git1", "2.13.1", "2.14", "3.0"])
def test_edit_applies_from_its_version_on(table, version):
    table(EDIT)
    assert apply_edits("a.cc", "old", version) == "new"
    assert helpers(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.9.0", "2.4.1+cpu"])
def test_edit_is_left_out_before_its_version(table, version):
    table(EDIT)
    assert apply_edits("a.cc", "no match wanted", version) == "no match wanted"
    assert helpers(version) == ""


def test_hash_is_short_hex_and_follows_the_table(table):
    first = table_hash()
    assert len(first) == 12 and int(first, 16) >= 0
    assert table_hash() == first
    table(*source_edits.EDITS[1:])
    assert table_hash() != first


def test_edits_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EDIT.find = "x"


def test_every_replacement_helper_is_defined():
    text = helpers("2.13.0")
    for edit in source_edits.EDITS:
        if edit.replace.startswith("ort_zero_"):
            assert f" {edit.replace}" in text
