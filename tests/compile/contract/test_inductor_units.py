"""Inductor runs units: with eager PyTorch's losses and random numbers, checked, timed beside the other runners."""

from __future__ import annotations

import copy
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build
from tiny_models import gpt2
from torch import nn

import ort_zero
from ort_zero.cli.explain import lines_of
from ort_zero.compat import inductor
from ort_zero.plugin.explained_script import explanation
from ort_zero.runtimes.agreement import Agreement, agreement
from ort_zero.runtimes.runner import Runner
from ort_zero.units.running_model import _models

GPT2 = dict(words=97, hidden=32, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, attn_implementation="eager")


@pytest.fixture
def inductor_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of Inductor's own code, below ours."""
    from torch._inductor.output_code import CompiledFxGraph

    runs = [0]
    original = CompiledFxGraph.__call__

    def counted(self: Any, inputs: Any) -> Any:
        runs[0] += 1
        return original(self, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", counted)
    return runs


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep decisions in a folder of this test's own: what an earlier one has decided is not timed again."""
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path))
    agreement.cache_clear()
    torch._dynamo.reset()
    yield
    agreement.cache_clear()


@pytest.fixture
def warnings_of_ours() -> Iterator[list[str]]:
    """Collect our warnings; the logger does not propagate once a model has been wrapped."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ort_zero")
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


def losses_of(model: nn.Module, steps: int, vocabulary: int = 97, lengths: Sequence[int] = (12, 9)) -> list[float]:
    """Train by SGD, with the same random numbers at each call; the first of two lengths comes four times of five."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, vocabulary, (3, lengths[step % 5 == 0]))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, torch.rand(()).item()]


def trained_alike(
    plain: nn.Module, steps: int, vocabulary: int = 97, lengths: Sequence[int] = (12, 9), **section: Any
) -> dict[str, Any]:
    """Train a model in eager PyTorch and unit by unit, alike; return the status, with the text of ``explain``."""
    ours = ort_zero.wrap(copy.deepcopy(plain), backend="compile", **section)
    wanted, losses = (losses_of(model, steps, vocabulary, lengths) for model in (plain, ours))
    torch.testing.assert_close(losses, wanted, rtol=2e-5, atol=0)
    assert losses[-1] == wanted[-1], "the generator of random numbers is where PyTorch leaves it"
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    running = _models[ours]
    status = running.status()
    explained = {**explanation(running), "steps": steps, "settled": status["compiled"]["settled"]}
    compiled_for: dict[str, set[Runner]] = {}
    for graph in running.engine.graphs:
        compiled_for.setdefault(graph.unit, set()).add(graph.runner)
    return {**status, "explained": "\n".join(lines_of(explained)), "compiled_for": compiled_for}


def test_dropout_and_losses_are_those_of_eager_pytorch(inductor_runs: list[int]):
    torch.manual_seed(0)
    status = trained_alike(gpt2(**GPT2), 12, compile={"runners": ["inductor"]})
    assert status["runners"]["GPT2Block"] == {"units": {"inductor": 2}, "ms": {}}
    assert "  forward: compiled by Inductor (" in status["explained"]
    assert status["backend"] == "inductor" and status["fallbacks"] == 0
    compiled = status["compiled"]
    assert compiled["failed"] == {} and compiled["settled"] and compiled["checked_runs"] >= 4
    assert inductor_runs[0] >= 2 * 2 * 12, "two layers, forward and backward"


def test_the_fastest_of_three_runs_a_layer(inductor_runs: list[int]):
    torch.manual_seed(0)
    status = trained_alike(build("llama"), 60, 211, (12, 12), compile={"runners": ["ort", "inductor", "torch"]})
    layers = status["runners"]["LlamaDecoderLayer"]
    assert {"inductor", "torch"} <= layers["ms"].keys() and inductor_runs[0] > 0
    assert status["compiled"]["settled"] and status["fallbacks"] == 0
    (runner,) = layers["units"]
    timed_longer = {name: ms for name, ms in layers["ms"].items() if ms <= 1.5 * min(layers["ms"].values())}
    assert runner == min(timed_longer, key=timed_longer.__getitem__)
    name = {"onnxruntime": "ONNX Runtime", "inductor": "Inductor", "torch": "PyTorch"}[runner]
    line = f"2 in {name}; a forward and a backward take: {name} "
    assert f"  {'PyTorch runs it whole: ' if runner == 'torch' else line}" in status["explained"]


def test_a_later_start_compiles_the_winner_alone(monkeypatch: pytest.MonkeyPatch, inductor_runs: list[int]):
    placed = Agreement.place_fastest

    def by_inductor(self: Agreement, key: str, times: Any, slowdown: float = 1.0) -> Any:
        return placed(self, key, {**times, Runner.INDUCTOR: [0.0]} if key.startswith("unit_") else times, slowdown)

    monkeypatch.setattr(Agreement, "place_fastest", by_inductor)
    section = {"compile": {"runners": ["ort", "inductor", "torch"]}}
    first = trained_alike(build("llama"), 60, 211, (12, 12), **section)
    assert first["runners"]["LlamaDecoderLayer"]["units"] == {"inductor": 2} and first["compiled"]["settled"]
    agreement.cache_clear()  # as a new process
    torch._dynamo.reset()
    inductor_runs[0] = 0
    again = trained_alike(build("llama"), 3, 211, (12, 12), **section)
    assert again["compiled_for"]["LlamaDecoderLayer"] == {Runner.INDUCTOR}
    assert again["runners"]["LlamaDecoderLayer"]["units"] == {"inductor": 2}
    assert again["backend"] == "inductor" and again["compiled"]["settled"]
    assert inductor_runs[0] == 3 * 2 * 3, "two layers and the head, forward and backward, from the first step on"


def with_results(change: Callable[[torch.Tensor], torch.Tensor], direction: str) -> Callable[..., Any]:
    """Return what compiles graphs by Inductor, and changes the first result in one direction."""
    compile_graph = inductor.compile_graph

    def wrong(module: Any, inputs: Any, way: str, returned: Any) -> Any:
        code = compile_graph(module, inputs, way, returned)

        def run(arguments: list[Any]) -> Any:
            first, *rest = code(arguments)
            return [change(first) if way == direction else first, *rest]

        return run

    return wrong


@pytest.mark.parametrize("direction, hidden", [("forward", 24), ("backward", 40)])
def test_a_wrong_result_is_caught_and_the_unit_goes_to_pytorch(
    monkeypatch: pytest.MonkeyPatch, warnings_of_ours: list[str], direction: str, hidden: int
):
    monkeypatch.setattr(inductor, "compile_graph", with_results(lambda x: x * 1.001, direction))
    torch.manual_seed(0)
    status = trained_alike(gpt2(**{**GPT2, "hidden": hidden}), 10, compile={"runners": ["inductor"]})
    failed = status["compiled"]["failed"].values()
    assert failed and all("is wrong by" in why for why in failed)
    assert status["runners"]["GPT2Block"]["units"] == {"torch": 2}
    assert any("PyTorch runs a graph of Inductor" in text for text in warnings_of_ours)


def test_what_inductor_cannot_compile_runs_in_pytorch(monkeypatch: pytest.MonkeyPatch, warnings_of_ours: list[str]):
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("no lowering")

    monkeypatch.setattr(inductor, "compile_graph", refuse)
    torch.manual_seed(0)
    status = trained_alike(gpt2(**{**GPT2, "hidden": 16}), 10, compile={"runners": ["inductor", "torch"]})
    assert status["runners"]["GPT2Block"]["units"] == {"torch": 2} and status["backend"] == "torch"
    assert warnings_of_ours.count("Inductor is left out for GPT2Block: Inductor failed: no lowering") == 1


WITHOUT = """
import json, shutil, torch, ort_zero
assert shutil.which("c++") is None and shutil.which("g++") is None
torch.manual_seed(0)
class Layer(torch.nn.Linear):
    pass
model = torch.nn.Sequential(*(Layer(16, 16) for _ in range(3)))
ort_zero.wrap(model, backend="compile", compile={"runners": ["ort", "inductor", "torch"]})
for _ in range(40):
    model(torch.randn(4, 16)).square().mean().backward()
(status,) = ort_zero.status()["models"]
print(json.dumps({"runners": status["runners"], "fallbacks": status["fallbacks"]}))
"""


def test_a_missing_compiler_is_said_once(tmp_path: Path):
    environment = {key: value for key, value in os.environ.items() if key not in ("CC", "CXX")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        capture_output=True, text=True, timeout=200, env={**environment, "PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Inductor is left out for units: there is no C++ compiler") == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fallbacks"] == 0 and "inductor" not in str(found["runners"])


def test_a_function_that_the_script_compiles(inductor_runs: list[int]):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    call = torch.compile(layers, backend="ort_zero", options={"runners": ["inductor"]})
    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        (ours,) = torch.autograd.grad(call(x).square().sum(), x)
        (wanted,) = torch.autograd.grad(layers(x).square().sum(), x)
        torch.testing.assert_close(ours, wanted)
    assert inductor_runs[0] >= 6
