"""The guard on attributes, and what becomes of those that change often; without ONNX Runtime."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from ort_zero.ortmodule.compat.frames import is_augmented_read
from ort_zero.ortmodule.runtime.export.attribute_inputs import AttributeInputs
from ort_zero.ortmodule.runtime.export.attribute_paths import ATTRIBUTE, ITEM, MISSING, MODULE, Place, same
from ort_zero.ortmodule.runtime.export.attribute_reads import AttributeReads
from ort_zero.ortmodule.runtime.export.attribute_records import AttributeChangedError
from ort_zero.ortmodule.runtime.guards.attribute_changes import AttributeChanges
from ort_zero.ortmodule.runtime.guards.attribute_guard import AttributeGuard, ReadValues


class Config:
    def __init__(self):
        self.used, self.unused = 1.0, 2.0


class Reader(nn.Module):
    kind = "class"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.number, self.config, self.items = 1.0, Config(), {"a": 1}
        self.calls, self.losses, self.space = 0, [], types.SimpleNamespace(x=1)

    def forward(self, x):
        self.calls += 1
        self.losses.append(self.number)
        self.result = self.kind
        self.result  # noqa: B018  written by the forward itself
        hasattr(self, "absent")
        return self.layer(x) * self.config.used * self.items["a"] * self.space.x


def read(module: nn.Module) -> AttributeReads:
    """Return what a forward of the module reads."""
    reads = AttributeReads(module, lambda: module)
    with reads.recording():
        module(torch.ones(1, 2))
    reads.finish()
    return reads


def watched(module: nn.Module) -> tuple[AttributeGuard, ReadValues]:
    """Return a guard, and the values that a forward of the module reads."""
    guard, reads = AttributeGuard(module), read(module)
    return guard, guard.watch(dict.fromkeys(reads.reads, [""]), {}, reads.whole)


def names(reads: AttributeReads) -> set[str]:
    return {place.named("Reader") for place in reads.reads}


def test_reads_are_recorded_and_classes_are_as_they_were():
    before = [dict(vars(kind)) for kind in (nn.Module, Config)]
    got = names(read(Reader()))
    assert [dict(vars(kind)) for kind in (nn.Module, Config)] == before
    wanted = {"number", "config", "config.used", "items", "items['a']", "absent", "kind", "space", "space.x"}
    assert {f"Reader.{name}" for name in wanted} <= got
    assert not got & {f"Reader.{name}" for name in ("calls", "losses", "result", "config.unused", "layer", "training")}


def test_a_number_that_the_forward_reads_and_changes_is_noticed():
    class Stepping(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = 0

        def forward(self, x):
            self.step = self.step + 1
            return x * self.step

    with pytest.raises(
        AttributeChangedError, match=r"reads Stepping.step, and changes it for the next call .*in forward"
    ):
        read(Stepping())


def test_an_augmented_assignment_reads_nothing():
    import sys

    class Noting:
        def __init__(self):
            self.seen = []

        @property
        def value(self):
            self.seen.append(is_augmented_read(sys._getframe(1)))
            return 1

        @value.setter
        def value(self, new):
            pass

    noting = Noting()
    noting.value += 1
    noting.value = noting.value + 1
    assert noting.seen == [True, False]


CHANGES = [
    (lambda m: setattr(m, "number", 2.0), ["Reader.number changed from 1.0 to 2.0"]),
    (lambda m: setattr(m, "number", 1), ["Reader.number changed from 1.0 to 1"]),
    (lambda m: setattr(m, "number", True), ["Reader.number changed from 1.0 to True"]),
    (lambda m: setattr(m, "kind", "own"), ["Reader.kind changed from 'class' to 'own'"]),
    (lambda m: setattr(m, "absent", None), ["Reader.absent changed from nothing to None"]),
    (lambda m: delattr(m, "number"), ["Reader.number changed from 1.0 to nothing"]),
    (lambda m: setattr(m.config, "used", 3.0), ["Reader.config.used changed from 1.0 to 3.0"]),
    (lambda m: m.items.update(b=1), ["Reader.items changed from a dict of ['a'] to a dict of ['a', 'b']"]),
    (lambda m: m.items.update(a=5), ["Reader.items['a'] changed from 1 to 5"]),
    (lambda m: setattr(m.space, "x", 5), ["Reader.space.x changed from 1 to 5"]),
    (lambda m: m.layer.register_forward_pre_hook(print), ["hooks of layer changed"]),
    (
        lambda m: setattr(m, "forward", lambda x: x),
        ["Reader.forward was changed (a function)", "a method of a module was replaced"],
    ),
    (lambda m: setattr(m, "number", float("1.0")), []),
    (lambda m: setattr(m, "config", Config()), []),
    (lambda m: setattr(m, "items", {"a": 1}), []),
    (lambda m: setattr(m, "calls", 99), []),
    (lambda m: setattr(m.config, "unused", 99), []),
    (lambda m: setattr(m, "news", 99), []),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reasons"), CHANGES, ids=range(len(CHANGES)))
def test_what_the_guard_notices(change, reasons):
    module = Reader()
    guard, known = watched(module)
    first = guard.check()
    assert known.hold(first) and guard.check() is first
    change(module)
    now = guard.check()
    assert known.hold(now) == (not reasons) and known.reasons(now) == reasons
    assert guard.check() is now


def test_a_value_that_returns_holds_again():
    module = Reader()
    guard, known = watched(module)
    for value, holds in ((2.0, False), (1.0, True), (3.0, False), (3.0, False), (1.0, True)):
        module.number = value
        assert known.hold(guard.check()) is holds


def test_an_object_that_is_read_in_two_places_counts_as_such():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = self.other = Config()

        def forward(self, x):
            return x * self.one.used * self.other.used

    module = Two()
    guard, known = watched(module)
    module.one = Config()
    assert known.reasons(guard.check()) == ["Two.one was changed (a Config)"]


def test_a_value_that_modules_share_is_changed_in_all_its_places():
    class Layer(nn.Module):
        factor = 2.0

        def forward(self, x):
            return x * self.factor

    module = nn.Sequential(Layer(), Layer())
    guard, known = watched(module)
    Layer.factor = 5.0
    now = guard.check()
    places = [Place((MODULE, path)).then(ATTRIBUTE, "factor") for path in ("0", "1")]
    assert not known.hold(now) and [now.values[place] for place in places] == [5.0, 5.0]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1, True), (1, 1.0, False), (1, True, False), (float("nan"), float("nan"), True), ((1, 2), (1, 2), True),
        ((1, 2), (1, 2.0), False), ("a", "a", True), (torch.float32, torch.float32, True), (MISSING, None, False),
        (torch.device("cpu"), torch.device("cpu"), True), (object(), object(), False),
    ],
)  # fmt: skip
def test_values_are_equal_by_type_and_value(one, other, equal):
    assert same(one, other) is equal


def test_the_second_change_makes_an_input_and_a_refused_one_goes_to_pytorch():
    module = Reader()
    guard, known = watched(module)
    changes = AttributeChanges("Reader")
    number, kind = (Place((MODULE, "")).then(ATTRIBUTE, name) for name in ("number", "kind"))
    steps = []
    for step in range(4):
        module.number, module.kind = 2.0 + step, str(step)
        steps.append((set(changes.note(known, guard.check())), set(changes.inputs)))
    assert steps == [(set(), set()), (set(), {number}), ({kind}, {number}), ({kind}, {number})]
    changes.refuse([number], "F.dropout wants it")
    assert not changes.inputs
    module.number = 9.0
    assert number in changes.note(known, guard.check())
    assert changes.why(number) == "reads Reader.number, which changes often (F.dropout wants it)"


def test_inputs_stand_in_the_places_of_attributes_and_leave_them():
    module = Reader()
    root = Place((MODULE, ""))
    places = [
        root.then(ATTRIBUTE, "number"),
        root.then(ATTRIBUTE, "items").then(ITEM, "a"),
        root.then(ATTRIBUTE, "config").then(ATTRIBUTE, "used"),
        root.then(ATTRIBUTE, "kind"),
    ]
    inputs = AttributeInputs(module, {place: place.as_input("Reader") for place in places}, torch.device("cpu"))
    assert list(inputs.names.values()) == [
        "ort_zero_Reader_number",
        "ort_zero_Reader_items_a",
        "ort_zero_Reader_config_used",
    ]
    assert [t.dtype for t in inputs.tensors] == [torch.float32, torch.int64, torch.float32] and inputs.numbers == [
        0,
        1,
        2,
    ]
    with inputs.placed(inputs.tensors):
        assert module.number is inputs.tensors[0] and module.items["a"] is inputs.tensors[1]
        assert module.config.used is inputs.tensors[2]
    assert (module.number, module.items["a"], module.config.used) == (1.0, 1, 1.0)
