"""Architectures: each in one process, a sample under ZeRO-3 on two ranks; ``make zoo`` runs these alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import architectures
import pytest
import torch
from harness import Client, Result, Run, wrapped
from torch.utils import _pytree

PACKAGES = ("transformers",)
pytestmark = pytest.mark.clients

STEPS = 4
GRADIENT_TOLERANCE = 1e-2
"""Largest difference of a parameter's gradients of the last step over their size; losses alone hide small ones."""
GRADIENT_FLOOR = 1e-5
"""Added to that size, as a part of the size of all gradients: that of a key's bias is zero but for rounding errors."""
EVALUATION_TOLERANCE = 1e-3
"""Largest difference of a result of an evaluation after these steps, in the mean of squares, over its size."""


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's loss, or the mean of squares of its first tensor of floating-point numbers."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    # a ModelOutput is a dict, but pytree does not know every class of them
    leaves = _pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
    return next(x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()).square().mean()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, and in the attributes of objects such as caches of keys and values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__"):
        yield from tensors_in({name: item for name, item in vars(value).items() if not name.endswith("config")})


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return SGD: Adam would divide the noise of a gradient that is zero by its own size."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def alone(run: Run, name: str) -> Result:
    """Train in one process; return the last step's gradients, and the tensors of an evaluation."""
    model, batches = architectures.by_name(name).build()
    call: Callable[..., Any] = wrapped(run, model)
    torch.manual_seed(0)
    optimizer, losses, gradients = optimizer_of(model), [], {}
    for step in range(STEPS):
        loss = loss_of(call(**batches[step % len(batches)]))
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    torch.manual_seed(0)
    model.eval()
    with torch.no_grad():
        evaluated = [tensor.detach() for tensor in tensors_in(call(**batches[0]))]
    return Result(losses, alive=model, values={"gradients": gradients, "evaluated": evaluated})


def under_zero3(run: Run, name: str) -> Result:
    """Train with DeepSpeed's defaults, where weights stay whole until their next use, then without reuse."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    losses, engines = [], []
    for more in ({}, {"stage3_max_reuse_distance": 0}):
        model, batches = architectures.by_name(name).build()
        config = run.deepspeed_config(1)
        config["zero_optimization"] = {**config["zero_optimization"], **more}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
        torch.manual_seed(0)
        for step in range(STEPS):
            loss = loss_of(engine(**batches[(step + torch.distributed.get_rank()) % len(batches)]))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engines.append(engine)
    return Result(losses, alive=engines)


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return which gradients and results of an evaluation differ too much, or are there on one side only."""
    expected, gradients = theirs["gradients"], ours["gradients"]
    # a weight that data left out has no gradient in PyTorch and one of zeros here, as under ZeRO
    extra = [name for name, gradient in gradients.items() if name not in expected and gradient.any()]
    found = [f"gradient of {name}: only in PyTorch" for name in expected if name not in gradients]
    found += [f"gradient of {name}: only in ONNX Runtime" for name in extra]
    floor = GRADIENT_FLOOR * math.sqrt(sum(x.square().sum().item() for x in expected.values()))
    for name in expected.keys() & gradients.keys():
        size = (expected[name].norm() + floor).clamp(min=1e-12)
        difference = ((expected[name] - gradients[name]).norm() / size).item()
        if not difference <= GRADIENT_TOLERANCE:
            found.append(f"gradient of {name}: {difference:.0e} of its size apart")
    if [tensor.shape for tensor in theirs["evaluated"]] != [tensor.shape for tensor in ours["evaluated"]]:
        return [*found, "an evaluation returns other shapes"]
    for i, (one, other) in enumerate(zip(theirs["evaluated"], ours["evaluated"], strict=True)):
        # the weights differ by what training has left them apart
        bound = EVALUATION_TOLERANCE * (one.double().square().mean().sqrt().item() + 1e-3)
        if one.numel() and not (one.double() - other.double()).square().mean().sqrt().item() <= bound:
            found.append(f"result {i} of an evaluation differs")
    return found


def ran(ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Assert that every step ran through graphs, where ONNX Runtime has a part: PyTorch runs torch's RNNs."""
    for rank in ranks:
        for model in rank["ort"]["status"]["models"]:
            runs = model["graph_runs"]
            assert not model["compiled"]["flop_share"] or min(runs["forward"], runs["backward"]) >= STEPS, runs


@pytest.mark.parametrize("name", [spec.name for spec in architectures.SPECS])
def test_alone(client: Client, name: str):
    client.row |= {"program": name, "kind": architectures.by_name(name).kind}
    ran(client.compare(alone, 0, arguments=(name,), ranks=1, differ=differences, may_stay_in_torch=True, timeout=240))


@pytest.mark.parametrize("name", architectures.ZERO3_SAMPLE)
def test_under_zero3(client: Client, name: str):
    if name not in {spec.name for spec in architectures.SPECS}:
        pytest.skip("timm is not installed")
    client.row |= {"program": name, "kind": architectures.by_name(name).kind}
    ran(client.compare(under_zero3, 3, arguments=(name,), may_stay_in_torch=True, timeout=400))
