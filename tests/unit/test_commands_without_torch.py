"""The commands that read and write checkpoints start without torch and other packages that take long to import."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import checkpoint_files
import deepspeed_states
import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

HEAVY = ("torch", "deepspeed", "transformers", "onnx", "onnxruntime", "fsspec", "rich", "packaging")
_CODE = """
import sys
from ort_zero.cli.main import main
code = main(sys.argv[2:])
heavy = [name for name in sys.argv[1].split(",") if name in sys.modules]
sys.exit(f"imported: {heavy}" if heavy else code)
"""


def run(*args: object, heavy: tuple[str, ...] = HEAVY, timeout: float = 120) -> str:
    """Run a command of ``ort-zero`` and return what it prints; fails if it imported one of the packages `heavy`."""
    command = [sys.executable, "-c", _CODE, ",".join(heavy), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["ours", "zero2", "zero3"])
def test_aggregate_verify_and_ls_import_no_torch(tmp_path, kind):
    source, out = tmp_path / "run" / "global_step7", tmp_path / "out"
    if kind == "ours":
        checkpoint_files.write(source)
    else:
        deepspeed_states.write(source, int(kind[-1]))
    (tmp_path / "run" / "latest").write_text("global_step7")
    heavy = HEAVY if kind == "ours" else (*HEAVY, "pydantic")
    assert json.loads(run("verify", source, "--json", heavy=heavy))["ok"]
    assert "global_step7" in run("ls", tmp_path / "run", heavy=heavy)
    report = json.loads(run("aggregate", source, out, "--dtype", "bf16", "--json", heavy=heavy))
    found = load_file(out / "model.safetensors")
    assert len(found) == report["tensors"] and torch.bfloat16 in {value.dtype for value in found.values()}


_FOREIGN = """
import sys
from importlib import metadata
from ort_zero.cli.main import main
code = main(sys.argv[2:])
names = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
owners = metadata.packages_distributions()
foreign = {owner.lower().replace("_", "-") for name in names for owner in owners.get(name, ())}
foreign -= set(sys.argv[1].split(","))
sys.exit(f"not installed with ort-zero alone: {sorted(foreign)}" if foreign else code)
"""


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
    parser.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    return [Requirement(line).name for line in parser["options"]["install_requires"].strip().splitlines()]


@pytest.mark.parametrize("golden", ["checkpoint_v5", "deepspeed_zero2", "deepspeed_zero3"])
def test_an_installation_without_extras_verifies_and_aggregates(tmp_path, golden):
    source = Path(__file__).resolve().parents[1] / "golden" / golden
    for command in (("verify", source), ("aggregate", source, tmp_path / "out")):
        words = [sys.executable, "-c", _FOREIGN, ",".join(installed_alone()), *map(str, command)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_says_what_works_without_torch():
    code = "import sys; sys.modules['torch'] = None\n"
    code += "from ort_zero.compat import versions; installed = versions.installed\n"
    code += "versions.installed = lambda name: None if name == 'torch' else installed(name)\n"
    code += "from ort_zero.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "without torch: aggregate, verify and ls work" in done.stdout, done.stderr


def test_torchs_own_format_imports_torch_only_then(tmp_path):
    deepspeed_states.write(tmp_path / "c", 2)
    run("aggregate", tmp_path / "c", tmp_path / "out", "--format", "torch", heavy=("deepspeed", "transformers"))
    assert torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)["norm.bias"].shape == (7,)


def test_the_script_of_the_package_starts_without_them_too():
    script = Path(sys.executable).with_name("ort-zero")
    text = f"import sys; sys.argv = [{str(script)!r}, '--version']; import runpy\n"
    text += f"try:\n    runpy.run_path({str(script)!r}, run_name='__main__')\nexcept SystemExit as end:\n    pass\n"
    text += f"print([name for name in {(*HEAVY, 'numpy', 'pydantic')!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
