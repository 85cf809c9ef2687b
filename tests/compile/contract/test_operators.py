"""Operators of one module in one step: seen in PyTorch and in units' graphs, compared, and named with their lines."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ort_zero
from ort_zero.hooks import GlobalSubscriberManager
from ort_zero.statistics.collect.operators import OperatorRecorder
from ort_zero.statistics.compare.operators import OperatorComparison, compare_operators


class Halved(torch.autograd.Function):
    """Divides by two; the backward may have a fault."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: bool) -> torch.Tensor:
        ctx.factor = 0.51 if fault else 0.5
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


class Block(nn.Module):
    """An attention, and two layers."""

    def __init__(self, fault: str):
        super().__init__()
        self.fault = fault
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (layer(normed).view(4, 8, 4, 4).transpose(1, 2) for layer in self.qkv)
        if self.fault == "written out":
            y = (q @ k.mT / 2).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(4, 8, 16))
        x = Halved.apply(x, self.fault == "backward") * 2
        return x + torch.tanh(self.mlp(x)) * (1.01 if self.fault == "forward" else 1.0)


class Model(nn.Module):
    """Two blocks and a head; the second block may have a fault."""

    def __init__(self, fault: str):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(""), Block(fault)]), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def line(code: str) -> str:
    """Return how a line of this file is named."""
    lines, begin = inspect.getsourcelines(inspect.getmodule(Block))
    return f"{Path(__file__).name}:{next(n for n, text in enumerate(lines, 1) if code in text)} in "


def record(folder: Path, module: str, step: int, *, ort: bool, fault: str, dtype: torch.dtype) -> list[float]:
    """Train until a step is recorded, and once more; return the losses."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = Model(fault).to(dtype)
    if ort:
        model = ort_zero.wrap(model, backend="compile", compile={"place": "ort"}, log_level="WARNING")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    GlobalSubscriberManager.subscribe(model, [OperatorRecorder(str(folder), module, step)])
    losses = []
    for _ in range(step + 2):
        loss = model(torch.randn(4, 8, 16).to(dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def compare(tmp_path: Path) -> Any:
    def compared(module: str, step: int = 0, *, a: Any = torch.float32, b: Any = torch.float32, ort: bool = True,
                 fault: str = "") -> OperatorComparison:  # fmt: skip
        one = record(tmp_path / "a", module, step, ort=False, fault="", dtype=a)
        two = record(tmp_path / "b", module, step, ort=ort, fault=fault, dtype=b)
        if not fault:
            assert one == pytest.approx(two, rel=1e-5 if a is b else 0.1)
        return compare_operators(str(tmp_path / "a"), str(tmp_path / "b"), 0)

    return compared


@pytest.mark.parametrize(("module", "step", "count"), [("", 0, 70), ("blocks.1", 1, 35), ("blocks.0.mlp", 0, 10)])
def test_onnx_runtime_calls_the_operators_of_pytorch(compare, module, step, count):
    found = compare(module, step)
    assert found.first == "" and found.compared >= count, found.lines()
    assert found.only == ([], []) and found.step == step, found.lines()


@pytest.mark.parametrize("ort", [False, True])
@pytest.mark.parametrize(
    ("fault", "operator", "code"),
    [
        ("forward", "aten.mul(4x8x16), forward of blocks.1, output[0]", "(1.01 if self.fault =="),
        ("backward", "aten.mul(4x8x16), backward of blocks.1, output[0]", "return x / 2"),
    ],
)
def test_the_operator_with_a_fault_is_named_with_its_line(compare, ort, fault, operator, code):
    found = compare("blocks.1", ort=ort, fault=fault)
    assert found.first == operator and line(code) in found.line, found.lines()
    assert 5e-3 < found.error < 3e-2 and found.tolerance < 1e-4 and found.only == ([], []), found.lines()


def test_other_operators_are_listed_where_the_results_agree(compare):
    found = compare("", ort=False, fault="written out")
    assert found.first == "", found.lines()
    ours, theirs = ([name.partition("(")[0] for name in only] for only in found.only)
    assert ours[0].startswith("aten._scaled_dot_product") and {"aten.bmm", "aten._softmax"} <= set(theirs)
    assert line("k.mT") in found.only[1][0] and "only b calls" in found.lines()[-1]


def test_half_precision_adds_no_error(compare):
    found = compare("", a=torch.float32, b=torch.bfloat16, ort=False)
    assert found.first == "" and found.compared >= 70, found.lines()


def test_a_fault_before_the_module_is_in_its_input(compare):
    found = compare("head", ort=False, fault="forward")
    assert found.first.startswith("aten.addmm(4, 32x16, 16x4), forward of head, input[1]"), found.lines()
