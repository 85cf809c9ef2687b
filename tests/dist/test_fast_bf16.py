"""The line that tells a run in fp32 of bf16, where the processor has AMX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ort_zero.cli.examinations import machine
from ort_zero.plugin import fast_bf16

SAID = "multiplies bf16 several times as fast (AMX)"


@pytest.fixture
def amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the kernel for a processor with AMX."""
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: One\nflags\t\t: fpu avx512f amx_bf16 amx_tile\n")
    monkeypatch.setattr(fast_bf16.env, "cpu_info", lambda: file.read_text() if file.exists() else "")
    fast_bf16._say.cache_clear()
    return file


def trained(autocast: bool = False, section: dict[str, Any] | None = None, **config: Any) -> None:
    model = nn.Linear(4, 4)
    config |= {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    config |= {"zero_allow_untested_optimizer": True, "ort_zero": section or {"backend": "torch"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            engine(torch.randn(2, 4).to(next(model.parameters()).dtype))
    engine.destroy()


def test_a_run_in_fp32_reads_once_what_bf16_would_give(amx: Path, one_rank: None, capfd: pytest.CaptureFixture):
    for _ in range(2):
        trained()
    said = capfd.readouterr().err
    assert said.count(SAID) == 1
    assert '"torch_autocast": {"enabled": true' in said and '"bf16": {"enabled": true}' in said and "rounding" in said


@pytest.mark.parametrize(
    "options",
    [
        {"autocast": True},
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"bf16": {"enabled": True}},
        {"section": {"compile": {"place": "ort"}}},
    ],
    ids=str,
)
def test_others_do_not(amx: Path, one_rank: None, capfd: pytest.CaptureFixture, options: dict[str, Any]):
    trained(**options)
    assert SAID not in capfd.readouterr().err


def test_doctor_says_it(amx: Path):
    assert machine.examine().facts["bf16"].startswith('several times as fast as fp32 (AMX), with "torch_autocast"')
    amx.write_text("flags\t\t: fpu avx512f avx512_bf16\n")
    assert "bf16" not in machine.examine().facts
    amx.unlink()
    assert "bf16" not in machine.examine().facts
