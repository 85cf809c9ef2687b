"""What StatisticsSubscriber writes in one process, with and without ONNX Runtime, also when things go wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from statistics_numbers import IDS, Net, assert_numbers_are_those_of_numpy, records, train
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


def test_large_parameters_are_sampled_unless_all_of_them_are_wanted(tmp_path):
    model = nn.Sequential(nn.Linear(100, 100))

    def collect(name, **options):
        session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(tmp_path / name), **options)])
        model(torch.ones(2, 100)).sum().backward()
        session.remove()
        return [r for r in records(tmp_path / name).values() if r.kind == "parameter" and r.slot == "weight"]

    sampled, full, off = collect("sample"), collect("full", parameters="full"), collect("off", parameters="off")
    assert [r.phase for r in sampled] == [r.phase for r in full] == [Phase.PARAMETER, Phase.PARAMETER_GRADIENT]
    assert all(r.shape == (100, 100) for r in sampled) and not off
    assert all(1000 < r.statistics.elements <= 4096 for r in sampled)
    assert all(r.statistics.elements == 10_000 for r in full)
    assert not model[0].weight._backward_hooks


def test_only_the_asked_steps_are_there_and_hooks_go(tmp_path):
    model = Net()
    subscriber = StatisticsSubscriber(str(tmp_path / "run"), start_step=2, end_step=4)
    GlobalSubscriberManager.subscribe(model, [subscriber])
    for _ in range(6):
        model(IDS)["logits"].sum().backward()
    assert open_run(str(tmp_path / "run")).info.steps == (2, 3)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_layer_that_is_unfrozen_has_gradients_from_then_on(tmp_path):
    model = Net()
    model.fc.requires_grad_(False)
    session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(tmp_path / "run"))])
    for step in range(2):
        model.fc.requires_grad_(step == 1)
        model(IDS)["logits"].sum().backward()
    session.remove()
    steps = [key[0] for key in records(tmp_path / "run") if key[1:3] == (Phase.PARAMETER_GRADIENT, "fc")]
    assert sorted(steps) == [1, 1]


def test_a_loss_of_two_forwards(tmp_path):
    """Both forwards come before the one backward."""
    model = Net()
    session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(tmp_path / "run"))])
    for _ in range(2):
        (model(IDS)["logits"].sum() + model(IDS.flip(0))["logits"].square().sum()).backward()
    session.remove()
    found = records(tmp_path / "run")
    for step in range(4):
        assert (step, Phase.BACKWARD, "fc", 1, "output", "") in found
        assert (step, Phase.PARAMETER_GRADIENT, "fc", 1, "parameter", "weight") in found or step % 2 == 0


def test_evaluation_has_no_gradients_and_is_a_step(tmp_path):
    model = Net()
    session = GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(tmp_path / "run"))])
    model(IDS)["logits"].sum().backward()
    with torch.no_grad():
        model(IDS)
    session.remove()
    phases = {(step, phase) for step, phase, *_ in records(tmp_path / "run")}
    assert {(1, Phase.FORWARD)} <= phases and (1, Phase.BACKWARD) not in phases


def test_a_folder_in_use_is_refused_and_emptied_only_if_it_is_ours(tmp_path):
    train(tmp_path / "run", 1)
    with pytest.raises(StatisticsError, match="override_output_dir=True"):
        StatisticsSubscriber(str(tmp_path / "run"))
    assert open_run(str(tmp_path / "run")).info.steps == (0,)
    # the name of this run is that of the run before: both are this process
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    train(tmp_path / "mine", 1, override_output_dir=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("options", [{"start_step": -1}, {"start_step": 3, "end_step": 3}, {"parameters": "some"}])
def test_values_without_sense_are_refused(tmp_path, options):
    with pytest.raises(StatisticsError, match=next(iter(options)).split("_")[0]):
        StatisticsSubscriber(str(tmp_path / "run"), **options)
    assert not (tmp_path / "run").exists()


SCRIPT = textwrap.dedent("""
    import resource, signal, sys
    {before}
    import torch
    sys.path.insert(0, {tests!r})
    from test_statistics_net import Net, IDS
    from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber
    model = Net()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber({folder!r})])
    for step in range({steps}):
        model(IDS)["logits"].sum().backward()
        print("step", step, flush=True)
    {after}
""")


def run_script(tmp_path, *, before="", after="", steps=5, **more):
    """Train in a process of its own."""
    (tmp_path / "test_statistics_net.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table, self.fc = nn.Embedding(20, 8), nn.Linear(8, 3)\n"
        "    def forward(self, ids):\n"
        "        return {'logits': self.fc(self.table(ids))}\n"
        "IDS = torch.arange(12).view(3, 4)\n"
    )
    text = SCRIPT.format(before=before, after=after, steps=steps, tests=str(tmp_path), folder=str(tmp_path / "run"))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, timeout=400,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more},
    )  # fmt: skip


def test_the_last_step_is_written_at_exit(tmp_path):
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stderr
    run = open_run(str(tmp_path / "run"))
    assert run.info.steps == tuple(range(5)) and not run.notes


def test_an_exception_of_the_script_loses_no_step(tmp_path):
    done = run_script(tmp_path, after="raise SystemError('mine')")
    assert done.returncode == 1 and "mine" in done.stderr
    assert open_run(str(tmp_path / "run")).info.steps == tuple(range(5))


def test_a_killed_run_is_readable_up_to_its_last_full_step(tmp_path):
    done = run_script(tmp_path, after="import os; os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    run = open_run(str(tmp_path / "run"))
    assert run.info.steps == tuple(range(4)) and "no end mark" in " ".join(run.notes)


def test_training_goes_on_when_the_disk_is_full(tmp_path):
    full = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))"
    # what numba caches is larger than the limit: it has to be there already, or not be written
    done = run_script(tmp_path, before=full, steps=40, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0 and "step 39" in done.stdout, done.stderr
    assert done.stderr.count("training goes on") == 1, done.stderr
    steps = open_run(str(tmp_path / "run")).info.steps
    assert steps == tuple(range(len(steps))) and 2 < len(steps) < 40


def test_training_goes_on_where_nothing_can_be_written(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    done = run_script(tmp_path)
    assert done.returncode == 0 and "step 4" in done.stdout
    assert done.stderr.count("training goes on") == 1 and str(tmp_path / "run") in done.stderr, done.stderr


def test_neither_onnxruntime_nor_deepspeed_is_needed(tmp_path):
    block = (
        "import importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.split('.')[0] in ('onnxruntime', 'onnx', 'deepspeed'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())"
    )
    done = run_script(tmp_path, before=block)
    assert done.returncode == 0, done.stderr
    folder = str(tmp_path / "run")
    told = subprocess.run(
        [sys.executable, "-c", f"import sys\n{block}\nfrom ort_zero.cli.main import main\n"
         f"status = main(['stats', 'compare', {folder!r}, {folder!r}, '--json'])\n"
         "assert 'torch' not in sys.modules\nsys.exit(status)"],
        capture_output=True, text=True, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert told.returncode == 0 and json.loads(told.stdout)["verdict"]["same"], told.stderr
