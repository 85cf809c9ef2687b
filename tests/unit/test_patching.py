"""Patches are applied together or not at all, and what was there comes back as the same object."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import pytest

from ort_zero.errors import PatchError
from ort_zero.utils.patching import MARKER, Patch, PatchSet, defined_in, replaced

NAME = "ort_zero_test_victim"
SOURCE = """
class Base:
    def inherited(self): return "inherited"

class Victim(Base):
    def method(self): return "method"
    @staticmethod
    def static(): return "static"
    @classmethod
    def clsm(cls): return cls.__name__

def function(): return "function"

TABLE = {"old": function}
"""
TARGETS = ("Victim.method", "Victim.static", "Victim.clsm", "Victim.inherited", "function")


@pytest.fixture
def victim(monkeypatch):
    module = ModuleType(NAME)
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def loud(original):
    def replacement(*args, **kwargs):
        return "patched " + original(*args, **kwargs)

    return replacement


def patches(*names: str, **kwargs) -> PatchSet:
    return PatchSet("test", tuple(Patch(target=f"{NAME}:{n}", build=loud, why="test", **kwargs) for n in names))


def state(victim) -> dict[str, dict]:
    return {
        name: dict(vars(owner))
        for name, owner in (("module", victim), ("Victim", victim.Victim), ("Base", victim.Base))
    }


def same(a: dict[str, dict], b: dict[str, dict]) -> bool:
    return all(a[o].keys() == b[o].keys() and all(a[o][k] is b[o][k] for k in a[o] if k != "__builtins__") for o in a)


def test_apply_replaces_and_restore_brings_the_same_objects_back(victim):
    before = state(victim)
    wanted = patches(*TARGETS)
    wanted.apply()
    obj = victim.Victim()
    assert obj.method() == "patched method" and obj.static() == "patched static"
    assert victim.Victim.static() == "patched static" and victim.Victim.clsm() == "patched Victim"
    assert obj.inherited() == "patched inherited" and victim.Base().inherited() == "inherited"
    assert victim.function() == "patched function"
    assert wanted.active and wanted.targets() == tuple(f"{NAME}:{n}" for n in TARGETS)
    wanted.restore()
    assert same(state(victim), before)
    assert "inherited" not in vars(victim.Victim)
    assert not wanted.active and wanted.targets() == ()


def test_a_second_apply_and_a_second_restore_do_nothing(victim):
    before, original = state(victim), victim.function
    wanted = patches("function")
    wanted.apply()
    once = victim.function
    assert getattr(once, MARKER) == f"{NAME}:function" and once.__wrapped__ is original
    wanted.apply()
    assert victim.function is once
    with pytest.raises(PatchError, match="already"):
        patches("function").apply()
    wanted.restore()
    wanted.restore()
    assert same(state(victim), before)


def broken(original):
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (dict(target=f"{NAME}:nowhere"), PatchError, "cannot patch"),
        (dict(target=f"{NAME}:Victim.nowhere"), PatchError, "cannot patch"),
        (dict(target=f"{NAME}:Nobody.method"), PatchError, "cannot patch"),
        (dict(target=f"{NAME}:TABLE[missing]"), PatchError, "does not exist"),
        (dict(target="no_such_module_at_all:x"), PatchError, "cannot patch no_such_module_at_all:x"),
        (dict(target=f"{NAME}:function", build=broken), ZeroDivisionError, ""),
    ],
)
def test_a_patch_that_fails_leaves_everything_as_it_was(victim, bad, error, match):
    before, table = state(victim), dict(victim.TABLE)
    good = [Patch(target=f"{NAME}:{name}", build=loud, why="test") for name in (*TARGETS[:4], "TABLE[old]")]
    wanted = PatchSet("test", (*good, Patch(**{"build": loud, "why": "test", **bad})))
    with pytest.raises(error, match=match or None):
        wanted.apply()
    assert same(state(victim), before) and victim.TABLE == table and not wanted.active


def test_restore_refuses_when_a_stranger_patched_later_and_changes_nothing(victim):
    wanted = patches("Victim.method", "function")
    wanted.apply()
    ours = vars(victim.Victim)["method"]
    victim.function = len
    with pytest.raises(PatchError, match=f"{NAME}:function was replaced by builtins.len"):
        wanted.restore()
    assert wanted.active and vars(victim.Victim)["method"] is ours and victim.function is len


def test_guard_defined_in_accepts_home_and_refuses_strangers(victim):
    guarded = patches("function", "Victim.static", guard=defined_in(NAME))
    guarded.apply()
    guarded.restore()
    stranger = loud(victim.function)
    victim.function = stranger
    before = state(victim)
    with pytest.raises(PatchError, match=f"already patched by {__name__}"):
        guarded.apply()
    assert same(state(victim), before) and victim.function is stranger


def test_guard_sees_through_functools_wraps(victim):
    victim.function = functools.wraps(victim.function)(loud(victim.function))
    assert victim.function.__module__ == NAME
    with pytest.raises(PatchError, match="already patched"):
        patches("function", guard=defined_in(NAME)).apply()


def entries(*targets: str, **kwargs) -> PatchSet:
    made = (Patch(target=f"{NAME}:{t}", build=lambda _: ModuleType, why="test", **kwargs) for t in targets)
    return PatchSet("test", tuple(made))


def test_items_of_a_dict_are_replaced_added_and_brought_back(victim):
    table, before = victim.TABLE, dict(victim.TABLE)
    wanted = entries("TABLE[old]", "TABLE[a new.one]", may_be_new=True)
    wanted.apply()
    assert victim.TABLE is table and table == {"old": ModuleType, "a new.one": ModuleType}
    assert wanted.targets() == (f"{NAME}:TABLE[old]", f"{NAME}:TABLE[a new.one]")
    wanted.restore()
    assert table == before and table["old"] is before["old"]


def test_an_item_that_a_stranger_replaced_later_is_not_brought_back(victim):
    wanted = entries("TABLE[old]", "Victim.new_name", may_be_new=True)
    wanted.apply()
    victim.TABLE["old"] = len
    with pytest.raises(PatchError, match=r"TABLE\[old\] was replaced by builtins.len"):
        wanted.check()
    with pytest.raises(PatchError, match=r"TABLE\[old\] was replaced by builtins.len"):
        wanted.restore()
    assert wanted.active and victim.TABLE["old"] is len and victim.Victim.new_name is ModuleType


def test_an_attribute_is_replaced_within_a_block_and_comes_back_after_an_error(victim):
    before = state(victim)
    with pytest.raises(ZeroDivisionError), replaced(victim, "function", loud):
        assert victim.function() == "patched function"
        raise ZeroDivisionError
    assert same(state(victim), before)
