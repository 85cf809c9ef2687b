"""What StatisticsSubscriber writes in one process, with and without ONNX Runtime, also when things go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from statistics_numbers import IDS, Net, assert_numbers_are_those_of_numpy, records
from torch import nn

import ort_zero
from ort_zero.errors import StatisticsError
from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber
from ort_zero.statistics.files import open_run
from ort_zero.statistics.records import Phase

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("wrap", [lambda model: model, ort_zero.wrap], ids=["torch", "ort"])
def test_numbers_are_those_of_numpy(tmp_path, wrap):
    assert_numbers_are_those_of_numpy(tmp_path / "run", wrap)


@pytest.fixture
def collecting(tmp_path):
    """Return a context in which statistics of a model are collected, and a function that returns the records."""

    @contextlib.contextmanager
    def collect(model, name="run", **options):
        session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(tmp_path / name), **options)])
        found = {}
        yield found
        session.remove()
        found.update(records(tmp_path / name))

    return collect


def test_large_parameters_are_sampled_unless_all_of_them_are_wanted(collecting):
    model = nn.Sequential(nn.Linear(100, 100))
    weights = {}
    for name in ("sample", "full", "off"):
        with collecting(model, name, parameters=name) as found:
            model(torch.ones(2, 100)).sum().backward()
        weights[name] = [r for r in found.values() if r.kind == "parameter" and r.slot == "weight"]
    for name, least, most in (("sample", 1000, 4096), ("full", 10_000, 10_000)):
        assert [r.phase for r in weights[name]] == [Phase.PARAMETER, Phase.PARAMETER_GRADIENT]
        assert all(r.shape == (100, 100) and least <= r.statistics.elements <= most for r in weights[name])
    assert not weights["off"] and not model[0].weight._backward_hooks


def test_only_the_asked_steps_are_there_and_hooks_go(tmp_path):
    model = Net()
    subscriber = StatisticsSubscriber(str(tmp_path / "run"), start_step=2, end_step=4)
    GlobalSubscriberManager.subscribe(model, [subscriber])
    for _ in range(6):
        model(IDS)["logits"].sum().backward()
    assert open_run(str(tmp_path / "run")).info.steps == (2, 3)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_layer_that_is_unfrozen_has_gradients_from_then_on(collecting):
    model = Net()
    model.fc.requires_grad_(False)
    with collecting(model) as found:
        for step in range(2):
            model.fc.requires_grad_(step == 1)
            model(IDS)["logits"].sum().backward()
    steps = [key[0] for key in found if key[1:3] == (Phase.PARAMETER_GRADIENT, "fc")]
    assert sorted(steps) == [1, 1]


def test_a_loss_of_two_forwards(collecting):
    """Both forwards come before the one backward."""
    model = Net()
    with collecting(model) as found:
        for _ in range(2):
            (model(IDS)["logits"].sum() + model(IDS.flip(0))["logits"].square().sum()).backward()
    for step in range(4):
        assert (step, Phase.BACKWARD, "fc", 1, "output", "") in found
        assert (step, Phase.PARAMETER_GRADIENT, "fc", 1, "parameter", "weight") in found or step % 2 == 0


def test_evaluation_has_no_gradients_and_is_a_step(collecting):
    model = Net()
    with collecting(model) as found:
        model(IDS)["logits"].sum().backward()
        with torch.no_grad():
            model(IDS)
    phases = {(step, phase) for step, phase, *_ in found}
    assert {(1, Phase.FORWARD)} <= phases and (1, Phase.BACKWARD) not in phases


@pytest.mark.parametrize("options", [{"start_step": -1}, {"start_step": 3, "end_step": 3}, {"parameters": "some"}])
def test_values_without_sense_are_refused(tmp_path, options):
    with pytest.raises(StatisticsError, match=next(iter(options)).split("_")[0]):
        StatisticsSubscriber(str(tmp_path / "run"), **options)
    assert not (tmp_path / "run").exists()


SCRIPT = """
{before}
from statistics_numbers import IDS, Net
from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber
model = Net()
GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber({folder!r})])
for step in range(5):
    model(IDS)["logits"].sum().backward()
    print("step", step, flush=True)
{after}
"""


def run_python(code: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/unit")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)


def run_script(tmp_path: Path, *, before: str = "", after: str = "") -> subprocess.CompletedProcess:
    """Train in a process of its own."""
    return run_python(SCRIPT.format(before=before, after=after, folder=str(tmp_path / "run")))


@pytest.mark.parametrize(("after", "status"), [("", 0), ("raise SystemError('mine')", 1)])
def test_no_step_is_lost_when_a_script_ends(tmp_path, after, status):
    done = run_script(tmp_path, after=after)
    assert done.returncode == status and ("mine" in done.stderr) == (status == 1), done.stderr
    run = open_run(str(tmp_path / "run"))
    assert run.info.steps == tuple(range(5)) and not run.notes


def test_training_goes_on_where_nothing_can_be_written(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    done = run_script(tmp_path)
    assert done.returncode == 0 and "step 4" in done.stdout
    assert done.stderr.count("training goes on") == 1 and str(tmp_path / "run") in done.stderr, done.stderr


def test_neither_onnxruntime_nor_deepspeed_is_needed(tmp_path):
    block = "import sys\nsys.modules |= dict.fromkeys(('onnxruntime', 'onnx', 'deepspeed'))"
    done = run_script(tmp_path, before=block)
    assert done.returncode == 0, done.stderr
    folder = str(tmp_path / "run")
    told = run_python(
        f"{block}\nfrom ort_zero.cli.main import main\n"
        f"status = main(['stats', 'compare', {folder!r}, {folder!r}, '--json'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)"
    )
    assert told.returncode == 0 and json.loads(told.stdout)["verdict"]["same"], told.stderr
