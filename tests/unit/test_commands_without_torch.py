"""The commands that read and write checkpoints start without torch and other packages that take long to import."""

from __future__ import annotations

import configparser
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from deepspeed_states import GOLDEN
from packaging.requirements import Requirement
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]

SLOW = ("torch", "deepspeed", "transformers", "onnx", "onnxruntime", "fsspec", "rich", "packaging")
"""Packages that take long to import, those among them that come with ort_zero too."""
_CODE = """
import sys
from importlib import metadata
from ort_zero.cli.main import main
slow, installed = (set(words.split(",")) for words in sys.argv[1:3])
for command in sys.argv[3].split(";"):
    if code := main(command.split()):
        sys.exit(code)
names = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
owners = metadata.packages_distributions()
foreign = {owner.lower().replace("_", "-") for name in names for owner in owners.get(name, ())}
if names & slow:
    sys.exit(f"imported: {sorted(names & slow)}")
if installed != {""} and foreign - installed:
    sys.exit(f"not installed with ort-zero alone: {sorted(foreign - installed)}")
"""


def run(*commands: str, slow: tuple[str, ...], installed: Iterable[str] = ()) -> str:
    """Run commands of ``ort-zero`` in one process and return what they print.

    Fails if one of the packages `slow` was imported, or one that does not belong to the distributions `installed`.
    """
    command = [sys.executable, "-c", _CODE, ",".join(slow), ",".join(installed), ";".join(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("golden", ["checkpoint_v5", "deepspeed_zero2", "deepspeed_zero3"])
def test_an_installation_without_extras_verifies_lists_and_aggregates_without_slow_imports(tmp_path, golden):
    source, out = GOLDEN / golden, tmp_path / "out"
    slow = SLOW if golden == "checkpoint_v5" else (*SLOW, "pydantic")
    commands = f"verify {source}", f"ls {source}", f"aggregate {source} {out} --dtype bf16"
    said = run(*commands, slow=slow, installed=installed_alone())
    found = load_file(out / "model.safetensors")
    assert said.startswith("ok: ") and "saved" in said and torch.bfloat16 in {value.dtype for value in found.values()}


def installed_alone() -> set[str]:
    """Return the distributions that an installation without extras brings, those needed by others among them."""
    found, waiting = {"ort-zero", "setuptools", "pip"}, list(core_requirements())
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or ())
            waiting += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def core_requirements() -> list[str]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return [Requirement(line).name for line in parser["options"]["install_requires"].strip().splitlines()]


def test_doctor_says_what_works_without_torch():
    code = "import sys; sys.modules['torch'] = None\n"
    code += "from ort_zero.compat import versions; installed = versions.installed\n"
    code += "versions.installed = lambda name: None if name == 'torch' else installed(name)\n"
    code += "from ort_zero.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "without torch: aggregate, verify and ls work" in done.stdout, done.stderr


def test_torchs_own_format_imports_torch_only_then(tmp_path):
    run(f"aggregate {GOLDEN / 'deepspeed_zero2'} {tmp_path} --format torch", slow=("deepspeed", "transformers"))
    assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["norm.bias"].shape == (7,)


def test_the_script_of_the_package_starts_without_them_too():
    script = Path(sys.executable).with_name("ort-zero")
    text = f"import sys; sys.argv = [{str(script)!r}, '--version']; import runpy\n"
    text += f"try:\n    runpy.run_path({str(script)!r}, run_name='__main__')\nexcept SystemExit as end:\n    pass\n"
    text += f"print([name for name in {(*SLOW, 'numpy', 'pydantic')!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
