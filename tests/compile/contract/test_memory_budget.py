"""A memory budget holds: what units keep for the backward is what was predicted, and results stay."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import ort_zero
from ort_zero import config, log
from ort_zero.compile.memory import MemoryBudget
from ort_zero.errors import ConfigError
from ort_zero.units.unit_forward import UnitForward

TOKENS = torch.randint(0, 90, (2, 32), generator=torch.Generator().manual_seed(0))


class KeptByUnits:
    """Sums the bytes that compiled units save for the backward, without each unit's own parameters and arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.saved: dict[int, torch.Tensor] = {}
        self._apart: list[set[int]] = []
        call = UnitForward.__call__

        def noted(forward: UnitForward, *args: Any, **kwargs: Any) -> Any:
            if isinstance(forward.unit, hf.PreTrainedModel):  # it leaves caches out, and is no unit
                return call(forward, *args, **kwargs)
            apart = [*forward.unit.parameters(), *_tensors(args), *_tensors(list(kwargs.values()))]
            self._apart.append({tensor.untyped_storage().data_ptr() for tensor in apart})
            results = call(forward, *args, **kwargs)
            self._apart.pop()
            return results

        monkeypatch.setattr(UnitForward, "__call__", noted)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd saves."""
        address = tensor.untyped_storage().data_ptr()
        if self._apart and address not in self._apart[-1]:
            self.saved[address] = tensor
        return tensor

    def step(self, model: nn.Module) -> tuple[float, int]:
        """Run a step; return the loss, and the bytes that the units kept between forward and backward."""
        self.saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
        kept = sum(tensor.untyped_storage().nbytes() for tensor in self.saved.values())
        self.saved.clear()
        loss.backward()
        return loss.item(), kept


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [each for value in values for each in _tensors(value)] if isinstance(values, (list, tuple)) else []


def trained(
    monkeypatch: pytest.MonkeyPatch, dropout: float = 0.0, **section: Any
) -> tuple[list[float], int, dict[str, Any]]:
    """Train a GPT-2 five steps; return the losses, the most that a step kept, and the status of the memory."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=90, n_positions=32, n_embd=32, n_layer=3, n_head=2)
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(**sizes, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    compiled = ort_zero.wrap(model, backend="compile", compile={"place": "ort"}, **{"log_level": "WARNING", **section})
    losses, kept = [], 0
    meter = KeptByUnits(monkeypatch)
    for _ in range(5):
        loss, of_step = meter.step(compiled)
        losses.append(loss)
        kept = max(kept, of_step)
        optimizer.step()
        optimizer.zero_grad()
    monkeypatch.undo()
    status = ort_zero.status()["models"][-1]
    assert status["fallbacks"] == 0 and status["compiled"]["segments_in_torch"] == 0 < status["compiled"]["segments"]
    return losses, kept, status["memory"][0]


def test_a_budget_holds_as_predicted(monkeypatch):
    losses, all_kept, _ = trained(monkeypatch)
    with_budget, kept, memory = trained(monkeypatch, memory={"recompute": "auto", "budget": "55%"})
    assert with_budget == pytest.approx(losses, rel=1e-5)
    assert memory["kept"] <= 0.55 * memory["kept_without"] and memory["fraction"] < 1
    assert kept == pytest.approx(memory["kept"], rel=0.01)
    assert all_kept == pytest.approx(memory["kept_without"], rel=0.01)


def test_all_keeps_less_and_bytes_are_a_budget_too(monkeypatch):
    losses, all_kept, _ = trained(monkeypatch)
    least_losses, least, memory = trained(monkeypatch, memory={"recompute": "all"})
    assert least < 0.3 * all_kept and memory["fraction"] < 0.01
    budget = (all_kept + least) // 2
    in_bytes, kept, memory = trained(monkeypatch, memory={"recompute": "auto", "budget": budget})
    assert least < kept <= budget and memory["kept"] <= budget
    assert least_losses == pytest.approx(losses, rel=1e-5) and in_bytes == pytest.approx(losses, rel=1e-5)


def test_without_a_budget_forwards_keep_what_the_free_memory_takes(monkeypatch, capsys):
    log.get_logger().setLevel(logging.INFO)
    losses, all_kept, _ = trained(monkeypatch)
    plenty, kept, memory = trained(monkeypatch, memory={"recompute": "auto"}, log_level="INFO")
    assert kept == pytest.approx(all_kept, rel=0.01) and memory["kept"] == memory["kept_without"]
    assert "are free: forwards keep" in capsys.readouterr().err
    monkeypatch.setattr("ort_zero.compile.memory.free_memory", lambda: all_kept // 2)
    little, kept, memory = trained(monkeypatch, memory={"recompute": "auto"})
    assert kept <= 0.8 * (all_kept // 2) and memory["kept"] == pytest.approx(kept, rel=0.01)
    assert plenty == pytest.approx(losses, rel=1e-5) and little == pytest.approx(losses, rel=1e-5)


def test_a_budget_that_cannot_be_met_is_one_warning(monkeypatch, capsys):
    log.get_logger().setLevel(logging.WARNING)
    # the choice of what is dropped must be kept
    _, _, memory = trained(monkeypatch, dropout=0.1, memory={"recompute": "auto", "budget": "1%"})
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "memory.budget" in line]
    assert "1% is below what the units keep" in warning and memory["kept"] > 0


def test_random_numbers_are_not_drawn_again(monkeypatch):
    losses, _, _ = trained(monkeypatch, dropout=0.1)
    least, kept, _ = trained(monkeypatch, dropout=0.1, memory={"recompute": "all"})
    assert least == pytest.approx(losses, rel=1e-5) and kept > 0


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ({"budget": "60%"}, 'belongs to "recompute": "auto"'),
        ({"recompute": "auto", "budget": "101%"}, r"ort_zero\.memory\.budget"),
        ({"recompute": "auto", "budget": "much"}, r"ort_zero\.memory\.budget"),
        ({"recompute": "FastGelu+:1:12"}, "a plan belongs to onnxruntime-training"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(memory, words):
    with pytest.raises(ConfigError, match=words):
        section = config.parse({"backend": "compile", "memory": memory})
        section.engine()
        MemoryBudget(section.memory.recompute, section.memory.budget)


PLANNED = """
import json, sys, torch, ort_zero, transformers as hf
torch.manual_seed(0)
model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=90, n_positions=32, n_embd=32, n_layer=3, n_head=2))
ort_zero.wrap(model, backend="compile", memory=json.loads(sys.argv[1]) if sys.argv[1:] else {})
for step in range(3):
    ids = torch.randint(0, 90, (2, 32))
    model(ids, labels=ids).loss.backward()
assert ("freed memory is kept" in ort_zero.status()["cpu_memory"]) == (not sys.argv[1:])
print("MEMORY", json.dumps(ort_zero.status()["models"][-1]["memory"][0]))
"""


def in_folder(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the folder of the script."""
    (folder / "script.py").write_text(PLANNED)
    (folder / "ds.json").write_text('{"ort_zero": {"backend": "compile"}}')
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=folder)


def test_the_command_plans_what_a_training_then_keeps(tmp_path: Path):
    plan = ["-m", "ort_zero", "memory", "plan", "--config", "ds.json", "script.py"]
    done = in_folder(tmp_path, *plan, "--budget", "60%", "--budget", "1kB", "--json")
    assert done.returncode == 0, done.stderr
    planned, least = json.loads(done.stdout)["plans"]
    trained = in_folder(tmp_path, "script.py", json.dumps({"recompute": "auto", "budget": "60%"}))
    assert trained.returncode == 0, trained.stderr
    memory = json.loads(trained.stdout.partition("MEMORY ")[2])
    assert {key: memory[key] for key in ("kept", "kept_without", "fraction")} == {
        key: planned[key] for key in ("kept", "kept_without", "fraction")
    }
    assert planned["fits"] and not least["fits"] and least["kept"] < planned["kept"] < planned["kept_without"]
    assert sum(module["freed"] for module in least["modules"]) >= least["kept_without"] - least["kept"]
    again = {module["module"]: module for module in least["modules"]}
    assert again["attn.c_attn"]["operators"] == {"addmm": 3} and again["attn.c_attn"]["flops_share"] > 0.03
    text = in_folder(tmp_path, *plan, "--budget", "60%").stdout
    assert "budget 60%" in text and "GPT2Block.attn" in text
    done = in_folder(tmp_path, *plan, "--budget", "sixty")
    assert done.returncode == 2 and "--budget: 'sixty' is not a size" in done.stderr, done.stderr
