"""The command line: exit statuses, JSON, one-line errors, the frozen list of options."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ort_zero import __version__
from ort_zero.cli import main as cli
from ort_zero.cli.examinations import machine
from ort_zero.compat import torch_extensions, versions
from ort_zero.errors import BuildError
from ort_zero.plugin import loading
from ort_zero.runtimes.interface import Examination

GOOD = (versions.Finding(name="torch", found="2.13.0", needed=">=2.13,<2.14", ok=True, cure="pip install torch"),)
BAD = (
    versions.Finding(name="torch", found="2.4.1", needed=">=2.13,<2.14", ok=False, cure="pip install 'torch==2.13.0'"),
    versions.Finding(name="onnx", found=None, needed=">=1.17,<2", ok=False, cure="pip install 'onnx>=1.17,<2'"),
)


BUILT = Examination(compiler="g++", built=True, directory=Path("/cache/x"))


@pytest.fixture
def use_backend(monkeypatch):
    """Return a function that puts a backend in place of the real one, with some of its functions replaced."""

    def use(**functions: Callable) -> None:
        monkeypatch.setattr(loading, "load", lambda engine="ortmodule": SimpleNamespace(**functions))

    return use


@pytest.fixture
def asked(monkeypatch):
    """Answer the doctor's question for execution providers; return the list of the processes that were started."""
    started = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        started.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="noise\nproviders CPUExecutionProvider\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return started


@pytest.fixture
def healthy(monkeypatch, use_backend, asked):
    """Show the doctor a machine that lacks nothing."""
    monkeypatch.setattr(versions, "findings", lambda: GOOD)
    monkeypatch.setattr(versions, "clash", lambda: None)
    monkeypatch.setattr(versions, "engine", lambda: "ortmodule")
    use_backend(examine=lambda: BUILT)
    monkeypatch.delenv("ORT_ZERO_DISABLE", raising=False)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)


def test_doctor_of_a_healthy_machine_is_one_paste_for_a_report_and_masks_secrets(healthy, monkeypatch, capsys):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", "s3://key:hidden@host/x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    later = versions.Finding(name="later", found="2.31", needed=">=2.4", ok=True, cure="", untested=True)
    monkeypatch.setattr(versions, "findings", lambda: (*GOOD, later))
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "ready:" in out and "CPUExecutionProvider" in out and "/cache/x" in out and "untested" in out
    assert __version__ in out and "ORTMODULE_LOG_LEVEL=INFO" in out and " free" in out and "ninja" in out
    assert "ORT_ZERO_CACHE_DIR=" in out and "hidden" not in out and "AWS" not in out
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["first_fix"] is None and report["problems"] == []
    assert report["versions"][0]["name"] == "torch" and report["facts"]["extensions"] == "built, /cache/x"


@pytest.mark.parametrize("lack", ["C++ compiler", "header Python.h"])
def test_doctor_says_before_what_deepspeed_would_stop_at(healthy, monkeypatch, capsys, lack):
    monkeypatch.setattr(torch_extensions, "missing_for_operators", lambda: lack)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"no {lack}, and DeepSpeed compiles an operator of its own as soon as a rank starts on CPU" in out
    assert "fix first: apt-get install g++ python3-dev" in out


def test_doctor_names_the_first_fix_and_asks_no_process_when_packages_are_wrong(healthy, asked, monkeypatch, capsys):
    monkeypatch.setattr(versions, "findings", lambda: BAD)
    assert cli.main(["doctor"]) == 1 and not asked
    out = capsys.readouterr().out
    assert "fix first: pip install 'torch==2.13.0'" in out and "onnx is missing" in out
    assert cli.main(["doctor", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 2


@pytest.mark.parametrize(("name", "value"), [("ORT_ZERO_DISABLE", "1"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")])
def test_doctor_sees_what_switches_the_plugin_off(healthy, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    report = machine.examine()
    assert report.first_fix == f"unset {name}" and "Accelerator(cpu=True)" in report.facts["accelerate"]


@pytest.mark.parametrize("error", [BuildError("no compiler\nsecond line"), RuntimeError("a bug\nsecond line")])
def test_an_error_is_one_line_unless_debug(monkeypatch, use_backend, capsys, error):
    def fail():
        raise error

    monkeypatch.delenv("ORT_ZERO_DEBUG", raising=False)
    use_backend(examine=fail)
    assert cli.main(["doctor"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "second line" not in captured.err
    assert cli.main(["doctor", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"].endswith("second line")
    assert cli.main(["doctor", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "second line" in err


@pytest.mark.parametrize("argv", [
    [],
    ["nonsense"],
    ["doctor", "--nonsense"],
    ["doctor", "extra"],
    ["stats"],
    ["stats", "compare", "a"],
    ["stats", "compare", "a", "b", "--rtol", "-1"],
    ["stats", "merge", "--pt", "a", "--ort_dir", "b", "--output_dir", "c"],
    ["memory"],
    ["memory", "plan", "--config", "a"],
    ["memory", "plan", "--config", "a", "b", "--lr", "0.1"],
])  # fmt: skip
def test_wrong_usage_is_status_2_and_one_line(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


@pytest.mark.parametrize("package", ["torch", "pyarrow"])
def test_a_missing_package_is_named_with_the_command_that_brings_it(use_backend, capsys, package):
    def fail():
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    use_backend(examine=fail)
    assert cli.main(["doctor"]) == 2
    assert f"ort-zero doctor: this needs {package}, which is not installed: pip install " in capsys.readouterr().err


@pytest.mark.parametrize("words, options", [
    ("explain train.py --launcher torchrun --json", ("train.py", "torchrun")),
    ("explain --launcher torchrun train.py", ("train.py", "torchrun")),
    ("profile train.py --steps 2", ("train.py", None)),
    ("memory plan --config ds.json train.py --budget 55%", ("train.py", None)),
])  # fmt: skip
def test_what_follows_two_dashes_is_the_scripts(words, options):
    args = cli.make_parser().parse_args([*words.split(), "--", "--steps", "3", "--", "x"])
    assert args.arguments == ["--steps", "3", "--", "x"]
    assert (str(args.script), args.launcher) == options
