"""Loops that do more than a forward, a backward and a step train a wrapped model as in eager PyTorch.

What a compiled graph cannot do, PyTorch runs, and the status names it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stack_models import HIDDEN, IN, Block, Stack
from torch import nn
from torch.func import functional_call

import ort_zero
from ort_zero.errors import ExportError


class Norms(Block):
    """A block with statistics, random numbers, an argument that depends on the other one, and a result that is two."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x, *, scale=1.0):
        x = super().forward(nn.functional.dropout(self.norm(x), 0.2)) * scale
        return x, {"again": x, "more": x.square()}


class Changing(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Norms(), Norms()])

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x, more = block(x, scale=x.mean())
            x = x + 0.1 * more["again"] + 0.1 * more["more"]
        return self.last(x)


def run_both(loop: Callable[[nn.Module], Any], kind: Callable[[], nn.Module] = Stack) -> dict[str, Any]:
    """Run a loop on a plain and on a wrapped model, compare what it returns, and return the wrapped model's status."""
    torch.manual_seed(0)
    plain = kind()
    wrapped = ort_zero.wrap(copy.deepcopy(plain), backend="compile", compile={"place": "ort"})
    results = []
    for model in (plain, wrapped):
        torch.manual_seed(1)
        results.append(torch.stack([torch.as_tensor(value, dtype=torch.float64).detach() for value in loop(model)]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    status = ort_zero.status()["models"][-1]
    assert status["module"] == type(plain).__name__ and status["compiled"]["failed"] == {}
    return status


def trained(model: nn.Module, steps: int = 3, loss_of: Callable[[nn.Module], torch.Tensor] | None = None) -> list[Any]:
    """Train, and return losses and norms of gradients."""
    optimizer, values = torch.optim.SGD(model.parameters(), 0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, IN)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() if loss_of is None else loss_of(model)
        loss.backward()
        values += [loss, sum(p.grad.norm() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    return values


# -- derivatives of derivatives ----------------------------------------------------------------------------------------


def penalized(model: nn.Module) -> torch.Tensor:
    """Return a loss with a penalty on the norm of the inputs' gradients."""
    x = torch.randn(4, IN, requires_grad=True)
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def gradient_penalty(model: nn.Module) -> list[Any]:
    """Train as a critic; a few plain steps come first."""
    return [*trained(model), *trained(model, 4, penalized), *(buffer.sum() for buffer in model.buffers())]


def learned_step(model: nn.Module) -> list[Any]:
    """Differentiate through a step of SGD, as MAML does."""
    weights = list(model.parameters())

    def loss_of(model: nn.Module) -> torch.Tensor:
        gradients = torch.autograd.grad(model(torch.randn(4, IN)).square().mean(), weights, create_graph=True)
        faster = dict(zip(dict(model.named_parameters()), (w - 0.1 * g for w, g in zip(weights, gradients))))
        return functional_call(model, faster, torch.randn(4, IN)).square().mean()

    return trained(model, 3, loss_of)


@pytest.mark.parametrize(("loop", "kind"), [(gradient_penalty, Changing), (learned_step, Stack)])
def test_what_is_differentiated_twice_runs_in_pytorch_from_the_first_time_on(loop, kind):
    status = run_both(loop, kind)
    assert "create_graph=True" in status["fallback_reason"] and status["fallbacks"] == 1
    assert status["units"] == [] and status["graph_runs"]["forward"] > 0


def test_a_second_derivative_is_an_error_where_pytorch_may_run_nothing():
    model = ort_zero.wrap(Stack(), backend="compile", fallback="raise")
    with pytest.raises(ExportError, match=r"create_graph=True.*fallback"):
        trained(model, 1, penalized)


# -- backwards that run again ------------------------------------------------------------------------------------------


def backward_again(model: nn.Module) -> list[Any]:
    """Run backwards of one graph several times, after plain steps."""
    values, x = trained(model), torch.randn(4, IN)
    y = model(x)
    gradients = [torch.autograd.grad(y[row].sum(), model.first.weight, retain_graph=True)[0] for row in range(4)]
    y.sum().backward()
    return [*values, *(gradient.norm() for gradient in gradients), model.first.weight.grad.norm(), *trained(model)]


def test_second_backwards_give_pytorchs_results():
    status = run_both(backward_again)
    assert (status["failures"], status["fallback_reason"]) == ({}, None)
    assert status["graph_runs"]["backward"] >= 6 * 5


# -- models that change ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A block of another class."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + torch.relu(self.layer(x))


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], list[str]]] = {
    "a layer added": (lambda model: model.blocks.append(Block()), ["blocks.3.up", "blocks.3.down"]),
    "a layer replaced": (lambda model: model.blocks.__setitem__(1, Wide()), ["blocks.1.layer"]),
    "a layer dropped": (lambda model: model.blocks.pop(0), []),
    "a head swapped": (lambda model: setattr(model, "last", nn.Linear(HIDDEN, 3)), ["last"]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_model_that_changes_trains_on(name, steps):
    change, added = CHANGES[name]

    def loop(model: nn.Module) -> list[Any]:
        values = trained(model, steps)
        change(model)
        return [*values, *trained(model)]

    status = run_both(loop)
    assert list(status["failures"]) == added
    assert status["graph_runs"]["forward"] >= (steps + 3) * 3


def test_what_was_added_is_compiled_by_another_wrap():
    model = ort_zero.wrap(Stack(), backend="compile", compile={"place": "ort"})
    model.blocks.append(Block())
    assert "ort_zero.wrap(model)" in ort_zero.status()["models"][-1]["failures"]["blocks.3.up"]
    ort_zero.wrap(model, backend="compile", compile={"place": "ort"})
    trained(model, 1)
    status = ort_zero.status()["models"][-1]
    assert status["failures"] == {} and status["graph_runs"] == {"forward": 6, "backward": 6}
