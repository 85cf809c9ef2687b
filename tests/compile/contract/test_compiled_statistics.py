"""Statistics of compiled units: hooks are captured without a break, and the rows are those of eager PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils as dynamo_utils
from torch import nn
from torch.utils.checkpoint import checkpoint

import ort_zero
from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from ort_zero.statistics.compare.compare_runs import compare


class Block(nn.Module):
    """A block with an activation in place, a module that is called twice, and a tensor that is shown by name."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.norm, self.up, self.act, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(True), nn.Linear(32, 16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Sequential(nn.Linear(16, 16), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + 1
        before = h * 2  # reads the tensor before a hook does: its gradient has parts from there too
        y = self.down(self.act(self.up(self.norm(h)))) + before + h
        y = inspect_activation("middle", y)
        if self.kind == "broken":
            torch._dynamo.graph_break()
        y = y + self.inner(y) + self.inner(y * 0.5)
        return y + checkpoint(self.inner, y, use_reentrant=False) if self.kind == "checkpointed inside" else y


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.blocks, self.head = nn.ModuleList(Block(kind) for _ in range(2)), nn.Linear(16, 4)
        if kind == "one layer twice":
            self.blocks[1] = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.kind.startswith("reentrant") or self.kind.startswith("not reentrant"):
                x = checkpoint(block, x, use_reentrant=self.kind.startswith("reentrant"))
            else:
                x = block(x)
        return self.head(x)


@contextlib.contextmanager
def compiled(model: nn.Module) -> Iterator[Any]:
    """Yield the model with compiled units; all segments must run in ONNX Runtime."""
    torch._dynamo.reset()
    wrapped = ort_zero.wrap(model, backend="compile", compile={"place": "ort"}, log_level="WARNING")
    yield wrapped
    status = ort_zero.status()["models"][-1]
    assert status["fallbacks"] == 0 and status["graph_runs"]["backward"] > 0, status
    assert status["compiled"]["segments"] > 0 and status["compiled"]["segments_in_torch"] == 0


def train(folder: Path, kind: str, *, ort: bool, late: bool = False, fault: bool = False) -> list[float]:
    """Train three steps with statistics, after one step without them if `late`; return the losses."""
    torch.manual_seed(0)
    model = Model(kind)
    if fault:
        model.blocks[1].inner[0].register_forward_hook(lambda module, args, output: output * 1.01)
    with compiled(model) if ort else contextlib.nullcontext(model) as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(8, 16).requires_grad_()

        def step() -> float:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        losses = [step()] if late else []
        session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(folder))])
        losses += [step() for _ in range(3)]
        session.remove()
        losses.append(step())
    return losses


MISSING = {"plain": 0, "broken": 0, "checkpointed inside": 6, "not reentrant": 0, "one layer twice": 0}
"""Rows that the compiled run has not: the input of a checkpointed region has readers outside of the region."""


@pytest.mark.parametrize(("kind", "late"), [(kind, kind in ("plain", "checkpointed inside")) for kind in MISSING])
def test_rows_are_those_of_pytorch(tmp_path, kind, late):
    eager = train(tmp_path / "eager", kind, ort=False, late=late)
    breaks = sum(dynamo_utils.counters["graph_break"].values())
    in_ort = train(tmp_path / "ort", kind, ort=True, late=late)
    breaks = sum(dynamo_utils.counters["graph_break"].values()) - breaks
    assert in_ort == pytest.approx(eager, rel=1e-5)
    assert (breaks > 0) == (kind == "broken")
    result = compare(str(tmp_path / "eager"), str(tmp_path / "ort"))
    assert result.verdict.same, result.verdict.text
    assert (result.counts.get("missing", 0), result.counts.get("extra", 0)) == (MISSING[kind], 0), result.notes
    assert result.records > 390


def test_an_error_within_a_unit_is_named(tmp_path):
    train(tmp_path / "eager", "plain", ort=False)
    train(tmp_path / "ort", "plain", ort=True, fault=True)
    result = compare(str(tmp_path / "eager"), str(tmp_path / "ort"))
    assert not result.verdict.same and result.verdict.module == "blocks.1.inner.0", result.verdict.text


class ChangesItsInput(nn.Module):
    """A block that changes an input and a view in place, both of which a hook has seen."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), nn.Identity()

    def forward(self, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        nn.functional.leaky_relu(self.seen(buffer), 0.1, True)
        h = self.linear(x)
        nn.functional.leaky_relu(self.seen(h[:, :4]), 0.1, True)
        return h + buffer


def test_changes_in_place_reach_the_tensors(tmp_path):
    results = []
    for ort in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"blocks": nn.ModuleList(ChangesItsInput() for _ in range(2))})
        model.forward = lambda x, buffer, model=model: [block(x, buffer) for block in model["blocks"]]
        x, buffer = torch.randn(4, 8), torch.randn(4, 8)
        weight = model["blocks"][1].linear.weight
        with compiled(model) if ort else contextlib.nullcontext(model) as model:
            session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(tmp_path / f"{ort}"))])
            outputs = model(x, buffer)
            sum(output.square().sum() for output in outputs).backward()
            session.remove()
        results.append((*outputs, buffer, weight.grad))
    assert (results[0][2] < 0).any()
    torch.testing.assert_close(results[1], results[0])
    assert compare(str(tmp_path / "False"), str(tmp_path / "True")).verdict.same


def test_a_part_of_a_compiled_model_is_subscribed_to_after_its_first_step(tmp_path):
    x = torch.randn(8, 16)
    for ort in (False, True):
        torch.manual_seed(0)
        outer = nn.Sequential(nn.Linear(16, 16), Model("plain"))
        inner = outer[1]
        with compiled(outer) if ort else contextlib.nullcontext(outer) as model:
            model(x).sum().backward()
            session = GlobalSubscriberManager.subscribe(inner, [StatisticsSubscriber(str(tmp_path / f"{ort}"))])
            model(x).sum().backward()
            session.remove()
    result = compare(str(tmp_path / "False"), str(tmp_path / "True"))
    assert result.verdict.same and result.records > 100, result.verdict.text
    assert not result.counts.get("missing", 0) and not result.counts.get("extra", 0), result.notes
