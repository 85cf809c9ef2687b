"""An exception within a unit is PyTorch's own, with the user's file and line, and the unit stays compiled."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import pytest
import torch
from older_versions import older
from torch import nn

import ort_zero


class Fails(nn.Module):
    """A block that fails in the way that it is told."""

    def __init__(self):
        super().__init__()
        self.linear, self.words = nn.Linear(8, 8), nn.Embedding(10, 8)

    def forward(self, x: Any, how: str = "", ids: torch.Tensor | None = None) -> torch.Tensor:
        if how == "raises":
            raise ValueError("from the model")
        if how == "asserts":
            assert x.shape[0] == 3, "three rows are needed"
        if how == "lacks a key":
            return {}["a"]  # type: ignore[return-value]
        if how == "looks a word up":
            return self.words(ids) + self.linear(x)
        return self.linear(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Fails() for _ in range(2))

    def forward(self, x: Any, **options: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, **options)
        return x


GOOD = torch.ones(4, 8)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "another size": (torch.ones(4, 7), {}),
    "another dtype": (torch.ones(4, 8, dtype=torch.float64), {}),
    "no tensor": ("text", {}),
    "raises": (GOOD, {"how": "raises"}),
    "asserts": (GOOD, {"how": "asserts"}),
    "lacks a key": (GOOD, {"how": "lacks a key"}),
    "a word that is not there": (GOOD, {"how": "looks a word up", "ids": torch.tensor([0, 1, 2, 11])}),
}


def error_of(model: nn.Module, x: Any, options: dict[str, Any]) -> tuple[type, str, int | None]:
    """Return the class, the text and the line in this file of the error of a call."""
    with pytest.raises(Exception) as caught:
        model(x, **options)
    lines = [frame.lineno for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == __file__]
    return type(caught.value), str(caught.value), lines[-1]


def test_errors_are_those_of_pytorch_and_the_units_stay():
    torch._dynamo.reset()
    eager = Model()
    compiled = ort_zero.wrap(Model(), backend="compile", compile={"place": "ort"}, log_level="ERROR")
    compiled.load_state_dict(eager.state_dict())
    compiled(GOOD).sum().backward()
    first, last = inspect.getsourcelines(Fails.forward)[1], inspect.getsourcelines(Model)[1]
    for name, (x, options) in CASES.items():
        wanted = error_of(eager, x, options)
        assert first < (wanted[2] or 0) < last, name
        ours = error_of(compiled, x, options)
        if name == "no tensor" and older("torch", than="2.8"):  # which names the line of the def
            ours = (*ours[:2], wanted[2])
        assert ours == wanted, name
    torch.testing.assert_close(compiled(GOOD), eager(GOOD))
    status = ort_zero.status()["models"][-1]
    assert status["units"] == ["blocks.0", "blocks.1"] and status["failures"] == {}
