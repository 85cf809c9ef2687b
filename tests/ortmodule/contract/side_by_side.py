"""Runs a program in PyTorch and in ONNX Runtime, and compares results, gradients, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


class Net(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result for a batch of six features."""
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


def batch(step: int) -> torch.Tensor:
    """Return the batch of a step, of 4 or 5 rows."""
    return torch.randn(4 + step % 2, 6, generator=torch.Generator().manual_seed(step))


def train(call: Callable, module: Any, step: int) -> Sequence[torch.Tensor]:
    """Run a forward and a backward; return the loss and the result."""
    result = call(batch(step))
    loss = result.square().mean()
    loss.backward()
    return [loss, result]


def changing(change: Callable[[Any, int], object]) -> Callable[[Callable, Any, int], Sequence[torch.Tensor]]:
    """Return a training step before which `change` is called with the model and the number of the step."""

    def step(call: Callable, module: Any, number: int) -> Sequence[torch.Tensor]:
        change(module, number)
        return train(call, module, number)

    return step


def run_side_by_side(build: Callable[[], Any], step: Callable = train, steps: int = 4, **options: Any) -> dict:
    """Train two models that `build` makes, one in PyTorch, one in ONNX Runtime, and compare them after each step.

    Args:
        build: makes a model.
        step: called with what is called for a forward, the model, and the number of the step; runs forward and
            backward, and returns what is compared.
        steps: number of steps.
        options: keys of the section's "ortmodule".

    Returns:
        The status of the model that ONNX Runtime has run.
    """
    torch.manual_seed(0)
    expected = build()
    torch.manual_seed(0)
    module = build()
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(**options), 0)
    models = expected, module
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for number in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted = [value.detach().clone() for value in step(expected, expected, number)]
        found = [value.detach().clone() for value in step(wrapped, module, number)]
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=1e-5, msg=lambda text, n=number: f"step {n}: {text}")
        for what in ("named_parameters", "named_buffers"):
            pairs = zip(getattr(module, what)(), getattr(expected, what)(), strict=True)
            for (name, one), (_, other) in pairs:
                assert (one.grad is None) == (other.grad is None), (number, name)
                torch.testing.assert_close(one, other, rtol=2e-4, atol=1e-5)
                if other.grad is not None:
                    torch.testing.assert_close(one.grad, other.grad, rtol=2e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    status = runtime.status()
    assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0
    assert (
        sum(mode.get("forward", 0) for graph in [status["graphs"]] for mode in [m["runs"] for m in graph.values()]) > 0
    )
    return status
