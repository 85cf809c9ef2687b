"""One command runs an unchanged script twice, once with a change, and says where the two runs begin to differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ort_zero.cli import main as cli

pytestmark = pytest.mark.seconds
"""Each test starts a script twice."""

SCRIPT = """
import os, sys, time
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x) * float(os.environ.get("SCALE", "1"))

model = nn.Sequential(nn.Linear(16, 16), Block(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    model(torch.zeros(1, 16))
print(sys.executable)
for step in range(int(sys.argv[1])):
    with torch.autocast("cpu", torch.bfloat16, "autocast" in sys.argv):
        loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
    if step == 1 and "FAIL" in os.environ:
        raise ValueError("no more data")
    if step == 1 and "HANG" in os.environ:
        time.sleep(1000)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def run(script, *words: str) -> int:
    return cli.main(["stats", "run", str(script), "--output", str(script.parent / "runs"), *words])


def test_a_change_that_matters_is_named(script, capsys):
    assert run(script, "--env", "SCALE=1.01", "--steps", "3", "--json", "--", "100") == 1
    found = json.loads(capsys.readouterr().out)
    verdict = found["verdict"]
    assert (verdict["module"], verdict["direction"], verdict["difference"]["step"]) == ("1", "forward", 0)
    assert found["steps"] == [0, 1, 2] and found["change"] == "SCALE=1.01"
    for name in "ab":  # the script ends with the last collected step
        assert (script.parent / f"runs/{name}.log").read_text().splitlines()[1:] == ["step 0", "step 1", "step 2"]
    assert run(script, "--env", "SCALE=2", "--", "1") == 2
    message = capsys.readouterr().err
    assert f"--output {script.parent / 'runs'} is not empty: delete it" in message and "another folder" in message


def test_the_operator_that_differs_is_named_with_its_line(script, capsys):
    assert run(script, "--env", "SCALE=1.01", "--operators", "auto", "--json", "--", "100") == 1
    found = json.loads(capsys.readouterr().out)
    operators, text = found["operators"], found["verdict"]["text"]
    line = next(number for number, code in enumerate(SCRIPT.splitlines(), 1) if "SCALE" in code)
    assert operators["first"] == "aten.mul(8x16), forward of 1, output[0]"
    assert operators["line"] == f"{script}:{line} in forward" and operators["line"] in text
    assert operators["step"] == 0 and operators["only"] == [[], []] and 0.005 < operators["error"] < 0.02
    assert operators == json.loads((script.parent / "runs/operators.json").read_text())


def test_a_module_that_the_model_lacks_ends_the_first_run_at_once(script, capsys):
    assert run(script, "--env", "SCALE=1.01", "--operators", "1.linaer", "--", "100") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.endswith("--operators 1.linaer: Sequential has no such module; the nearest are 1.linear")
    assert "step" not in (script.parent / "runs/a.log").read_text() and not (script.parent / "runs/b.log").exists()


def test_another_interpreter_that_computes_alike_is_the_same(script, capsys):
    python = str(Path(sys.executable).with_name(f"python{sys.version_info.major}"))
    assert run(script, "--python", python, "--", "2") == 0
    text = capsys.readouterr().out
    assert text.startswith("same") and f"b ran with {python}:" in text
    assert all(f"note: {script.parent / 'runs' / name} has 2 of --steps 5: the script ended" in text for name in "ab")
    logs = [(script.parent / f"runs/{name}.log").read_text() for name in "ab"]
    assert sys.executable in logs[0] and python in logs[1] and python not in logs[0].split()


def test_a_launcher_of_another_environment_is_refused(script, tmp_path, capsys):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    assert run(script, "--python", str(python), "--launcher", "torchrun --nproc_per_node 1") == 2
    assert f"there is no program 'torchrun' beside {python}" in capsys.readouterr().err


def test_without_autocast_a_half_precision_run_is_not_the_same(script, capsys):
    assert run(script, "--against", "fp32", "--steps", "2", "--json", "--", "2", "autocast") == 1
    found = json.loads(capsys.readouterr().out)
    first = found["verdict"]["difference"]
    assert (first["a"]["dtype"], first["b"]["dtype"]) == ("bfloat16", "float32"), found["verdict"]
    assert found["beginnings"] == []


def test_against_torch_a_script_compiles_nothing_by_our_backend(script, capsys):
    compiled = 'model = torch.compile(model, backend="ort_zero")\nprint("runs", type(model).__name__)\n'
    script.write_text(SCRIPT.replace("optimizer = ", f"{compiled}optimizer = "))
    assert run(script, "--against", "torch", "--steps", "1", "--", "1") == 0
    logs = [(script.parent / f"runs/{name}.log").read_text() for name in "ab"]
    assert ["runs OptimizedModule" in log for log in logs] == [True, False] and "runs Sequential" in logs[1]


def test_what_differs_to_begin_with_is_listed_first(script, capsys):
    script.write_text(SCRIPT.replace("model = nn", "torch.manual_seed(int(os.environ.get('SEED', '0')))\nmodel = nn"))
    assert run(script, "--env", "SEED=1", "--env", "KMP_SETTINGS=0", "--steps", "2", "--", "2") == 1
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith("to begin with: ")]
    assert lines.index(told[0]) < next(number for number, line in enumerate(lines) if line.startswith("compared:"))
    assert [line.split(": ")[1] for line in told] == [
        "other initial weights", "other batches from step 0 on", "other random states",
        "other values in environment variables",
    ]  # fmt: skip
    assert "0.weight" in told[0] and told[2].endswith(": torch") and "KMP_SETTINGS not set and 0" in told[3]


def test_a_run_that_fails_is_named_with_its_last_lines(script, capsys):
    assert run(script, "--env", "FAIL=1", "--", "5") == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert "run with FAIL=1, ended with status 1" in last and "b.log" in last
    assert lines[-1].strip() == "| ValueError: no more data"


USES_A_LIBRARY = """
import os, sys
import torch
from torch import nn
sys.path.insert(0, os.environ["LIBRARY"])
import library

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.pixels = nn.Embedding(50, 16), nn.Linear(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, input_ids, pixel_values):
        return self.block(self.words(input_ids).mean(1) + self.pixels(pixel_values).mean(0)).square().mean()

model = Model()
library.initialize(model)
generator = torch.Generator().manual_seed(0)
for step in range(3):
    texts = torch.randint(0, 50, (4, 12), generator=generator)
    model(**library.process(texts, torch.randn(4, 8, generator=generator))).backward()
"""
LIBRARY = """
from torch import nn

def initialize(model):
    for module in model.modules():
        for child in ALL_OF_THEM:
            if isinstance(child, nn.Linear):
                nn.init.normal_(child.weight, std=0.02)

def process(texts, images):
    return {"input_ids": texts[:SAMPLES], "pixel_values": images}
"""


@pytest.mark.parametrize(
    ("fault", "direction", "told", "begins"),
    [
        (
            {"ALL_OF_THEM": "module.modules()"}, "forward", "start from different parameters",
            ["other initial weights", "other random states"],
        ),
        ({"SAMPLES": "1"}, "input", "input_ids has shape (1, 12) and (4, 12)", ["other batches from step 0 on"]),
    ],
    ids=["weights initialized twice (transformers 17877)", "one text of a batch (transformers 34204)"],
)  # fmt: skip
def test_a_library_of_another_version_is_told_apart(script, fault, direction, told, begins, monkeypatch, capsys):
    script.write_text(USES_A_LIBRARY)
    healthy = {"ALL_OF_THEM": "[module]", "SAMPLES": "4"}
    for name, values in (("old", healthy | fault), ("new", healthy)):
        (script.parent / name).mkdir()
        text = LIBRARY
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        (script.parent / name / "library.py").write_text(text)
    monkeypatch.setenv("LIBRARY", str(script.parent / "old"))
    assert run(script, "--env", f"LIBRARY={script.parent / 'new'}", "--steps", "2", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert told in found["verdict"]["text"] and found["verdict"]["difference"]["step"] == 0
    assert found["verdict"]["direction"] == direction
    assert [text.split(":")[0] for text in found["beginnings"]] == begins


def test_a_run_that_hangs_is_ended_and_named_with_its_line(script, capsys):
    assert run(script, "--env", "HANG=1", "--timeout", "4", "--", "5") == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert "run with HANG=1, began no step for 4 s" in last and last.endswith("runs/b.stacks")
    line = next(number for number, code in enumerate(SCRIPT.splitlines(), 1) if "sleep" in code)
    where = f"rank 0: step 1: takes part in no collective: {script}:{line} in <module>: time.sleep(1000)"
    assert lines[-1].endswith(where) and "time.sleep(1000)" in (script.parent / "runs/b.stacks").read_text()


@pytest.mark.parametrize(("words", "answer"), [
    ((), "what should the second run change?"),
    (("--change", "zero_optimization"), "is not KEY=VALUE"),
    (("--against", "zero9"), "did you mean zero0?"),
    (("--python", "/no/such/python"), "no program /no/such/python"),
])  # fmt: skip
def test_wrong_usage_is_one_line(script, words, answer, capsys):
    try:
        status = run(script, *words)
    except SystemExit as end:
        status = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2 and answer in line


def test_another_config_of_a_script_without_deepspeed_is_an_error(script, capsys):
    assert run(script, "--change", "zero_optimization.stage=0", "--steps", "2", "--", "2") == 2
    assert "gives no config to DeepSpeed" in capsys.readouterr().err
