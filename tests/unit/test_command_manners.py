"""What all commands do alike: misspelt names, --quiet, completions, scripts that need a launcher, what is left out."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import checkpoint_files
import pytest

from ort_zero.cli import main as cli


@pytest.mark.parametrize(("words", "answer"), [
    (["agregate", "a", "b"], "there is no agregate; did you mean aggregate?"),
    (["stats", "compair", "a", "b"], "there is no compair; did you mean compare?"),
    (["convert", "a", "b", "--to", "deepsped"], "there is no deepsped; did you mean deepspeed?"),
    (["zzzz"], "invalid choice"),
])  # fmt: skip
def test_a_misspelt_name_is_answered_with_the_right_one(words, answer, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and answer in line


def three_checkpoints(folder: Path) -> Path:
    """Write three checkpoints, of which the file latest names the second one."""
    for step in (1, 2, 3):
        checkpoint_files.write(folder / f"global_step{step}")
    (folder / "latest").write_text("global_step2")
    return folder


def test_quiet_answers_with_the_exit_status_alone(tmp_path, capsys):
    folder = three_checkpoints(tmp_path)
    assert cli.main(["verify", str(folder), "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    shard = next((folder / "global_step2").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert cli.main(["verify", str(folder), "--quiet"]) == 1
    assert capsys.readouterr() == ("", "")
    assert cli.main(["ls", str(tmp_path / "nothing"), "-q"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert cli.main(["verify", str(folder), "-q", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"]


def on_a_terminal(*words: str, **variables: str) -> str:
    """Return what a command prints to a terminal."""
    reader, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", **variables}
    subprocess.run([sys.executable, "-m", "ort_zero", *words], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    text = os.read(reader, 1 << 16).decode()
    os.close(reader)
    return text


def test_verdicts_have_colours_on_a_terminal_alone(tmp_path, capsys):
    folder = three_checkpoints(tmp_path)
    text = on_a_terminal("verify", str(folder))
    assert "\x1b[32mok\x1b[0m: " in text and "\x1b[33mnote\x1b[0m: " in text
    assert "\x1b[" not in on_a_terminal("verify", str(folder), NO_COLOR="1")
    assert json.loads(on_a_terminal("verify", str(folder), "--json"))["ok"]
    assert cli.main(["verify", str(folder)]) == 0
    assert "\x1b[" not in capsys.readouterr().out


def test_verify_says_which_checkpoints_it_has_not_verified(tmp_path, capsys):
    folder = three_checkpoints(tmp_path)
    assert cli.main(["verify", str(folder)]) == 0
    assert "not verified: global_step1, global_step3 (--tag names" in capsys.readouterr().out
    assert cli.main(["verify", str(folder), "--json"]) == 0
    assert any("global_step1" in note for note in json.loads(capsys.readouterr().out)["notes"])
    for words in ([str(folder / "global_step1")], [str(folder), "--tag", "global_step1"]):
        assert cli.main(["verify", *words]) == 0
        assert "not verified" not in capsys.readouterr().out


def test_a_shell_gets_completions_of_commands_and_options():
    pytest.importorskip("argcomplete")
    for line, wanted in (
        ("ort-zero agg", "aggregate"),
        ("ort-zero stats com", "compare"),
        ("ort-zero ls --j", "--json"),
    ):
        variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
        done = subprocess.run(
            ["bash", "-c", f"exec {sys.executable} -m ort_zero 8>&1 9>/dev/null >/dev/null"],
            env={**os.environ, **variables, "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": "bash"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert [word.strip() for word in done.stdout.splitlines()] == [wanted], done.stderr


@pytest.mark.seconds
@pytest.mark.skipif(find_spec("mpi4py") is not None, reason="mpi4py is installed, and stands in for a launcher")
@pytest.mark.parametrize("command", ["explain", "profile"])
def test_a_script_without_its_launcher_is_one_line(tmp_path, command):
    (tmp_path / "ds.json").write_text(json.dumps({"ort_zero": {}}))
    code = "import deepspeed\ndeepspeed.init_distributed()\n" if command == "explain" else "from mpi4py import MPI\n"
    (tmp_path / "train.py").write_text(code)
    words = [sys.executable, "-m", "ort_zero", *command.split(), "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "--launcher 'deepspeed --num_gpus 2'" in line
