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
TARGETS = ("Victim.method", "Victim.static", "Victim.clsm", "Victim.inherited", "function", "TABLE[old]")


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
    kwargs = {"build": loud, **kwargs}
    return PatchSet("test", tuple(Patch(target=f"{NAME}:{n}", why="test", **kwargs) for n in names))


def state(victim) -> list[dict]:
    namespaces = [vars(victim), vars(victim.Victim), vars(victim.Base), victim.TABLE]
    return [{name: id(value) for name, value in each.items() if name != "__builtins__"} for each in namespaces]


def test_apply_replaces_and_restore_brings_the_same_objects_back(victim):
    before, original, table = state(victim), victim.function, victim.TABLE
    wanted = patches(*TARGETS)
    wanted.apply()
    obj = victim.Victim()
    assert obj.method() == "patched method" and obj.static() == victim.Victim.static() == "patched static"
    assert victim.Victim.clsm() == "patched Victim"
    assert obj.inherited() == "patched inherited" and victim.Base().inherited() == "inherited"
    assert victim.function() == "patched function" and table["old"]() == "patched function"
    assert wanted.targets() == tuple(f"{NAME}:{n}" for n in TARGETS)
    assert getattr(victim.function, MARKER) == f"{NAME}:function" and victim.function.__wrapped__ is original
    once = state(victim)
    wanted.apply()
    with pytest.raises(PatchError, match="already"):
        patches("function").apply()
    assert state(victim) == once
    for _ in range(2):
        wanted.restore()
        assert state(victim) == before and victim.TABLE is table and wanted.targets() == ()


def test_a_new_item_of_a_dict_is_taken_out_again(victim):
    before = state(victim)
    wanted = patches("TABLE[a new.one]", build=lambda _: ModuleType, may_be_new=True)
    wanted.apply()
    assert victim.TABLE["a new.one"] is ModuleType
    wanted.restore()
    assert state(victim) == before


def broken(original):
    raise ZeroDivisionError


@pytest.mark.parametrize(("bad", "error", "match"), [
    (dict(target=f"{NAME}:nowhere"), PatchError, "cannot patch"),
    (dict(target=f"{NAME}:Victim.nowhere"), PatchError, "cannot patch"),
    (dict(target=f"{NAME}:Nobody.method"), PatchError, "cannot patch"),
    (dict(target=f"{NAME}:TABLE[missing]"), PatchError, "does not exist"),
    (dict(target="no_such_module_at_all:x"), PatchError, "cannot patch no_such_module_at_all:x"),
    (dict(target=f"{NAME}:function", build=broken), ZeroDivisionError, ""),
])  # fmt: skip
def test_a_patch_that_fails_leaves_everything_as_it_was(victim, bad, error, match):
    before = state(victim)
    good = [Patch(target=f"{NAME}:{name}", build=loud, why="test") for name in (*TARGETS[:4], TARGETS[5])]
    wanted = PatchSet("test", (*good, Patch(**{"build": loud, "why": "test", **bad})))
    with pytest.raises(error, match=match or None):
        wanted.apply()
    assert state(victim) == before and not wanted.targets()


@pytest.mark.parametrize(("place", "name"), [("vars", "function"), ("TABLE", r"TABLE\[old\]")])
def test_restore_refuses_when_a_stranger_patched_later_and_changes_nothing(victim, place, name):
    wanted = patches("Victim.method", "function", "TABLE[old]")
    wanted.apply()
    (vars(victim) if place == "vars" else victim.TABLE)["function" if place == "vars" else "old"] = len
    now = state(victim)
    for refused in (wanted.check, wanted.restore):
        with pytest.raises(PatchError, match=f"{name} was replaced by builtins.len"):
            refused()
    assert wanted.targets() and state(victim) == now


@pytest.mark.parametrize("wraps", [False, True])
def test_guard_defined_in_accepts_home_and_refuses_strangers(victim, wraps):
    guarded = patches("function", "Victim.static", guard=defined_in(NAME))
    guarded.apply()
    guarded.restore()
    stranger = loud(victim.function)
    victim.function = functools.wraps(victim.function)(stranger) if wraps else stranger
    before = state(victim)
    with pytest.raises(PatchError, match="already patched" if wraps else f"already patched by {__name__}"):
        guarded.apply()
    assert state(victim) == before


def test_an_attribute_is_replaced_within_a_block_and_comes_back_after_an_error(victim):
    before = state(victim)
    with pytest.raises(ZeroDivisionError), replaced(victim, "function", loud):
        assert victim.function() == "patched function"
        raise ZeroDivisionError
    assert state(victim) == before
