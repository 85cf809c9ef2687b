"""What a forward does to its arguments, and which tensors of its result are one and the same, is as in PyTorch."""

from __future__ import annotations

import collections
import copy
import dataclasses

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    hidden: torch.Tensor | None = None
    calls: int = 3


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(4, 4), function
        self.register_buffer("total", torch.zeros(4))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def both(function):
    """Return ORT's runtime and model, PyTorch's module, and the one that ORT runs."""
    module = Model(function)
    return *wrap_model(module, config.OrtModuleConfig(), stage=0), copy.deepcopy(module), module


def x_of(step):
    return torch.randn(2 + step, 4, generator=torch.Generator().manual_seed(step))


def append(model, x, found):
    found.append(model.layer(x))
    return found[-1].square().mean()


def update(model, batch):
    batch["hidden"], batch["rows"] = model.layer(batch.pop("x")), len(batch)
    return batch["hidden"].square().mean()


def nested(model, batch, *, more):
    batch["in"]["all"].append(model.layer(batch["in"]["x"]))
    more["rows"] = batch["in"]["x"].shape[0]
    return batch["in"]["all"][-1].square().mean() * len(batch["in"]["all"])


def attribute(model, batch):
    batch.hidden = model.layer(batch.x)
    batch.calls += 1
    return batch.hidden.square().mean()


def queue(model, x, last):
    last.append(x.mean())
    return model.layer(x).square().mean() * len(last)


CASES = {
    "list": (append, lambda x: ((x, []), {})),
    "dict": (update, lambda x: (({"x": x, "y": 1},), {})),
    "nested": (nested, lambda x: (({"in": {"x": x, "all": [x]}},), {"more": {}})),
    "object": (attribute, lambda x: ((Batch(x),), {})),
    "deque": (queue, lambda x: ((x, collections.deque([x, x], maxlen=2)), {})),
}


def contents(value):
    """Return all that a value holds, with the tensors as lists."""
    if isinstance(value, torch.Tensor):
        return [round(number, 3) for number in value.flatten().tolist()]
    if isinstance(value, dict):
        return {key: contents(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value)(map(contents, value))
    return contents(vars(value)) if isinstance(value, Batch) else (type(value), value)


@pytest.mark.parametrize("name", CASES)
def test_what_a_forward_changes_in_its_arguments_the_caller_sees(name):
    function, arguments = CASES[name]
    runtime, wrapped, reference, module = both(function)
    for step in range(3):
        seen = []
        for model, own in ((reference, reference), (wrapped, module)):
            args, kwargs = arguments(x_of(step))
            model.zero_grad()
            loss = model(*args, **kwargs)
            loss.backward()
            seen.append((contents((args, kwargs)), contents(loss), contents(own.layer.weight.grad)))
        assert seen[1] == seen[0]
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 3, "backward": 3}


def test_what_is_written_has_a_gradient():
    _, wrapped, reference, module = both(append)
    for model in (wrapped, reference):
        found = []
        (model(x_of(0), found) + found[0].sum()).backward()
    torch.testing.assert_close(module.layer.weight.grad, reference.layer.weight.grad)


def with_defaults():
    """Return a model with containers as defaults of its own: each class has one."""
    outside = {"calls": 0}

    class Defaults(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

        def forward(self, x, seen=[], *, counts={}):
            seen.append(1)
            counts["calls"] = counts.get("calls", 0) + 1
            outside["calls"] += 1
            return self.layer(x).square().mean() * len(seen) + counts["calls"] + 10 * outside["calls"]

    return Defaults()


def test_containers_that_are_defaults_or_variables_around_a_method():
    reference = with_defaults()
    runtime, wrapped = wrap_model(with_defaults(), config.OrtModuleConfig(), stage=0)
    for step in range(4):
        torch.testing.assert_close(wrapped(x_of(step)), reference(x_of(step)))
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] == 4


def same(model, x):
    hidden = model.layer(x)
    return hidden, {"again": hidden}, [hidden, hidden]


def given(model, x):
    return model.layer(x), x, {"x": x}


def held(model, x):
    model.total.add_(x.detach().sum(0))
    return model.layer(x), model.layer.weight, model.total


def batch_back(model, x):
    batch = x if isinstance(x, dict) else {"x": x}
    batch["hidden"] = model.layer(batch["x"])
    return batch


def only_given(model, x):
    return x, [x]


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in (value.values() if isinstance(value, dict) else value) for t in tensors_in(part)]


@pytest.mark.parametrize("function", [same, given, held, batch_back, only_given])
def test_tensors_are_one_where_pytorchs_are(function):
    runtime, wrapped, reference, module = both(function)
    for step in range(3):
        found = []
        for model, own in ((reference, reference), (wrapped, module)):
            model.zero_grad()
            x = {"x": x_of(step)} if function is batch_back else x_of(step)
            result = model(x)
            tensors = [*tensors_in(result), *tensors_in([x]), *own.parameters(), *own.buffers()]
            if result is not x and result[0] is not x:
                sum((i + 1) * t.square().sum() for i, t in enumerate(tensors_in(result)) if t.requires_grad).backward()
            first = {}
            ones = [first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)]
            found.append(
                (ones, contents(tensors), contents(own.layer.weight.grad) if own.layer.weight.grad is not None else 0)
            )
        assert found[1] == found[0]
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] == 3


def test_a_change_in_place_of_one_shows_in_the_other():
    _, wrapped, *_ = both(same)
    with torch.no_grad():
        hidden, named, _ = wrapped(x_of(0))
        hidden.zero_()
    assert not named["again"].any()


def note(model, x, scale):
    model.noted = {"rows": x.shape[0], "half": [x.shape[0] / 2], "wide": x.shape[1] > 3, "scale": scale * 2}
    return model.layer(x).square().mean() * scale


def test_numbers_that_a_forward_keeps_are_numbers():
    _, wrapped, reference, module = both(note)
    for step in range(4):
        torch.testing.assert_close(wrapped(x_of(step), scale=1.5 + step), reference(x_of(step), scale=1.5 + step))
        assert module.noted == reference.noted
        assert list(map(type, module.noted.values())) == list(map(type, reference.noted.values()))


def in_place(model, x):
    x.mul_(2).add_(model.layer.weight.sum())
    return model.layer(x), x


def in_place_alone(model, x):
    x.mul_(model.layer.weight[0])
    return model.layer(x).sum()


@pytest.mark.parametrize("function", [in_place, in_place_alone])
@pytest.mark.parametrize("wants", [True, False])
def test_an_argument_that_is_changed_in_place_has_the_new_gradient(function, wants):
    runtime, wrapped, reference, module = both(function)
    for step in range(3):
        found = []
        for model, own in ((reference, reference), (wrapped, module)):
            model.zero_grad()
            leaf = x_of(step).requires_grad_(wants)
            x = leaf * 1
            result = model(x)
            assert not isinstance(result, tuple) or result[1] is x
            (
                sum(t.square().sum() for t in tensors_in(result if isinstance(result, tuple) else [result])) + x.sum()
            ).backward()
            found.append([x.detach(), own.layer.weight.grad, *([leaf.grad] if wants else [])])
        torch.testing.assert_close(found[1], found[0])
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 3, "backward": 3}


def test_a_backward_sees_the_argument_as_it_was():
    def function(model, x):
        hidden = model.layer(x.clone())
        x.zero_()
        return hidden.square().mean()

    _, wrapped, reference, module = both(function)
    for model in (reference, wrapped):
        model(x_of(0)).backward()
    torch.testing.assert_close(module.layer.weight.grad, reference.layer.weight.grad)


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: nn.functional.linear(x, model.layer.weight.detach()) + model.layer(2 * x),
        lambda model, x: nn.functional.linear(x, model.layer.weight.detach(), model.layer.bias),
        lambda model, x: model.layer(x) * model.layer.weight.data.sum() + x.detach(),
    ],
)
def test_no_gradient_reaches_a_weight_through_detach(function):
    runtime, wrapped, reference, module = both(function)
    for model in (wrapped, reference):
        model(x_of(1)).square().sum().backward()
    for one, other in zip(module.parameters(), reference.parameters()):
        none = torch.zeros_like(one)
        torch.testing.assert_close(*(none if p.grad is None else p.grad for p in (one, other)))
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 1, "backward": 1}
