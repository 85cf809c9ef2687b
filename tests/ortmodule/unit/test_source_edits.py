"""The table of source edits: exactly-once rule, versions, error text. Nothing is compiled."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from ort_zero.errors import BuildError
from ort_zero.ortmodule.compat import source_edits
from ort_zero.ortmodule.compat.source_edits import Edit, apply_edits, helpers, table_hash

EDIT = Edit("a.cc", "old", "new", "old is gone from torch", header="torch/a.h", sign="the new form")


@pytest.fixture
def include(tmp_path):
    """Give the folder of torch's headers, one of which says that the edit is needed."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/a.h").write_text("here is the new form;")
    return tmp_path


@pytest.fixture
def table(monkeypatch):
    def use(*edits: Edit) -> None:
        monkeypatch.setattr(source_edits, "EDITS", edits)

    return use


def test_applies_edit_that_matches_once(table, include):
    table(EDIT)
    assert apply_edits("a.cc", "int old;", include) == "int new;"


@pytest.mark.parametrize(("text", "found"), [("nothing", 0), ("old old", 2)])
def test_other_number_of_matches_names_file_edit_and_reason(table, include, text, found):
    table(EDIT)
    with pytest.raises(BuildError) as error:
        apply_edits("a.cc", text, include)
    message = str(error.value)
    for part in ("a.cc", "'old'", "'new'", "old is gone from torch", f"found {found}"):
        assert part in message


def test_declared_count_is_exact(table, include):
    table(dataclasses.replace(EDIT, count=2))
    assert apply_edits("a.cc", "old old", include) == "new new"
    for text in ("old", "old old old"):
        with pytest.raises(BuildError, match=r"2 time\(s\)"):
            apply_edits("a.cc", text, include)


def test_edits_of_one_file_apply_in_order(table, include):
    table(EDIT, Edit("a.cc", "this", "that", "reason"))
    assert apply_edits("a.cc", "old this", include) == "new that"


def test_other_file_stays_as_it_is(table, include):
    table(EDIT)
    assert apply_edits("b.cc", "old old", include) == "old old"


def test_edit_is_left_out_where_torchs_header_has_the_old_form(table, include):
    table(EDIT)
    (include / "torch/a.h").write_text("here is the old form;")
    assert apply_edits("a.cc", "no match wanted", include) == "no match wanted"


def test_edit_that_every_torch_needs_asks_no_header(table, tmp_path):
    table(dataclasses.replace(EDIT, header="", sign=""))
    assert apply_edits("a.cc", "old", tmp_path) == "new"


def test_a_torch_without_the_header_is_refused_by_its_name(table, tmp_path):
    table(EDIT)
    with pytest.raises(BuildError, match=r"torch has no header torch/a\.h.*pip install 'torch=="):
        apply_edits("a.cc", "old", tmp_path)


@pytest.mark.parametrize("header", sorted({edit.header for edit in source_edits.EDITS if edit.header}))
def test_headers_that_tell_have_the_new_form_or_the_one_before(header):
    text = (Path(importlib.util.find_spec("torch").origin).parent / "include" / header).read_text()
    before = {"edge.h": "std::shared_ptr<Node> function", "python_function.h": "PyObject* obj;"}[Path(header).name]
    new = [edit.sign in text for edit in source_edits.EDITS if edit.header == header]
    assert all(new) != (before in text) and len(set(new)) == 1


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
    text = helpers()
    for edit in source_edits.EDITS:
        if edit.replace.startswith("ort_zero_"):
            assert f" {edit.replace}" in text
