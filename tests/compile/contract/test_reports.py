"""What people see of the compile backend: explain, profile, reproducers, saved models, refused options."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch
from older_versions import skip_unless_torch_can

import ort_zero
from ort_zero.compile.conversion import registry
from ort_zero.compile.engine import CompileEngine
from ort_zero.compile.settings import Settings
from ort_zero.plugin import compile_progress

SCRIPT = """
import torch
import ort_zero

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x):
        h = torch.relu(self.first(x))
        if h.sum().item() < 0:
            h = h * 2
        return self.second(torch.linalg.matrix_exp(h.reshape(-1, 4, 4)).reshape(-1, 16))

torch.manual_seed(0)
model = ort_zero.wrap(Net(), backend="compile", compile={"place": "ort"})
for step in range(40):
    model(torch.randn(4, 8)).square().mean().backward()
    print("step", step)
"""


MEASURED = SCRIPT.replace(', compile={"place": "ort"}', "")
"""The parts of this one's model run where they are faster: all of so small a model goes back to PyTorch."""


def command(folder: Path, *arguments: str, script: str = SCRIPT) -> subprocess.CompletedProcess:
    """Run a command of ort_zero on the script; without arguments run the script itself."""
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "ORT_ZERO_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    words = ["-m", "ort_zero", *arguments] if arguments else ["script.py"]
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True, text=True, timeout=300, cwd=folder, env=environment,
    )  # fmt: skip


def test_explain_names_breaks_operators_and_shares(tmp_path: Path):
    done = command(tmp_path, "explain", "script.py", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == "Net" and report["flop_share"] > 0.5
    (unit,) = report["units"].values()
    assert {graph["direction"] for graph in unit["graphs"]} == {"forward", "backward"}
    assert unit["in_torch"]["aten.linalg_matrix_exp.default"]["why"] == "no conversion"
    (broken,) = [each for each in report["graph_breaks"] if "item" in each["reason"]]
    assert broken["where"].endswith("script.py:13")


def test_explain_runs_until_it_is_settled_what_runs_where(tmp_path: Path):
    reports = []
    for _ in range(2):
        done = command(tmp_path, "explain", "script.py", "--json", script=MEASURED)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    for report in reports:
        assert report["settled"] and report["units_in_torch"]["Net"] and report["flop_share"] == 0
    assert 40 > reports[0]["steps"] >= reports[1]["steps"], "decisions are kept for the next start"
    done = command(tmp_path, "explain", "script.py", script=MEASURED.replace("range(40)", "range(4)"))
    assert done.returncode == 0 and "not settled when the script ended, after 3 steps" in done.stdout


def test_a_unit_that_goes_back_to_pytorch_has_a_line_and_the_share_comes_when_it_is_settled(tmp_path: Path):
    done = command(tmp_path, script=MEASURED)
    assert done.returncode == 0, done.stderr
    table, back, settled = (
        done.stderr.index(words)
        for words in (
            "not settled yet",
            "PyTorch runs Net from now on: ONNX Runtime saves ",
            "settled what runs where, of Net: ONNX Runtime runs 0 % of the floating-point operations; PyTorch runs Net",
        )
    )
    assert table < back < settled and done.stderr.count("% of the floating-point operations") == 1


def test_explain_ends_in_what_a_user_can_set(tmp_path: Path):
    done = command(tmp_path, "explain", "script.py")
    assert done.returncode == 0, done.stderr
    *lines, place, exclude = done.stdout.splitlines()
    assert '"compile": {"place": "ort"}' in place and '"exclude": ["PATTERN"]' in exclude
    assert any("script.py:13, Python runs between two graphs" in line for line in lines)
    assert not any(word in done.stdout for word in ("ort_zero/", "a conversion would", "Explanation", "Hint"))


def test_profile_divides_a_compiled_step(tmp_path: Path):
    wrapped = 'ort_zero.wrap(Net(), backend="compile", compile={"place": "ort"})'
    alone = SCRIPT.replace(wrapped, 'torch.compile(Net(), backend="aot_eager")')
    skip_unless_torch_can(lambda: exec(alone, {}))
    options = ("--steps", "2", "--warmup", "3", "--trace", "trace.json", "--json")
    done = command(tmp_path, "profile", "script.py", *options)
    assert done.returncode == 0, done.stderr
    profiled = json.loads(done.stdout)
    assert profiled["runners"] == {"Net": {"units": {"onnxruntime": 1}, "ms": {}}} and profiled["settled"]
    kernels = {part["name"] for part in profiled["ort"]["parts"] if part["kind"] == "kernels"}
    assert kernels & {"Gemm", "FusedMatMul", "MatMul"} and "aten::linalg_matrix_exp" in kernels
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        "ONNX Runtime, rank 0",
        "PyTorch, rank 0",
    ]
    names = [{event["name"] for event in events if event["pid"] == pid} for pid in (0, 1)]
    assert any(name.startswith("segment ") and name.endswith(" nodes") for name in names[0] - names[1])
    assert all({"step", "forward", "backward"} <= of_backend for of_backend in names)


def test_a_wrong_segment_leaves_a_reproducer_that_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    aten = torch.ops.aten
    convert_tanh = registry.table()[aten.tanh.default]
    monkeypatch.setitem(
        registry.table(),
        aten.tanh.default,
        lambda b, out, x: b.op("Mul", convert_tanh(b, out, x), b.constant(1.001, out.dtype)),
    )
    compiler = CompileEngine(Settings(place="ort", reproducers=str(tmp_path))).compiler()
    linear, x = torch.nn.Linear(32, 32), torch.randn(4, 32)
    compiled = torch.compile(lambda x: torch.tanh(linear(x)), backend=compiler)
    assert torch.equal(compiled(x), torch.tanh(linear(x)))
    ((key, reason),) = compiler.engine.as_dict()["failed"].items()
    assert "wrong by 1.0e-03 of its size" in reason
    done = subprocess.run(
        [sys.executable, "reproduce.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path / key
    )
    assert done.returncode == 0, done.stderr
    assert "onnxruntime and PyTorch differ by" in done.stdout and "e-04, largest element" in done.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_first_step_shows_on_a_terminal_which_unit_is_compiled(monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    model = torch.nn.Sequential(*(torch.nn.Linear(n, n + 1) for n in (4, 5, 6)))
    model = ort_zero.wrap(model, log_level="WARNING", compile={"place": "ort"})
    silent, shown = Terminal(), Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", silent)
    monkeypatch.setattr(compile_progress, "_SILENT_SECONDS", 1000.0)
    model(torch.randn(2, 4)).sum().backward()
    assert silent.getvalue() == ""
    torch._dynamo.reset()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(compile_progress, "_SILENT_SECONDS", 0.0)
    model(torch.randn(2, 4)).sum().backward()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    assert all(f"compiling Linear, unit {number}/3" in text for number in (1, 2, 3))
    assert shown.getvalue().endswith("\x1b[2K")  # the bar has gone away


def test_models_of_segments_are_saved(tmp_path: Path):
    compiler = CompileEngine(Settings(place="ort", save_onnx=str(tmp_path))).compiler()
    compiled = torch.compile(lambda x: torch.tanh(x) * 2, backend=compiler)
    compiled(torch.randn(3))
    (file,) = tmp_path.glob("*.onnx")
    model = onnx.load(file)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Tanh", "Mul"]


def test_explain_tells_of_a_script_that_fails(tmp_path: Path):
    (tmp_path / "failing.py").write_text("raise SystemExit('no data')")
    done = command(tmp_path, "explain", "failing.py")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "failing.py has no report: it ended with status 1" in done.stderr and "no data" in done.stderr
