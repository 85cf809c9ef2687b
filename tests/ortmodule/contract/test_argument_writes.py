"""What a submodule in PyTorch writes into the containers and objects among its arguments reaches its caller."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model

WIDTH = 6


class Part(nn.Module):
    """Stays in PyTorch."""

    def __init__(self, write: Callable[..., Any]):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.write = write

    def forward(self, x, *args, **kwargs):
        return self.write(self.linear(x), *args, **kwargs)


class Caller(nn.Module):
    """Calls the part in its own forward."""

    def __init__(self, call: Callable[..., torch.Tensor], write: Callable[..., Any]):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = Part(write)
        self.call = call

    def forward(self, x, *args):
        return self.call(self, self.first(x), *args)


class Model(nn.Module):
    """Has a caller between two layers."""

    def __init__(self, call: Callable[..., torch.Tensor], write: Callable[..., Any]):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.caller = Caller(call, write)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x, *args):
        return self.last(self.caller(self.before(x), *args)).pow(2).mean()


def train(call, write, in_torch=("caller.part",), steps=3, given: Callable[[], tuple] = tuple):
    """Take steps with the model in ORT and its twin in PyTorch; return what they were given, and the modules."""
    torch.manual_seed(0)
    ours = Model(call, write)
    twin = copy.deepcopy(ours)
    runtime, wrapped = wrap_model(ours, config.OrtModuleConfig(exclude=["caller.part"]), stage=0)
    arguments: list[list[tuple]] = [[], []]
    for step in range(steps):
        x = torch.randn(3 + step, WIDTH)
        losses = []
        for model, seen in ((wrapped, arguments[0]), (twin, arguments[1])):
            seen.append(given())
            model.zero_grad()
            losses.append(model(x, *seen[-1]))
            losses[-1].backward()
        torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-4)
        for a, b in zip(wrapped.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)
    status = runtime.status()
    assert status["graphs"]["training"]["runs"] == {"forward": steps, "backward": steps}
    assert list(status["in_torch"]) == list(in_torch)
    return arguments, wrapped, twin


@dataclasses.dataclass
class State:
    scale: float = 2.0
    hidden: Any = None
    parts: list = dataclasses.field(default_factory=list)


class Slots:
    __slots__ = ("hidden", "other")


def sets_item(h, found):
    found["squares"] = h * h
    return h.tanh()


def reads_item(caller, x):
    found = {"x": x}
    return caller.part(x, found) + found["squares"] + found["x"]


def only_writes(h, found):
    found["squares"] = h * h


def reads_only_what_is_written(caller, x):
    found: dict = {}
    assert caller.part(x, found=found) is None
    return found["squares"]


def changes_list(h, found):
    found.append(h.sin())
    found.insert(0, h)
    found.pop(1)
    return h.tanh()


def reads_list(caller, x):
    found = [x, x * 2]
    y = caller.part(x, found)
    assert len(found) == 3
    return y + found[0] - found[1] * found[2]


def appends(h, found):
    found.append(h.sin())
    return found[-1] * 2


def appends_twice(caller, x):
    found: collections.deque = collections.deque(maxlen=3)
    y = caller.part(x, found)
    y = caller.part(y, found)
    return y + found[0] * found[1]


def pops(h, found):
    return h * found.pop("scale")


def misses_what_was_popped(caller, x):
    found = {"scale": x.cos(), "x": x}
    y = caller.part(x, found)
    assert list(found) == ["x"]
    return y + found["x"]


def sets_attributes(h, state):
    state.hidden = h.sin()
    state.parts.append(h)
    state.name, state.device = "set", h.device
    del state.scale
    return h.tanh() * 2


def reads_attributes(caller, x):
    state = State()
    y = caller.part(x, state)
    assert state.name == "set" and "scale" not in vars(state)
    assert state.device == x.device
    return y + state.hidden * state.parts[0]


def reads_namespace(caller, x):
    state = SimpleNamespace(scale=1, parts=[])
    y = caller.part(x, state=state)
    return y + state.hidden * state.parts[0]


def sets_slot(h, state):
    state.hidden = h.sin()
    return h.tanh()


def reads_slot(caller, x):
    state = Slots()
    return caller.part(x, state) + state.hidden


def writes_deep(h, found):
    found["layers"][1]["states"].append((h, [h.sin()]))
    found["state"].parts.append({"h": h.cos()})
    found["new"] = {"layers": found["layers"], "h": h.exp()}
    return {"found": found, "h": h}


def reads_deep(caller, x):
    layers = [{}, {"states": []}]
    found = {"layers": layers, "state": State()}
    result = caller.part(x, found)
    assert result["found"] is found and found["new"]["layers"] is layers
    (h, (sine,)) = layers[1]["states"][0]
    return result["h"] + h * sine + found["state"].parts[0]["h"] + found["new"]["h"]


def returns_argument(h, found):
    found["h"] = h.sin()
    return found


def fills_what_was_returned(caller, x):
    found = {"x": x}
    again = caller.part(x, found)
    again["y"] = again["h"] * 2
    return found["y"] + found["x"]


@pytest.mark.parametrize(
    ("call", "write"),
    [
        (reads_item, sets_item),
        (reads_only_what_is_written, only_writes),
        (reads_list, changes_list),
        (appends_twice, appends),
        (misses_what_was_popped, pops),
        (reads_attributes, sets_attributes),
        (reads_namespace, lambda h, state: (setattr(state, "hidden", h.sin()), state.parts.append(h), h)[2]),
        (reads_slot, sets_slot),
        (reads_deep, writes_deep),
        (fills_what_was_returned, returns_argument),
    ],
    ids=lambda function: function.__name__,
)
def test_the_caller_sees_what_is_written_with_its_gradient(call, write):
    train(call, write)


def test_arguments_of_the_model_are_written_at_each_call():
    def call(caller, x, found, losses):
        losses.append(x.mean())
        y = caller.part(x, found)
        return y + found["squares"]

    (ours, theirs), *_ = train(call, sets_item, given=lambda: ({"n": torch.ones(2)}, []))
    for (found, losses), (expected, expected_losses) in zip(ours, theirs, strict=True):
        assert list(found) == list(expected) == ["n", "squares"] and len(losses) == 1
        torch.testing.assert_close(found["squares"], expected["squares"], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(losses[0], expected_losses[0], atol=1e-5, rtol=1e-4)


def test_attributes_of_the_caller_are_written_at_each_call():
    def call(caller, x):
        caller.found = {}
        return caller.part(x, caller.found) + caller.found["squares"]

    _, wrapped, twin = train(call, sets_item)
    for ours, theirs in zip(wrapped.modules(), twin.modules(), strict=False):
        if isinstance(theirs, Caller):
            torch.testing.assert_close(ours.found["squares"], theirs.found["squares"], atol=1e-5, rtol=1e-4)
            break
    else:
        pytest.fail("the model has no caller")


class CalledState:
    """An object that cannot be taken apart: it is code as well."""

    def __init__(self):
        self.found: list = []

    def __call__(self):
        return self.found


BOTH = ("caller.part", "caller")


def into_unusual_object(caller, x):
    state = CalledState()
    return caller.part(x, state) + state()[-1]


def the_same_list_twice(caller, x):
    found: list = [x]
    return caller.part(x, found, found) + found[-1]


def a_measured_number(caller, x):
    found: dict = {}
    y = caller.part(x, found)
    return y * found["mean"]


@pytest.mark.parametrize(
    ("call", "write"),
    [
        (into_unusual_object, lambda h, state: (state.found.append(h.sin().detach()), h)[1]),
        (the_same_list_twice, lambda h, one, other: (one.append(h.sin()), h * len(other))[1]),
        (a_measured_number, lambda h, found: (found.update(mean=h.mean().item()), h)[1]),
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_no_result_of_a_node_keeps_the_caller_in_pytorch(call, write):
    train(call, write, in_torch=BOTH)


@pytest.mark.parametrize(
    ("call", "write", "what"),
    [
        (into_unusual_object, lambda h, state: (state.found.append(h), h)[1], "writes a tensor into an object"),
        (a_measured_number, lambda h, found: (found.update(mean=h.mean().item()), h)[1], "writes something else into"),
        (the_same_list_twice, lambda h, one, other: (one.append(h), h)[1], "one container is given twice"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_no_larger_part_cures_is_an_error_that_says_so(call, write, what):
    wrapped = wrap_model(Caller(call, write), config.OrtModuleConfig(exclude=["part"], split="off"), stage=0)[1]
    with pytest.raises(ExportError, match=f"part, which runs in PyTorch inside the graph, .*{what}"):
        for rows in (2, 3):
            wrapped(torch.randn(rows, WIDTH))
