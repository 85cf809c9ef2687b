"""The support table: what is accepted, what counts as untested, and what is said of a Python without ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from ort_zero import config, log
from ort_zero.cli.examinations import machine
from ort_zero.compat import torch_extensions, versions
from ort_zero.errors import BuildError, ConfigError, UnsupportedVersionError
from ort_zero.ortmodule.upstream import extensions

ALL = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "onnx": "1.23.2"}
TRAINING = {**ALL, "onnxruntime-training": "1.19.2"}
PLAIN = {**ALL, "onnxruntime": "1.32.0"}


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes these the installed versions, and this the version of Python."""

    def use(python=(3, 11, 7), all_=TRAINING, **changed):
        found = {**all_, **{name.replace("_", "-"): version for name, version in changed.items()}}

        def version(name):
            if found.get(name) is None:
                raise metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(versions.metadata, "version", version)
        monkeypatch.setattr(sys, "version_info", (*python, "final", 0))

    return use


@pytest.mark.parametrize("python", [(3, 10, 13), (3, 11, 7), (3, 12, 1), (3, 13, 0), (3, 14, 0)])
def test_plain_onnxruntime_is_accepted_on_every_python(installed, monkeypatch, python):
    installed(python, PLAIN)
    assert versions.require("compile") == () and versions.engine() == "compile" and versions.clash() is None
    assert [row.name for row in versions.findings()] == ["python", "torch", "deepspeed", "onnxruntime", "onnx"]
    for name in ("ORT_ZERO_DISABLE", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    for name in ("unsuitable_compiler", "missing_for_operators"):
        monkeypatch.setattr(torch_extensions, name, lambda: None)
    providers = subprocess.CompletedProcess([], 0, stdout="providers CPUExecutionProvider\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: providers)
    report = machine.examine()
    assert report.problems == () and report.facts["extensions"].startswith("none needed")
    assert report.facts["engine"].startswith("compile: torch.compile with plain onnxruntime")


def test_the_gpu_wheel_and_the_training_wheel_run_the_compile_backend_too(installed):
    installed(all_=ALL, onnxruntime_gpu="1.32.0")
    assert versions.require("compile") == () and "onnxruntime-gpu" in [row.name for row in versions.findings()]
    installed()
    assert versions.require("ort") == versions.require("zero") == ()
    assert versions.require("compile") == ("onnxruntime-training 1.19.2",) and versions.engine() == "compile"
    assert "onnxruntime-training" in [row.name for row in versions.findings()]


def test_a_variable_chooses_the_engine_of_auto(installed, monkeypatch):
    installed()
    monkeypatch.setenv("ORT_ZERO_BACKEND", "ortmodule")
    assert versions.engine() == config.parse({}).engine() == "ortmodule"
    assert config.parse({"backend": "compile"}).engine() == "compile"
    monkeypatch.setenv("ORT_ZERO_BACKEND", "onnxrt")
    with pytest.raises(ConfigError, match="ORT_ZERO_BACKEND=onnxrt: must be compile, ortmodule or torch"):
        config.parse({}).engine()


@pytest.mark.parametrize(("changed", "said"), [
    ({"torch": "2.6.0"}, r"torch 2\.6\.0; ort_zero works with torch>=2\.7: pip install 'torch==2\.13\.0'"),
    ({"onnxruntime": "1.18.1"}, r"onnxruntime 1\.18\.1; ort_zero works with onnxruntime>=1\.19: pip install"),
    ({"onnxruntime": None}, r"onnxruntime is not installed; .*: pip install 'onnxruntime>=1\.19'"),
    ({"onnx": None}, r"onnx is not installed; .*: pip install 'onnx>=1\.17,<2'"),
])  # fmt: skip
def test_the_compile_backend_says_what_it_lacks(installed, changed, said):
    installed((3, 13, 0), PLAIN, **changed)
    with pytest.raises(UnsupportedVersionError, match=said):
        versions.require("compile")


def test_ortmodule_beside_plain_onnxruntime_is_told_to_take_that_away_first(installed):
    installed(all_=PLAIN)
    with pytest.raises(UnsupportedVersionError) as error:
        versions.require("ort")
    assert "onnxruntime-training is not installed" in str(error.value)
    assert str(error.value).endswith("pip uninstall -y onnxruntime && pip install 'onnxruntime-training==1.19.2'")


@pytest.mark.parametrize(("package", "version"), [
    ("torch", "2.31.0"), ("deepspeed", "0.16.9"), ("onnxruntime_training", "1.22.0+cpu"),
])  # fmt: skip
def test_another_version_is_accepted_and_said_to_be_untested_once(installed, capsys, package, version):
    installed(**{package: version})
    log.set_level("INFO")  # a model of another test may have set a higher one
    found = versions.require("zero" if package == "deepspeed" else "ort")
    assert found == (f"{package.replace('_', '-')} {version}",)
    versions.say_untested.cache_clear()
    for _ in range(2):
        versions.say_untested(found)
    assert capsys.readouterr().err.count(f"{found[0]}: not among the versions") == 1


@pytest.mark.parametrize("python", [(3, 12, 1), (3, 13, 0), (3, 14, 0)])
def test_a_python_without_a_wheel_lacks_onnxruntime_alone(installed, python):
    installed(python, onnxruntime_training=None)
    assert versions.require("zero") == ()
    with pytest.raises(UnsupportedVersionError) as error:
        versions.require("ort")
    said = str(error.value)
    assert said.startswith(f"ORTModule cannot run on Python {python[0]}.{python[1]}")
    assert "install plain onnxruntime: pip install onnxruntime" in said and "\n" not in said
    with pytest.raises(BuildError) as error:  # the compilation names no wheel that cannot be installed
        extensions.extension_dir()
    assert str(error.value) == said


def test_a_build_of_ones_own_is_accepted_under_either_name_and_on_any_python(installed):
    installed((3, 13, 0), onnxruntime_training=None, onnxruntime_training_cpu="1.20.1+cpu")
    assert versions.installed("onnxruntime-training") == "1.20.1+cpu"
    assert versions.require("ort") == ("onnxruntime-training 1.20.1+cpu",)


_WRAP_WITHOUT_ORT = """
import sys
from importlib import metadata
absent = ("onnx", "onnxruntime", "onnxruntime-gpu", "onnxruntime-training", "onnxruntime-training-cpu")
sys.modules |= dict.fromkeys(absent)
found = metadata.version
def version(name):
    if name in absent:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
import torch, ort_zero
from ort_zero.errors import UnsupportedVersionError
try:
    ort_zero.wrap(torch.nn.Linear(2, 2))
except UnsupportedVersionError as error:
    print(error)
"""


@pytest.mark.seconds
def test_wrapping_a_model_without_onnx_and_onnxruntime_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", _WRAP_WITHOUT_ORT], capture_output=True, text=True)
    assert "onnxruntime is not installed" in done.stdout, done.stderr
