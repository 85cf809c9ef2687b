"""``torch.compile(function, backend=ort_zero)`` alone computes what eager PyTorch computes, with few compilations."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ort_zero.compat import onnxruntime_binding
from ort_zero.compile import dynamo_backend, sessions
from ort_zero.compile.bare_backend import ort_zero
from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.engine import CompileEngine
from ort_zero.compile.settings import Settings
from ort_zero.errors import ConfigError
from ort_zero.runtimes.agreement import agreement
from ort_zero.runtimes.runner import Runner


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Compiler]:
    """Return a function that ONNX Runtime runs, and what tells about it."""
    return measured(function, place="ort", **options)


def measured(function: Callable[..., Any], place: str = "measured", **options: Any) -> tuple[Callable, Compiler]:
    """Return a function whose segments ONNX Runtime or PyTorch runs, and what tells about it."""
    backend = CompileEngine(Settings(place=place)).compiler()
    return torch.compile(function, backend=backend, **options), backend


def ran(backend: Compiler) -> dict[str, Any]:
    """Return the record of a function, after the check that ONNX Runtime ran all of its segments."""
    record = backend.engine.as_dict()
    assert record["failed"] == {} and record["segments_in_torch"] == 0 < record["segments"]
    return record


def assert_same(
    function: Callable[..., Any], *inputs: Any, grad: bool = False, tolerance: float | None = None
) -> Compiler:
    """Compare results, changed inputs and gradients with eager PyTorch's."""
    ours = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    call, backend = compiled(function)
    options = {} if tolerance is None else {"atol": tolerance, "rtol": tolerance}
    result, wanted = call(*ours), function(*inputs)
    torch.testing.assert_close(result, wanted, **options)
    for mine, theirs in zip(ours, inputs):
        torch.testing.assert_close(mine, theirs, **options)
    if grad:
        for each in (result, wanted):
            each.float().square().sum().backward()
        for mine, theirs in zip(ours, inputs):
            torch.testing.assert_close(mine.grad, theirs.grad, **options)
    return backend


class Layer(nn.Module):
    """A norm, two products and a residual, with a mask of another dtype."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x, mask=None):
        hidden = self.down(F.gelu(self.up(self.norm(x))))
        return x + (hidden if mask is None else hidden.masked_fill(mask.unsqueeze(-1), 0.0))


def test_the_registered_function_takes_options_and_refuses_unknown_ones():
    layer, x = Layer(), torch.randn(2, 8)
    torch.testing.assert_close(torch.compile(layer, backend=ort_zero)(x), layer(x))
    chosen = torch.compile(layer, backend=ort_zero, options={"place": "ort", "verify": "always"})
    torch.testing.assert_close(chosen(x), layer(x))
    torch._dynamo.reset()
    as_in_the_section = torch.compile(layer, backend=ort_zero, options={"compile": {"place": "ort"}})
    torch.testing.assert_close(as_in_the_section(x), layer(x))
    torch._dynamo.reset()
    with pytest.raises((ConfigError, torch._dynamo.exc.BackendCompilerFailed), match="unknown option"):
        torch.compile(layer, backend=ort_zero, options={"speed": 11})(x)
    with pytest.raises((ConfigError, torch._dynamo.exc.BackendCompilerFailed), match="did you mean 'place'"):
        torch.compile(layer, backend=ort_zero, options={"plac": "ort"})(x)


def test_a_release_whose_vectors_take_no_tensors_in_one_call(monkeypatch):
    monkeypatch.setattr(onnxruntime_binding._pybind_state, "OrtValueVector", object)  # as in 1.19 and 1.20
    call, backend = compiled(lambda x: F.gelu(x @ x.mT) * 3 + x.sum())
    for x in torch.randn(2, 9, 9), torch.randn(3, 7, 7):
        torch.testing.assert_close(call(x), F.gelu(x @ x.mT) * 3 + x.sum())
    ran(backend)


def test_sizes_that_change_make_no_more_sessions():
    layer = Layer()
    twin = copy.deepcopy(layer)
    call, backend = compiled(layer)
    gc.collect()  # the sessions of earlier tests end with their graphs
    before, counts, graphs = sessions.count(), [], []
    for rows in (3, 5, 7, 2, 11, 64, 5):
        x = torch.randn(rows, 4, 8)
        mask = torch.rand(rows, 4) > 0.5
        ours, theirs = call(x, mask), twin(x, mask)
        torch.testing.assert_close(ours, theirs)
        for each in (ours, theirs):
            each.square().sum().backward()
        counts.append(sessions.count() - before)
        graphs.append(len(backend.engine.graphs))
    assert counts[0] > 0 and len(set(counts[1:])) == 1, counts
    assert graphs == [2, 4, 4, 4, 4, 4, 4]
    for mine, theirs in zip(layer.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad)
    call(torch.randn(1, 4, 8), torch.rand(1, 4) > 0.5)  # torch specialises on 1
    ran(backend)


def test_a_segment_left_to_pytorch_at_an_earlier_start_gets_no_session_and_no_check(monkeypatch, tmp_path):
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(dynamo_backend, "_trials", {})
    agreement.cache_clear()
    layer, x = Layer(width=40), torch.randn(5, 40)
    call, backend = measured(layer)
    call(x).sum().backward()
    for graph in backend.engine.graphs:
        for segment in graph.segments:
            agreement().keep(segment.trial.key, Runner.TORCH)
    del call, backend
    monkeypatch.setattr(dynamo_backend, "_trials", {})
    agreement.cache_clear()  # as a new process
    gc.collect()
    before = sessions.count()
    call, backend = measured(layer)
    torch.testing.assert_close(call(x), layer(x))
    trials = [segment.trial for graph in backend.engine.graphs for segment in graph.segments]
    assert trials and all(trial.runner is Runner.TORCH and trial.checks == 0 for trial in trials)
    assert sessions.count() == before
    agreement.cache_clear()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    layer, x = Layer(), torch.randn(5, 8)
    call, backend = compiled(layer)
    with mode():
        torch.testing.assert_close(call(x), layer(x))
    assert backend.engine.runs == {"inference": 1}
    call(x).sum().backward()
    assert backend.engine.runs == {"inference": 1, "forward": 1, "backward": 1}
    ran(backend)


def test_autocast_to_bfloat16():
    layer, x = Layer(64), torch.randn(5, 64)
    twin = copy.deepcopy(layer)
    call, backend = compiled(layer)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = call(x), twin(x)
    assert ours.dtype is theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    ours.sum().backward()
    theirs.sum().backward()
    for mine, other in zip(layer.parameters(), twin.parameters()):
        assert mine.grad.dtype is other.grad.dtype
        torch.testing.assert_close(mine.grad, other.grad, atol=2e-2, rtol=2e-2)
    ran(backend)


def _changed(x, y):
    x.add_(y).mul_(2)
    y[1:] = x[:-1]
    return (x * y).sum(-1)


def _mixed(ids, mask, table):
    chosen = table[ids] * mask.unsqueeze(-1)
    count = mask.sum(-1)
    return chosen.sum(1), count, (ids > 3) & mask, ids * 2 + 1, count.to(torch.int32)


def _broken(x):
    y = torch.tanh(x) * 2
    if y.sum() > 0:
        y = y + 1
    return y[y > 0].sum() * y.mean()


def _leaf(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, dtype=dtype, requires_grad=True)


CASES: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], tuple[torch.Tensor, ...]], float | None]] = {
    "changed in place": (lambda: _changed, lambda: (torch.randn(4, 3), torch.randn(4, 3)), None),
    "integers and booleans": (
        lambda: _mixed,
        lambda: (torch.randint(0, 9, (3, 5)), torch.rand(3, 5) > 0.4, torch.randn(9, 4)),
        None,
    ),
    "a graph break": (lambda: _broken, lambda: (torch.rand(4, 4),), None),
    "no dimensions": (
        lambda: lambda a, b: torch.tanh(a * 3 + b) - a.exp(),
        lambda: (torch.tensor(0.5, requires_grad=True), torch.tensor(2.0, requires_grad=True)),
        None,
    ),
    "float64": (lambda: Layer().double(), lambda: (_leaf(5, 8, dtype=torch.float64),), 1e-12),
    "bfloat16": (lambda: Layer(64).bfloat16(), lambda: (_leaf(5, 64, dtype=torch.bfloat16),), 3e-2),
}
"""Functions, their inputs, and the tolerance where it is not that of torch."""


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_pytorch(name):
    make, inputs_of, tolerance = CASES[name]
    inputs = inputs_of()
    ran(assert_same(make(), *inputs, grad=inputs[0].requires_grad, tolerance=tolerance))


def test_views_as_results():
    def views(x):
        doubled = x * 2
        return doubled, doubled[1:], doubled.t(), doubled.view(-1)[::2], x.view(-1), x

    x = torch.randn(4, 6)
    ran(assert_same(views, x))
    call, _ = compiled(views)
    doubled, part, *_, alias, same = call(x)
    assert part.untyped_storage().data_ptr() == doubled.untyped_storage().data_ptr()
    assert alias.data_ptr() == x.data_ptr() and same is x


def test_empty_tensors():
    layer = Layer()
    call, backend = compiled(layer, dynamic=True)
    for rows in (4, 0, 3):
        x = torch.randn(rows, 8, requires_grad=True)
        result = call(x)
        torch.testing.assert_close(result, layer(x))
        result.sum().backward()
        assert x.grad.shape == x.shape
    ran(backend)
    assert_same(lambda x, y: torch.cat((x, y)) * 2, torch.empty(0, 3), torch.randn(2, 3))
    assert_same(lambda x: (x.sum(), x.mean(-1), x @ x.t()), torch.empty(0, 3))


def test_channels_last():
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    network = network.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(network)
    call, backend = compiled(network)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    ours, theirs = call(x), twin(x)
    torch.testing.assert_close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for mine, other in zip(network.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)
    for mine, other in zip(network.buffers(), twin.buffers()):
        torch.testing.assert_close(mine, other)
    ran(backend)


def _kept_bytes(result: torch.Tensor, model: nn.Module) -> int:
    """Return the bytes of tensors that compiled graphs keep for their backward, without parameters."""
    nodes, seen, size = [result.grad_fn], set(), 0
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in type(node).__name__:
            size += sum(t.nbytes for t in node.saved_tensors if t is not None and t.data_ptr() not in weights)
        nodes += [following for following, _ in node.next_functions]
    return size


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward, or not."""

    def __init__(self, again: bool):
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(Layer(32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def test_activation_checkpointing_keeps_less():
    plain = Checkpointed(again=False)
    again = Checkpointed(again=True)
    again.load_state_dict(plain.state_dict())
    kept, gradients = [], []
    for model in (plain, again):
        call, backend = compiled(model)
        result = call(torch.ones(16, 32, requires_grad=True) * 0.5)
        kept.append(_kept_bytes(result, model))
        result.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        ran(backend)
    assert 0 < 4 * kept[1] < kept[0], kept
    for mine, theirs in zip(*gradients):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("reduce", [lambda x: x.amax(-1), lambda x: x.max(), lambda x: x.norm(float("inf"), -1)])
def test_the_largest_of_values_that_are_computed_again_has_a_gradient(reduce):
    """The gradient looks for elements that equal the largest; NaN where a second kernel rounds them otherwise."""

    def function(x):
        return reduce(checkpoint(lambda a: torch.tanh(a) * a * 1.7, x, use_reentrant=False))

    ran(assert_same(function, torch.randn(5, 63, requires_grad=True), grad=True))


def test_a_session_that_fails_in_a_later_run_leaves_its_segment_to_pytorch(monkeypatch, tmp_path):
    backend = CompileEngine(Settings(place="ort", reproducers=str(tmp_path))).compiler()
    layer = Layer()
    call = torch.compile(layer, backend=backend)
    x = torch.randn(4, 8)
    for _ in range(3):
        call(x)
    with monkeypatch.context() as patched:
        patched.setattr(sessions.Session, "run", _out_of_memory)
        with torch.no_grad():
            torch.testing.assert_close(call(x.requires_grad_()), layer(x))
    call(x).square().sum().backward()
    record = backend.engine.as_dict()
    assert record["segments_in_torch"] > 0 and "ONNX Runtime failed: out of memory" in str(record["failed"])
    assert list(tmp_path.rglob("*.onnx"))


def _out_of_memory(*arguments: Any) -> Any:
    raise RuntimeError("out of memory")


def test_results_without_gradients_can_be_changed_in_place():
    """PyTorch's kernel returns a tensor of its own; the graph that was traced has a view."""

    def product(x, w):
        return x @ w.t()

    x, w, bias = torch.randn(4, 3, 8), torch.randn(5, 8), torch.ones(5, requires_grad=True)
    compiled = torch.compile(product, backend="ort_zero", options={"place": "ort"})
    results = []
    for function in (product, compiled):
        with torch.no_grad():
            y = function(x, w)
        y += bias
        y.sum().backward()
        results.append((y.detach(), bias.grad))
        bias.grad = None
    torch.testing.assert_close(results[1], results[0])
