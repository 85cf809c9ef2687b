"""What functions reach is noted as it is held, and put back, whatever a container's class gives for its keys."""

from __future__ import annotations

from collections import OrderedDict

from ort_zero.ortmodule.runtime.export.function_effects import FunctionEffects


class Makes(OrderedDict):
    """Makes an object of a class that it holds, each time that somebody asks for it."""

    def __getitem__(self, key):
        return super().__getitem__(key)(1, 2, 3)


TABLE = Makes(none=int, pair=list)
PLAIN = {"a": 1}


def reads_tables():
    return TABLE, PLAIN


def test_a_table_that_makes_its_values_is_left_as_it_is():
    effects = FunctionEffects()
    effects.note([reads_tables])
    effects.put_back()
    assert list(dict.items(TABLE)) == [("none", int), ("pair", list)]


def test_what_was_changed_is_put_back():
    effects = FunctionEffects()
    effects.note([reads_tables])
    TABLE["more"], PLAIN["b"] = tuple, 2
    effects.put_back()
    assert list(dict.items(TABLE)) == [("none", int), ("pair", list)] and {"a": 1} == PLAIN
