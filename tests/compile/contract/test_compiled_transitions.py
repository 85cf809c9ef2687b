"""What changes between calls is named with its values and its line; too many changes are never silent."""

from __future__ import annotations

import logging

import pytest
import torch
from older_versions import older
from torch import nn

import ort_zero
from ort_zero.compat import torch_compile


class Block(nn.Module):
    """A block whose forward reads a text, a flag and an optional argument."""

    def __init__(self):
        super().__init__()
        self.linear, self.settings, self.flag = nn.Linear(8, 8), {"step": "0"}, True

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(x) * int(self.settings["step"])
        y = y + 1 if self.flag else y
        return y if mask is None else y * mask


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, *args, **kwargs):
        return self.blocks[0](*args, **kwargs)


@pytest.fixture
def model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield ort_zero.wrap(Model(), backend="compile", compile={"place": "ort"}, log_level="DEVINFO")
    torch._dynamo.reset()


def transitions() -> list[dict]:
    return ort_zero.status()["models"][-1]["transitions"]


def step(model: nn.Module, x: torch.Tensor, **kwargs) -> None:
    model(x, **kwargs).sum().backward()


def test_each_change_is_named(model, caplog):
    x = torch.randn(4, 8)
    with caplog.at_level(logging.DEBUG, "ort_zero"):
        step(model, x)
    lines = [record.getMessage() for record in caplog.records]
    assert any("graph 1, forward: 1 segments" in line for line in lines), lines
    assert any("guards" in line and "self.settings['step'] == '0'" in line for line in lines), lines
    assert not transitions()
    model.blocks[0].flag = False
    step(model, x)
    step(model, x, mask=torch.ones(4, 8))
    with torch.no_grad():
        model(x)
    flag, mask, evaluation = transitions()
    assert flag["unit"] == "Block" and flag["mode"] == "training"
    has_lines = not older("torch", than="2.9")
    assert flag["reason"].startswith("self.flag is False, was True")
    assert not has_lines or f"{__file__[-20:]}:" in flag["reason"]
    assert "mask is a Tensor, was None" in mask["reason"]
    assert evaluation["mode"] == "inference" and "torch's setting changed: grad_mode" in evaluation["reason"]


def test_a_change_at_every_step_is_one_warning_and_the_limit_another(model, caplog, monkeypatch):
    monkeypatch.setattr(torch_compile, "RECOMPILE_LIMIT", 12)
    torch._dynamo.reset()
    config, x, eager = torch._dynamo.config, torch.randn(4, 8), Model()
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with caplog.at_level(logging.WARNING, "ort_zero"), config.patch({name: 8}):  # as before wrap() raises it
        limited = ort_zero.wrap(Model(), backend="compile", compile={"place": "ort"}, log_level="WARNING")
        eager.load_state_dict(limited.state_dict())
        for number in range(20):
            for each in (limited, eager):
                each.blocks[0].settings["step"] = str(number)
            torch.testing.assert_close(limited(x), eager(x))
            step(limited, x)
    warnings = [record.getMessage() for record in caplog.records if "graphs" in record.getMessage()]
    assert len(warnings) == 2, warnings
    assert "Block has 8 graphs" in warnings[0] and "self.settings['step'] is '7', was '6'" in warnings[0]
    assert "a buffer" in warnings[0]
    assert "no further one is made, and PyTorch runs the calls that none fits" in warnings[1]
    compiled = ort_zero.status()["models"][-1]["compiled"]
    assert compiled["units_at_limit"] == ["Block"] and compiled["dynamo_graphs"] == 12


def test_a_new_graph_is_made_without_timing_its_guards(model, monkeypatch):
    def timed(*_):
        raise AssertionError("20 ms for a line of a debug log")

    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", timed)
    torch_compile._leave_guards_untimed.cache_clear()
    again = ort_zero.wrap(Model(), backend="compile", compile={"place": "ort"})
    step(again, torch.randn(4, 8))
    assert ort_zero.status()["models"][-1]["compiled"]["dynamo_graphs"] == 1
