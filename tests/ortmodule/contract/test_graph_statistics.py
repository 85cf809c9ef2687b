"""Statistics inside of ORTModule's graphs: the rows are those of hooks in PyTorch."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from ort_zero.ortmodule import statistics
from ort_zero.ortmodule.upstream.loading import import_ortmodule
from ort_zero.ortmodule.upstream.patches import make_ortmodule
from ort_zero.statistics.collect.subscribed_model import mark_places
from ort_zero.statistics.compare.compare_runs import compare


class Block(nn.Module):
    """A block whose tensors are read before and after hooks, in a module that is called twice, and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.unused = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 16 features."""
        h = x + 1
        before = h * 2
        y = self.down(torch.relu(self.up(self.norm(h)))) + before + h
        y = inspect_activation("middle", y)
        self.unused(y)
        return y + self.inner(y) + self.inner(y * 0.5)


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return 4 features."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def ortmodule() -> Any:
    """Return the package of ORTModule, where a graph that ORTModule cannot run is an error."""
    package = import_ortmodule()
    package.ORTMODULE_FALLBACK_POLICY = type(package.ORTMODULE_FALLBACK_POLICY).FALLBACK_DISABLE
    return package


def in_ort(model: Model, muted_first: bool) -> list[Any]:
    """Have each block run as an ORTModule around the graph that Dynamo captures; return the graphs."""
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        assert statistics.observe_in_graph(module)
        assert not statistics.observe_in_graph(module)
        wrapped = make_ortmodule(module)
        graphs.append(wrapped)
        checked = [not muted_first]

        def run(*args: Any) -> Any:
            if not checked[0]:
                with statistics.muted():
                    results = wrapped(*[arg.detach().requires_grad_(arg.requires_grad) for arg in args])
                    results[0].sum().backward()
                checked[0] = True
            return wrapped(*args)

        return run

    for block in model.blocks:
        mark_places(block)
        block.forward = types.MethodType(torch.compile(Block.forward, backend=backend, dynamic=False), block)
    return graphs


def train(folder: Path, how: str) -> list[float]:
    """Train three steps with statistics; return the losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(folder))])
    graphs = in_ort(model, how == "muted first") if how != "eager" else []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, losses = torch.randn(8, 16).requires_grad_(), []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    session.remove()
    for graph in graphs:
        nodes = graph._torch_module._execution_manager(True)._onnx_models.optimized_model.graph.node
        assert {"PythonOp", "PythonOpGrad", "YieldOp"} <= {node.op_type for node in nodes}
    return losses


@pytest.mark.parametrize("how", ["ort", "muted first"])
def test_rows_are_those_of_pytorch(ortmodule, tmp_path, how):
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        eager, in_graphs = train(tmp_path / "eager", "eager"), train(tmp_path / "ort", how)
    assert in_graphs == pytest.approx(eager, rel=1e-5)
    result = compare(str(tmp_path / "eager"), str(tmp_path / "ort"))
    assert result.verdict.same, result.verdict.text
    assert not result.counts.get("missing", 0) and not result.counts.get("extra", 0), result.notes
    assert result.records > 200
