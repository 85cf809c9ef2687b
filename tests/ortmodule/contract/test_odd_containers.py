"""What a forward keeps in containers of all kinds, in the dict of an object, on a weight or in a file counts."""

from __future__ import annotations

import array
import collections
import heapq
from pathlib import Path

import pytest
import torch
from torch import nn

import ort_zero


class Base(nn.Module):
    def __init__(self, folder: Path):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.folder = folder
        self.set_up()

    def set_up(self) -> None:
        pass

    def between(self, step: int) -> None:
        """What the program changes before step `step`."""

    def factor(self) -> float:
        raise NotImplementedError

    def forward(self, x):
        return self.linear(x) * self.factor()


class Set(Base):
    def set_up(self):
        self.seen, self.count = set(), 0

    def factor(self):
        self.count += 1
        self.seen.add(self.count)
        return len(self.seen)


class Array(Base):
    def set_up(self):
        self.values = array.array("d", [0.0])

    def factor(self):
        self.values[0] += 1
        return self.values[0]


class Bytes(Base):
    def set_up(self):
        self.values = bytearray(1)

    def between(self, step):
        self.values[0] = step + 1

    def factor(self):
        return self.values[0] + 1


class TakenFromTheFront(Base):
    def set_up(self):
        self.values = [float(i + 1) for i in range(20)]

    def factor(self):
        return self.values.pop(0)


class Heap(Base):
    def set_up(self):
        self.values = [3.0, 1.0, 2.0, 9.0, 7.0, 5.0, 4.0]
        heapq.heapify(self.values)

    def factor(self):
        return heapq.heappop(self.values)


class ListInAList(Base):
    def set_up(self):
        self.values = [[1.0, 2.0], [3.0]]

    def factor(self):
        self.values[0][0] += 1
        return self.values[0][0]


class OrderOfADict(Base):
    def set_up(self):
        self.values = collections.OrderedDict(a=1.0, b=2.0)

    def factor(self):
        self.values.move_to_end(next(iter(self.values)))
        return next(iter(self.values.values()))


class TakenAndPutAtTheEnd(Base):
    def set_up(self):
        self.values = {"a": 1.0, "b": 2.0}

    def factor(self):
        key = next(iter(self.values))
        value = self.values.pop(key)
        self.values[key] = value
        return value


class DictOfTheObject(Base):
    def set_up(self):
        self.__dict__["hidden"] = 1.0

    def between(self, step):
        self.__dict__["hidden"] = float(step + 1)

    def factor(self):
        return vars(self)["hidden"]


class BehindGetattr(Base):
    def __getattr__(self, name):
        if name == "dynamic":
            return self.__dict__["store"]["dynamic"]
        return super().__getattr__(name)

    def set_up(self):
        self.__dict__["store"] = {"dynamic": 1.0}

    def between(self, step):
        self.store["dynamic"] = float(step + 1)

    def factor(self):
        return self.dynamic


class OnAWeight(Base):
    def set_up(self):
        self.linear.weight.scale = 1.0

    def between(self, step):
        self.linear.weight.scale = float(step + 1)

    def factor(self):
        return self.linear.weight.scale


class BehindDefaults(Base):
    """Reads settings that a program changes in the dict of defaults."""

    def set_up(self):
        self.settings = collections.ChainMap({}, {"factor": 1.0})

    def between(self, step):
        self.settings.maps[1]["factor"] = (2.0, 3.0, 1.0, 4.0, 5.0)[step - 1]

    def factor(self):
        return self.settings["factor"]


class File(Base):
    def set_up(self):
        self.between(0)

    def between(self, step):
        (self.folder / "scale").write_text(str(step + 1))

    def factor(self):
        return float((self.folder / "scale").read_text())


CASES = [Set, Array, Bytes, TakenFromTheFront, Heap, ListInAList, OrderOfADict, TakenAndPutAtTheEnd, DictOfTheObject,
         BehindGetattr, BehindDefaults, OnAWeight, File]  # fmt: skip


def run(model: nn.Module, plain: Base) -> list[float]:
    found = []
    for step in range(6):
        if step:
            plain.between(step)
        found.append(model(torch.ones(2, 3)).sum().item())
    return found


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_factors_are_those_of_pytorch(kind, tmp_path):
    model = kind(tmp_path)
    expected = run(model, model)
    model = kind(tmp_path)
    assert run(ort_zero.wrap(model), model) == pytest.approx(expected, abs=1e-5)
    status = ort_zero.status()["models"][-1]
    assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0, status


class Filled(nn.Module):
    """Fills lists in a dict, as for a record of what has run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.record: dict = {"calls": []}

    def forward(self, x):
        self.record["calls"].append("called")
        return self.linear(x)


def test_a_list_in_a_dict_that_is_only_filled_stays_in_the_graph():
    model = Filled()
    wrapped = ort_zero.wrap(model)
    for _ in range(4):
        wrapped(torch.ones(2, 3))
    status = ort_zero.status()["models"][-1]
    assert model.record == {"calls": ["called"] * 4}
    assert status["graphs"]["training"]["exports"] == 1 and not status["in_torch"], status
