"""``ort-zero memory plan`` with scripts that train nothing: what it starts, says, writes, refuses, and returns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ort_zero import env
from ort_zero.cli import main as cli
from ort_zero.errors import MemoryPlanError
from ort_zero.ortmodule.recompute import plan_command, trial
from ort_zero.ortmodule.recompute.trial_report import TrialRun
from ort_zero.utils import script_process

MIB = 2**20
SCRIPT = """\
import json, os, sys
from ort_zero.ortmodule.recompute.trial import TrialResult, current_trial
budget = current_trial().request.memory.get("budget")
plan = current_trial().request.memory["recompute"]
print("arguments", sys.argv[1:])
with open(os.environ["SEEN"], "a") as file:
    request = current_trial().request
    file.write(json.dumps([request.memory, request.steps, sys.argv[1:], request.fuse_loss]) + "\\n")
result = TrialResult("done", measured_bytes={measured} * 2**20 if plan != "off" else 200 * 2**20)
result.step_seconds = [9.0, 0.25, 0.5] if plan == "off" else [9.0, 0.5, 0.75]
if current_trial().request.steps == 0:
    result.measured_bytes, result.step_seconds = None, []
if budget == "1%":
    result = TrialResult("failed", error="it needs 90 MiB at least", error_type="MemoryPlanError")
elif plan != "off":
    path = [[200 * 2**20, 0.0, []], [150 * 2**20, 0.1, ["A+:1:2"]], [100 * 2**20, 0.2, ["A+:1:4"]]]
    row = dict(cluster="A+", kind=1, frequency=4, saving=2**20, symbolic="4 x b", requested=4, actual=4, seconds=0.2,
               note="")
    result.decision = dict(
        mode="auto", plan={plan}, table=[row], unconstrained_bytes=200 * 2**20, predicted_bytes=100 * 2**20,
        predicted_at="n", measured_bytes=None, least_bytes=90 * 2**20, budget_bytes=120 * 2**20,
        recompute_seconds=0.2, sizes={{}}, seconds=0.1, kept="plans/1.plan.json", found=False, path=path)
current_trial().write(result)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a config, and a script whose plan is measured to take 101 MiB."""
    (tmp_path / "ds.json").write_text(json.dumps({"ort_zero": {}}))
    script(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return tmp_path


def script(folder: Path, measured: int = 101, plan: list | None = None, text: str = SCRIPT) -> None:
    plan = ["A+:1:4"] if plan is None else plan
    (folder / "train.py").write_text(text.format(measured=measured, plan=plan) if text is SCRIPT else text)


def run(*more: str) -> int:
    return cli.main(["memory", "plan", "--config", "ds.json", "--script", "train.py", *more])


def seen(folder: Path) -> list:
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


def test_a_plan_is_printed_written_and_within_the_budget(folder, capsys):
    assert run("--budget", "60%", "--level", "1", "--out", "plan.json", "--", "--lr", "1", "x y") == 0
    out = capsys.readouterr().out
    assert json.loads((folder / "plan.json").read_text()) == ["A+:1:4"]
    for words in ("budget 60%", "4 x b", '"memory": {"recompute": ["A+:1:4"]}', "plans/1.plan.json", "101.0 MiB",
                  "within the budget, as predicted", "250.0 ms", "500.0 ms", "2.00", "0.51",
                  '{"recompute": "auto", "budget": "60%", "level": 1}'):  # fmt: skip
        assert words in out, words
    off, auto = seen(folder)
    assert off == [{"recompute": "off"}, 3, ["--lr", "1", "x y"], None]
    assert auto == [{"recompute": "auto", "budget": "60%", "level": 1}, 3, ["--lr", "1", "x y"], None]


def test_json_is_one_object(folder, capsys):
    assert run("--budget", "60%", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"ok", "wrong", "script", "config", "command", "runs", "out", "plot"} and found["ok"] is True
    assert found["command"][1:] == ["train.py"] and [one["name"] for one in found["runs"]] == [
        "without recomputation", "budget 60%",
    ]  # fmt: skip
    assert set(found["runs"][1]) == {
        "name", "kind", "memory", "fuse_loss", "decision", "measured_bytes", "seconds_per_step", "step_seconds",
        "ranks", "error", "predicted_bytes", "off",
    }  # fmt: skip
    assert found["runs"][1]["measured_bytes"] == 101 * MIB == found["runs"][1]["decision"]["measured_bytes"]


@pytest.mark.parametrize(("measured", "words"), [(125, "above it by 4.2%"), (117, "17% above the predicted one")])
def test_what_does_not_hold_is_status_1(folder, capsys, measured, words):
    script(folder, measured=measured)
    assert run("--budget", "60%") == 1
    assert words in capsys.readouterr().out


def test_one_budget_that_is_too_small_leaves_the_others(folder, capsys):
    assert run("--budget", "1%", "--budget", "60%") == 2
    out = capsys.readouterr().out
    assert "budget 1%: it needs 90 MiB at least" in out and "plan: " in out
    assert run("--budget", "1%") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "ort-zero memory plan: it needs 90 MiB at least\n"


def test_the_budget_and_level_of_the_section_are_taken(folder):
    (folder / "ds.json").write_text(json.dumps({"ort_zero": {"memory": {"budget": "70%", "level": 2}}}))
    assert run() == 0
    assert seen(folder)[1][0] == {"recompute": "auto", "budget": "70%", "level": 2}
    (folder / "ds.json").write_text(json.dumps({"ort_zero": {}}))
    assert run() == 0
    assert seen(folder)[3][0] == {"recompute": "auto"}


def test_a_plot_measures_points_between(folder, capsys):
    script(folder, plan=["A+:1:3"])
    assert run("--budget", "60%", "--plot", "p.svg") == 0
    assert [one[0]["recompute"] for one in seen(folder)] == ["off", "auto", ["A+:1:2"], ["A+:1:4"]]
    assert "</svg>" in (folder / "p.svg").read_text() and "plot: p.svg" in capsys.readouterr().out


def test_points_of_a_graph_with_head_and_loss_in_one_node_have_that_node(folder, capsys):
    text = SCRIPT.replace("found=False,", "found=False, fused_loss='32 MiB of logits',").format(
        measured=101, plan=["A+:1:3"]
    )
    script(folder, text=text)
    assert run("--budget", "60%", "--plot", "p.svg") == 0
    assert [one[3] for one in seen(folder)] == [None, None, "on", "on"]
    out = capsys.readouterr().out
    assert "head and loss in one node: 32 MiB of logits" in out and '"ortmodule": {"fuse_loss": "on"}' in out


def test_without_measuring_there_is_one_run(folder, capsys):
    assert run("--budget", "60%", "--no-measure", "--plot", "p.svg") == 0
    assert [one[1] for one in seen(folder)] == [0]
    assert "predicted, not measured" in capsys.readouterr().out and "</svg>" in (folder / "p.svg").read_text()


def test_no_recomputation_at_all_leaves_no_file(folder, capsys):
    script(folder, plan=[])
    assert run("--budget", "60%", "--out", "plan.json") == 0
    assert not (folder / "plan.json").exists() and "nothing is computed again" in capsys.readouterr().out


def test_files_are_replaced_only_on_demand(folder, capsys):
    (folder / "plan.json").write_text("mine")
    (folder / "p.svg").write_text("mine")
    for option, name in (("--out", "plan.json"), ("--plot", "p.svg")):
        assert run("--budget", "60%", option, name) == 2
        assert f"{option} {name} exists; give --overwrite" in capsys.readouterr().err
    assert not (folder / "seen").exists()  # before anything ran
    assert run("--budget", "60%", "--out", "plan.json", "--overwrite") == 0
    assert json.loads((folder / "plan.json").read_text()) == ["A+:1:4"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--budget", "lots"], "--budget: 'lots' is no amount of memory"),
        (["--budget", "120%"], "more than the graph needs"),
        (["--script", "none.py"], "the script none.py does not exist"),
        (["--config", "none.json"], "the config none.json cannot be read: No such file"),
        (["--config", "train.py"], "train.py is not JSON"),
        (["--config", "plain.json"], 'has no enabled section "ort_zero"'),
        (["--config", "torch.json"], '"ortmodule": {"enabled": false}'),
        (["--config", "wrong.json"], "wrong.json: ort_zero.memory.budge: unknown key"),
        (["--out", "no/plan.json"], "there is no folder no"),
        (["--out", "."], "is a folder"),
        (["--out", "a.json", "--budget", "60%", "--budget", "70%"], "--out holds one plan"),
        (["--plot", "p.png"], "name the file .svg"),
        (["--launcher", "nosuchlauncher -n 2"], "there is no program 'nosuchlauncher'"),
        (["--launcher", "a 'b"], "No closing quotation"),
        (["--launcher", ""], "--launcher is empty"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(folder, capsys, more, words):
    (folder / "plain.json").write_text("{}")
    (folder / "torch.json").write_text(json.dumps({"ort_zero": {"ortmodule": {"enabled": False}}}))
    (folder / "wrong.json").write_text(json.dumps({"ort_zero": {"memory": {"budge": "1GiB"}}}))
    assert run(*more) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not (folder / "seen").exists()


def test_a_script_that_fails_shows_its_last_lines(folder, capsys):
    script(folder, text="print('line one')\nraise SystemExit('no data in /data')")
    assert run("--budget", "60%") == 2
    err = capsys.readouterr().err
    assert "  | line one\n" in err and "  | no data in /data\n" in err
    assert err.endswith("without recomputation: train.py ended with status 1 before its steps were done\n")


def test_a_script_that_trains_nothing_is_told(folder, capsys):
    script(folder, text="print('hello')")
    assert run("--budget", "60%") == 2
    assert "made no DeepSpeed engine that runs in ONNX Runtime; it has to use the section" in capsys.readouterr().err
    script(folder, text="from ort_zero.ortmodule.recompute.trial import *\ncurrent_trial().monitor('Net')")
    assert run("--budget", "60%") == 2
    assert "ended before 3 training steps of Net" in capsys.readouterr().err


def test_an_error_of_ours_is_repeated_in_one_line(folder, capsys):
    text = "from ort_zero.ortmodule.recompute.trial import *\n"
    text += "current_trial().write(TrialResult('failed', error='{}', error_type='{}'))"
    script(folder, text=text.format("a loop", "ExportError"))
    assert run("--budget", "60%") == 2
    assert "ort-zero memory plan: without recomputation: a loop" in capsys.readouterr().err


def test_a_script_that_does_not_end_is_ended(folder, monkeypatch):
    monkeypatch.setattr(script_process, "GRACE_SECONDS", 0.5)
    script(folder, text=SCRIPT.format(measured=101, plan=["A+:1:4"]) + "\nimport time\ntime.sleep(60)\n")
    began = time.monotonic()
    assert run("--budget", "60%") == 0
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_command_leaves_no_script_behind(folder, number):
    script(folder, text="import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "ort_zero", "memory", "plan", "--config", "ds.json", "--script", "train.py"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        command = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        until = time.monotonic() + 30
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        command.send_signal(number)
        assert command.wait(timeout=200) == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    finally:
        command.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_while_the_script_is_being_started_ends_it(folder, monkeypatch, number, raised):
    """The script runs already, and its Popen has not returned: on a busy machine that takes a while."""
    script(folder, text="import time\ntime.sleep(60)\n")
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), number)

    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(script_process.subprocess, "Popen", Interrupted)
    try:
        with pytest.raises(raised):
            script_process.run_script([sys.executable, "train.py"], folder / "log", {}, lambda: False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert started[0].poll() is not None
    assert {n: signal.getsignal(n) for n in handlers} == handlers


def test_a_launcher_stands_before_the_script(folder):
    (folder / "launch").write_text(f'#!/bin/sh\necho "$@" >> launched\nshift 2\nexec {sys.executable} "$@"\n')
    (folder / "launch").chmod(0o755)
    assert run("--budget", "60%", "--launcher", f"'{folder}/launch' --num_gpus 2", "--", "-v") == 0
    assert (folder / "launched").read_text().splitlines() == ["--num_gpus 2 train.py -v"] * 2


def test_the_most_of_all_ranks_counts(folder):
    result = trial.TrialResult
    done = [result("done", rank, measured_bytes=b, step_seconds=[5.0, s, 2 * s], decision={"plan": []})
            for rank, b, s in ((0, 10, 0.5), (1, 12, 0.25))]  # fmt: skip
    noted = plan_command._noted(TrialRun("", "budget", {}), done)
    assert (noted.measured_bytes, noted.seconds_per_step, noted.ranks) == (12, 0.5, 2)


def test_points_are_even_and_of_the_path():
    path = [[100, 0, []], *([100 - n, n, [f"A+:1:{n}"]] for n in range(1, 81))]
    decision = {"path": path, "unconstrained_bytes": 100, "plan": ["A+:1:40"]}
    assert plan_command.between(decision, 4) == [["A+:1:20"], ["A+:1:60"], ["A+:1:80"]]
    assert plan_command.between({**decision, "path": []}, 4) == [] == plan_command.between(decision, 0)


def test_a_stale_order_is_an_error_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv(env.MEMORY_TRIAL, str(tmp_path / "gone"))
    with pytest.raises(MemoryPlanError, match="unset it"):
        trial.current_trial()
    monkeypatch.delenv(env.MEMORY_TRIAL)
    assert trial.current_trial() is None


def test_planning_needs_neither_torch_nor_onnx_in_its_own_process():
    code = "import sys, ort_zero.ortmodule.recompute.plan_report\n"
    code += "print(*{'torch', 'onnx', 'onnxruntime', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
