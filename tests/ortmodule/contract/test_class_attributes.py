"""Values that classes and other modules hold: a forward reads and changes them by whatever name leads there."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import pytest
import torch
import values_elsewhere
from torch import nn
from values_elsewhere import Config, count, tick

import ort_zero


class State:
    """A class that a program uses as a place for its values."""

    calls, scale = 0, 1.0
    table: dict = {}
    history: list = []


def called() -> int:
    State.calls += 1
    return State.calls


class Base(nn.Module):
    calls, scale = 0, 1.0
    table: dict = {}
    history: list = []

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)


class ByItsName(Base):
    def forward(self, x):
        count = Base.table.setdefault("n", 0) + 1
        Base.table.update(n=count)
        return self.linear(x) * count


class ByItsType(Base):
    def forward(self, x):
        type(self).table["n"] = type(self).table.get("n", 0) + 1
        return self.linear(x) * type(self).table["n"]


class NumberOfAnotherClass(Base):
    def forward(self, x):
        State.calls += 1
        return self.linear(x) * State.calls


class NumberByAFunction(Base):
    def forward(self, x):
        return self.linear(x) * called()


class DictOfAnotherClass(Base):
    def forward(self, x):
        State.table["n"] = State.table.get("n", 0) + 1
        return self.linear(x) * State.table["n"]


class WrittenByTheClassReadByTheInstance(Base):
    def forward(self, x):
        self.__class__.calls += 1
        return self.linear(x) * self.calls


class ByTheClassCell(Base):
    def forward(self, x):
        return self.linear(x) * __class__.scale


class ScaleOfAnotherClass(Base):
    def forward(self, x):
        return self.linear(x) * State.scale


class OfAClassAroundIt(Base):
    def __init__(self):
        super().__init__()

        class Local:
            calls = 0

        def count() -> int:
            Local.calls += 1
            return Local.calls

        self.count = count

    def forward(self, x):
        return self.linear(x) * self.count()


class OfTheStandardLibrary(Base):
    """Names ``functools.partial``, which has what its instances have."""

    def forward(self, x):
        return partial(torch.mul, other=2.0)(self.linear(x)) * OrderedDict(a=State.scale)["a"]


class OnlyFilled(Base):
    def forward(self, x):
        type(self).history.append("called")
        State.history.append("called")
        return self.linear(x)


class ClassInAModule(Base):
    def forward(self, x):
        return self.linear(x) * values_elsewhere.Config.scale


class ClassInAClassInAModule(Base):
    def forward(self, x):
        return self.linear(x) * values_elsewhere.Config.Inner.scale


class NumberOfAClassInAModule(Base):
    def forward(self, x):
        values_elsewhere.Config.calls += 1
        return self.linear(x) * values_elsewhere.Config.calls


class NumberInAModule(Base):
    def forward(self, x):
        values_elsewhere.COUNT += 1
        return self.linear(x) * values_elsewhere.COUNT


class DictInAModule(Base):
    def forward(self, x):
        values_elsewhere.table["n"] = values_elsewhere.table.get("n", 0) + 1
        return self.linear(x) * values_elsewhere.table["n"]


class FunctionOfAModule(Base):
    def forward(self, x):
        return self.linear(x) * count() * tick()


class ImportedInTheForward(Base):
    def forward(self, x):
        from values_elsewhere import Config as Settings

        return self.linear(x) * Settings.scale


class ByAString(Base):
    def forward(self, x):
        return self.linear(x) * getattr(Config, "scale") * vars(Config)["scale"]  # noqa: B009


class ClassInAnAttribute(Base):
    def __init__(self):
        super().__init__()
        self.config = Config

    def forward(self, x):
        self.config.calls += 1
        return self.linear(x) * self.config.scale * self.config.calls


CASES = [
    ClassInAModule, ClassInAClassInAModule, NumberOfAClassInAModule, NumberInAModule, DictInAModule,
    FunctionOfAModule, ImportedInTheForward, ByAString, ClassInAnAttribute, ByItsName, ByItsType,
    NumberOfAnotherClass, NumberByAFunction, DictOfAnotherClass, WrittenByTheClassReadByTheInstance,
    ByTheClassCell, ScaleOfAnotherClass, OfAClassAroundIt, OfTheStandardLibrary, OnlyFilled,
]  # fmt: skip


def run(model: nn.Module, kind: type) -> tuple[list[float], list[int]]:
    for owner in (State, Base, kind):
        owner.calls, owner.scale = 0, 1.0
        owner.table.clear()
        owner.history.clear()
    values_elsewhere.reset()
    found = []
    for step in range(6):
        if step == 3:
            State.scale = kind.scale = Config.scale = Config.Inner.scale = 3.0
        found.append(model(torch.ones(2, 3)).sum().item())
    return found, [len(State.history), len(kind.history)]


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_values_of_classes_are_those_of_pytorch(kind):
    expected, filled = run(kind(), kind)
    wrapped = ort_zero.wrap(kind())
    found, also_filled = run(wrapped, kind)
    assert found == pytest.approx(expected, abs=1e-5)
    assert also_filled == filled
    status = ort_zero.status()["models"][-1]
    assert status["backend"] == "onnxruntime" and not status["called_in_torch"], status
    assert status["graphs"]["training"]["exports"] <= 4, status
    if kind is OnlyFilled:
        assert status["graphs"]["training"]["exports"] == 1 and not status["in_torch"], status
