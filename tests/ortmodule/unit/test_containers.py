"""What containers hold, past the methods of their classes."""

from __future__ import annotations

import collections

import pytest

from ort_zero.ortmodule.utils.containers import holds, items_held, put_back


class Builder(collections.OrderedDict):
    """Holds classes, and returns new objects of them, as ``ACT2FN`` of transformers does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()

    def update(self, *args, **kwargs):
        raise NotImplementedError


class Doubled(list):
    def __iter__(self):
        return (2 * item for item in super().__iter__())


def test_what_a_dict_builds_is_not_what_it_holds():
    builder = Builder(b=int, a=dict)
    builder.move_to_end("b")
    assert list(items_held(builder).items()) == [("a", dict), ("b", int)]
    assert items_held(Doubled([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    "container",
    [Builder(b=int, a=dict), {"b": 1, "a": 2}, Doubled([1, 2, 3]), collections.deque([1, 2, 3], maxlen=3)],
    ids=["OrderedDict", "dict", "list", "deque"],
)
def test_put_back(container):
    copy, kind = items_held(container), type(container)
    assert holds(container, copy)
    if isinstance(container, dict):
        container["c"] = list
        del container["b"]
    else:
        container.append(4)
    assert not holds(container, copy)
    put_back(container, copy)
    assert holds(container, copy) and type(container) is kind
    assert list(items_held(container)) == list(copy)
