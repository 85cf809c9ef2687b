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


def test_several_modules_of_one_class_are_no_recompilation(capfd, caplog):
    torch._dynamo.reset()
    widths = [8 * n for n in range(1, 6)]
    layers = (nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
    several = ort_zero.wrap(nn.Sequential(*layers), compile={"place": "ort"}, log_level="WARNING")
    step(several, torch.randn(4, 8))
    step(several, torch.randn(4, 8))
    assert not transitions()
    step(several, torch.randn(6, 8))
    # of this batch size, and of no layer beside it
    assert {each["reason"] for each in transitions()} == {"size 0 of input is 6, was 4"}
    said = capfd.readouterr().err + caplog.text
    assert "WARNING" not in said and "graphs" not in said, said


def test_the_limit_is_one_warning_of_what_changes(model, caplog, monkeypatch):
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
    (warning,) = warnings
    assert "Block has 12 graphs, and no further one is made: PyTorch runs the calls that none fits" in warning
    assert "self.settings['step'] is '12', was '11'" in warning and "a buffer" in warning
    compiled = ort_zero.status()["models"][-1]["compiled"]
    assert compiled["units_at_limit"] == ["Block"] and compiled["dynamo_graphs"] == 12
