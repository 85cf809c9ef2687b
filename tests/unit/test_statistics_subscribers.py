"""Actions of subscribers are called with what their base class promises, in the steps of their range."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from ort_zero.hooks import GlobalSubscriberManager, SubscriberBase, inspect_activation


class Scaled(nn.Module):
    """Takes a tensor and two options, and shows a tensor of its own."""

    def forward(self, x, factor, *, shift=None):
        return inspect_activation("shown", x * factor) + shift


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaled, self.linear = Scaled(), nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(self.scaled(x, 2.0, shift=torch.ones(2)))


ACTIONS = [name for name in vars(SubscriberBase) if name.endswith("_apply")]


def recorder(names, **attributes):
    """Return a subscriber that keeps the arguments of some actions in the order in which they are called."""
    calls = []

    def recording(name):
        original = getattr(SubscriberBase, name)

        def action(self, *args):
            inspect.signature(original).bind(self, *args)
            calls.append((name, *args))
            return original(self, *args)

        return action

    kind = type("Recorder", (SubscriberBase,), {**{name: recording(name) for name in names}, **attributes})
    return kind(), calls


def step(model):
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


def test_every_action_is_called():
    subscriber, calls = recorder(ACTIONS)
    model = Net()
    GlobalSubscriberManager.subscribe(model, [subscriber])
    step(model)
    assert {name for name, *_ in calls} == set(ACTIONS)
    assert calls[0] == ("pre_forward_model_apply", 0, model)


def test_actions_on_modules_get_the_arguments_and_the_result():
    subscriber, calls = recorder(["pre_forward_module_apply", "post_forward_module_apply", "post_forward_model_apply"])
    model, x = Net(), torch.ones(1, 2)
    GlobalSubscriberManager.subscribe(model, [subscriber])
    result = model(x)
    names = ["pre_forward_module_apply"] * 2 + ["post_forward_module_apply", "pre_forward_module_apply"]
    names += ["post_forward_module_apply"] * 2 + ["post_forward_model_apply"]
    assert [name for name, *_ in calls] == names
    pre_root, pre_scaled, post_scaled, pre_linear, post_linear, post_root, end = (rest for _, *rest in calls)
    assert pre_root[0] is post_root[0] is model and pre_root[1][0] is post_root[1][0] is x
    assert pre_scaled[0] is post_scaled[0] is model.scaled
    assert pre_scaled[1] == post_scaled[1] == (x, 2.0) and pre_scaled[1][0] is x
    assert pre_linear[1][0] is post_linear[1][0] is post_scaled[2]
    assert torch.equal(post_scaled[2], torch.full((1, 2), 3.0))
    assert post_linear[2] is post_root[2] is result and end == [0, model, result]


def test_what_an_action_returns_takes_the_place_of_what_it_was_given():
    class Replacing(SubscriberBase):
        def pre_forward_module_apply(self, module, args):
            return (args[0] + 1, *args[1:]) if isinstance(module, Scaled) else None

        def post_forward_module_apply(self, module, args, outputs):
            return outputs * args[1] if isinstance(module, Scaled) else None

        def pre_forward_tensor_apply(self, module, tensor):
            return tensor + 10 if isinstance(module, nn.Linear) else None

    model = nn.Sequential(Net())
    model[0].linear = nn.Identity()
    subscribed = GlobalSubscriberManager.subscribe(model, [Replacing()])
    # (1 + 1) * 2 + 1, times the factor that the module was called with
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 10.0))
    subscribed.remove()
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 3.0))


def test_actions_on_tensors_get_their_module():
    names = ["pre_forward_tensor_apply", "post_forward_tensor_apply", "gradient_tensor_apply"]
    subscriber, calls = recorder(names)
    model = Net()
    GlobalSubscriberManager.subscribe(model, [subscriber])
    step(model)
    of_linear = [(name, tuple(tensor.shape)) for name, module, tensor in calls if module is model.linear]
    # what the linear layer takes is what the module before it returned: its gradient comes once, with that module
    assert of_linear == [(names[0], (1, 2)), (names[1], (1, 2)), (names[2], (1, 2))]
    inputs = [tensor for name, module, tensor in calls if module is model.scaled and name == names[0]]
    assert [tensor.tolist() for tensor in inputs] == [[[1.0, 1.0]], [1.0, 1.0]]  # also that of a keyword
    assert sum(name == names[2] for name, *_ in calls) == 4  # input, "shown", output of scaled; output of linear


def test_slots_say_where_a_tensor_is():
    subscriber, calls = recorder(["forward_slot_apply", "gradient_slot_apply"])
    model = Net()
    GlobalSubscriberManager.subscribe(model, [subscriber])
    step(model)
    places = [(slot.call.path, slot.kind, slot.name) for name, _, slot, _ in calls if name == "forward_slot_apply"]
    assert places == [
        ("", "input", "[0]"), ("scaled", "input", "[0]"), ("scaled", "input", ".shift"), ("scaled", "inspect", "shown"),
        ("scaled", "output", ""), ("linear", "input", "[0]"), ("linear", "output", ""), ("", "output", ""),
    ]  # fmt: skip
    gradients = [(slot.call.path, slot.kind) for name, _, slot, _ in calls if name == "gradient_slot_apply"]
    assert gradients == [("linear", "output"), ("scaled", "output"), ("scaled", "inspect"), ("", "input")]


def test_actions_run_in_their_steps_and_close_comes_after_the_last():
    closed = []
    subscriber, calls = recorder(
        ["pre_forward_model_apply"], start_step=1, end_step=3, close=lambda self: closed.append(len(calls))
    )
    model = Net()
    GlobalSubscriberManager.subscribe(model, [subscriber])
    for _ in range(5):
        step(model)
    assert [number for _, number, _ in calls] == [1, 2] and closed[0] == 2
