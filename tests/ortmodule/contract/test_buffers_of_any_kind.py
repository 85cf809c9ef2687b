"""Buffers that are not persistent, and complex ones, count at each call as persistent real ones do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model


class Scaling(nn.Module):
    """Multiplies with a buffer; adds to it at each call if `counting`."""

    def __init__(self, persistent: bool, counting: bool = False):
        super().__init__()
        self.linear, self.counting = nn.Linear(6, 4), counting
        self.register_buffer("scale", torch.arange(1.0, 5.0), persistent=persistent)

    def forward(self, x):
        if self.counting:
            self.scale.add_(0.5)
        return self.linear(x) * self.scale


class Registering(Scaling):
    """Registers its buffer anew at each call."""

    def forward(self, x):
        self.register_buffer("scale", self.scale * 1.5, persistent=False)
        return self.linear(x) * self.scale


class Rotating(nn.Module):
    """Multiplies pairs of numbers with complex ones."""

    def __init__(self, kind: str):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        numbers = torch.polar(torch.ones(12, 2), torch.outer(torch.arange(12.0), torch.tensor([1.0, 0.1])))
        if kind == "attribute":
            self.scale = numbers
        else:
            self.register_buffer("scale", numbers, persistent=kind == "persistent buffer")

    def forward(self, x):
        pairs = torch.view_as_complex(self.linear(x).reshape(*x.shape[:-1], 2, 2))
        return torch.view_as_real(pairs * self.scale[: x.shape[1]] * torch.tensor([1 + 2j, 3.0])).flatten(2)


class Turning(Rotating):
    """Changes its complex buffer at each call."""

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(torch.tensor(1j))
        return super().forward(x)


def change_in_place(module, step):
    with torch.no_grad():
        module.scale.mul_(1.0 + step / 10)


def assign(module, step):
    module.scale = module.scale * (1.0 + step / 10)


def change_nothing(module, step):
    pass


def compare(module: nn.Module, change=change_nothing, steps: int = 5):
    """Return the status after steps that give PyTorch's results, gradients and buffers."""
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for step in range(steps):
        x = torch.randn(2, 5 + step % 2, 6, generator=torch.Generator().manual_seed(step))
        results = []
        for model, owner in ((reference, reference), (wrapped, module)):
            model.zero_grad()
            change(owner, step)
            results.append(model(x))
            results[-1].square().mean().backward()
        torch.testing.assert_close(results[1], results[0])
        torch.testing.assert_close(module.linear.weight.grad, reference.linear.weight.grad)
        torch.testing.assert_close(dict(module.named_buffers()), dict(reference.named_buffers()))
    status = runtime.status()
    assert (status["backend"], status["fallbacks"]) == ("onnxruntime", 0)
    assert status["graphs"]["training"]["runs"] == {"forward": steps, "backward": steps}
    assert module.state_dict().keys() == reference.state_dict().keys()
    return status


@pytest.mark.parametrize("change", [change_in_place, assign])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_changes_between_calls_needs_no_other_graph(persistent, change):
    status = compare(Scaling(persistent), change)
    assert status["graphs"]["training"]["exports"] == 1
    assert status["in_torch"] == {}


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_the_forward_changes(persistent):
    assert compare(Scaling(persistent, counting=True))["graphs"]["training"]["exports"] == 1


def test_a_buffer_that_the_forward_registers_anew():
    compare(Registering(persistent=False))


@pytest.mark.parametrize("kind", ["attribute", "buffer", "persistent buffer"])
@pytest.mark.parametrize("change", [change_nothing, change_in_place, assign])
def test_complex_numbers_that_a_module_holds(kind, change):
    status = compare(Rotating(kind), change)
    if change is change_nothing:
        assert status["graphs"]["training"]["exports"] == 1
        assert status["in_torch"]["aten::mul"] == "ONNX Runtime has no complex numbers"


def test_evaluation_between_the_steps_makes_no_graph_for_complex_numbers_anew():
    module = Rotating("buffer")
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    x = torch.randn(2, 5, 6)
    for _ in range(3):
        wrapped(x).sum().backward()
        with torch.no_grad():
            wrapped(x)
    assert [graph["exports"] for graph in runtime.status()["graphs"].values()] == [1, 1]


class Around(nn.Module):
    """Has the module that changes its complex buffer as a submodule."""

    def __init__(self):
        super().__init__()
        self.linear, self.turning = nn.Linear(6, 6), Turning("buffer")

    def forward(self, x):
        return self.turning(self.linear(x))


def test_a_submodule_that_changes_its_complex_buffer_stays_in_pytorch():
    assert "changes it for the next call" in compare(Around())["in_torch"]["turning"]


def test_a_model_that_changes_its_complex_buffer_is_refused():
    _, wrapped = wrap_model(Turning("buffer"), config.OrtModuleConfig(split="off"), stage=0)
    with pytest.raises(ExportError, match="changes its complex buffer scale"):
        wrapped(torch.randn(2, 5, 6))
